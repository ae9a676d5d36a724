"""Ids of strings are XXH64 of their UTF-8 bytes, whatever holds the strings."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import check_refusal
from tierbed import InputError, OptionError, hash_keys

WORD = 2**64
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
TEXTS = [
    "",
    "a",
    "é",
    "漢字",
    "😀",
    "a\0b",
    "user-1",
    "x" * 31,
    "x" * 32,
    "ab" * 50,
    "ÿ\u0800\uffff\U00010000\U0010ffff",
]

# of the specification's author and of python-xxhash's documentation
VECTORS = [
    ("", 0, 0xEF46DB3751D8E999),
    ("abc", 0, 0x44BC2CF5AD770999),
    ("Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1),
    ("xxhash", 0, 0x32DD38952C4BC720),
    ("xxhash", 20141025, 0xB559B98D844E0635),
]


def rotated(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) % WORD


def turned(total: int, word: int) -> int:
    return rotated((total + word * P2) % WORD, 31) * P1 % WORD


def xxh64(data: bytes, seed: int) -> int:
    """The specification, word by word."""
    total, at = (seed + P5) % WORD, 0
    if len(data) >= 32:
        sums = [(seed + more) % WORD for more in (P1 + P2, P2, 0, -P1)]
        while len(data) - at >= 32:
            words = struct.unpack_from("<4Q", data, at)
            sums = [turned(one, word) for one, word in zip(sums, words, strict=True)]
            at += 32
        total = sum(rotated(one, by) for one, by in zip(sums, (1, 7, 12, 18), strict=True)) % WORD
        for one in sums:
            total = ((total ^ turned(0, one)) * P1 + P4) % WORD
    total = (total + len(data)) % WORD
    while len(data) - at >= 8:
        total = (rotated(total ^ turned(0, struct.unpack_from("<Q", data, at)[0]), 27) * P1 + P4) % WORD
        at += 8
    if len(data) - at >= 4:
        total = (rotated(total ^ struct.unpack_from("<I", data, at)[0] * P1 % WORD, 23) * P2 + P3) % WORD
        at += 4
    for byte in data[at:]:
        total = rotated(total ^ byte * P5 % WORD, 11) * P1 % WORD
    total = (total ^ total >> 33) * P2 % WORD
    total = (total ^ total >> 29) * P3 % WORD
    return total ^ total >> 32


def ids(texts: list[str | bytes], seed: int = 0) -> list[int]:
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    return np.array([xxh64(one, seed % WORD) for one in data], np.uint64).view(np.int64).tolist()


def test_published_vectors() -> None:
    for text, seed, expected in VECTORS:
        assert xxh64(text.encode(), seed) == hash_keys([text], seed).item() % WORD == expected


@given(st.lists(st.binary(max_size=100) | st.text(max_size=40), max_size=5), st.integers(-(2**63), 2**64 - 1))
def test_any_bytes_text_and_seed_are_as_in_the_specification(texts: list[str | bytes], seed: int) -> None:
    assert hash_keys(texts, seed).tolist() == ids(texts, seed)


@given(st.lists(st.text(max_size=12).map(lambda text: text.rstrip("\0")), min_size=1))
def test_arrays_of_characters_have_the_ids_of_their_text(texts: list[str]) -> None:
    expected = ids(texts)  # type: ignore[arg-type]
    given = np.array(texts)
    assert hash_keys(given).tolist() == expected
    assert hash_keys(given.astype(given.dtype.newbyteorder(">"))).tolist() == expected
    assert hash_keys(np.repeat(given, 2)[::2]).tolist() == expected
    assert hash_keys(given.astype(object)).tolist() == expected


class Column:
    """A column of another library, which Arrow and NumPy can read."""

    ndim = 1

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __arrow_array__(self, type: Any = None) -> Any:
        return pa.array(self.values, type, from_pandas=True)

    def to_numpy(self) -> Any:
        return np.array(self.values, object)


COLUMN, ENCODED = pa.array(TEXTS), [text.encode() for text in TEXTS]
HOLDERS = {
    "list": TEXTS,
    "tuple of bytes": tuple(ENCODED),
    "objects": np.array(TEXTS, object),
    "U": np.array(TEXTS),
    "S": np.array(ENCODED),
    "StringDType": np.array(TEXTS, np.dtypes.StringDType()),
    "string": COLUMN,
    "large_string": COLUMN.cast(pa.large_string()),
    "binary": COLUMN.cast(pa.binary()),
    "large_binary": COLUMN.cast(pa.large_binary()),
    "string_view": COLUMN.cast(pa.string_view()),
    "slice": pa.array(["before", *TEXTS, "after"])[1:-1],
    "column of text": Column(TEXTS),
    "column of both": Column([TEXTS[0], *ENCODED[1:]]),
    "dictionary": pa.array(["before", *TEXTS])[1:].dictionary_encode(),
    "chunks": pa.chunked_array([TEXTS[:3], [], TEXTS[3:]]),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_string_has_one_id_whatever_holds_it(holder: Any) -> None:
    found = hash_keys(holder)
    assert found.dtype == torch.int64
    assert found.tolist() == ids(TEXTS)  # type: ignore[arg-type]


def test_many_strings_in_a_shape_are_each_hashed() -> None:
    texts = np.array([f"user-{i}" for i in range(50_000)]).reshape(100, 500)
    found = hash_keys(texts, 3)
    assert found.shape == (100, 500)
    assert found.unique().numel() == 50_000
    assert [found[7, 9].item()] == ids(["user-3509"], 3)
    assert torch.equal(found, hash_keys(texts.tolist(), 3))


def test_what_is_empty_has_no_ids() -> None:
    column = pa.array([], pa.string())
    for empty in ([], np.array([], "U5"), np.array([], object), column, pa.chunked_array([column]), [[], []]):
        assert hash_keys(empty).numel() == 0
    assert hash_keys(np.array("a")).tolist() == ids(["a"])[0]


VALUES = ["a", None, "b"]
NULLS = {
    "list": VALUES,
    "mask": np.ma.MaskedArray(["a", "hidden", "b"], [False, True, False]),
    "StringDType": np.array(VALUES, np.dtypes.StringDType(na_object=None)),
    "NaN": np.array(["a", float("nan"), "b"], object),
    "column": pa.array(VALUES),
    "slice": pa.array([None, *VALUES])[1:],
    "column of another library": Column(["a", float("nan"), "b"]),
    "chunks": pa.chunked_array([["a"], [None, "b"]], pa.large_string()),
    "dictionary": pa.array(VALUES).dictionary_encode(),
    "null in a dictionary": pa.DictionaryArray.from_arrays([0, 1, 2], pa.array(VALUES)),
}


@pytest.mark.parametrize("holder", NULLS.values(), ids=NULLS)
def test_nulls_have_the_id_that_is_given_for_them_or_are_refused(holder: Any) -> None:
    one, two = ids(["a", "b"])
    assert hash_keys(holder, null=-7).tolist() == [one, -7, two]
    with pytest.raises(InputError, match="element 1 is null; give null="):
        hash_keys(holder)
    assert hash_keys(pa.nulls(2), null=5).tolist() == [5, 5]


REFUSALS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("text", {}, InputError, "got str"),
    (torch.ones(2), {}, InputError, "got Tensor"),
    (np.arange(3), {}, InputError, "got ndarray of int64"),
    (["a", 5], {}, InputError, "element 1 is 5"),
    ([["a"], "b"], {}, InputError, "element 0 is"),
    (pa.array([1, 2]), {}, InputError, "of int64"),
    (pa.array([["a"]]), {}, InputError, "of list"),
    (Column(["a", 5]), {}, InputError, "element 1 is 5"),
    (pa.array([1, 2]).dictionary_encode(), {}, InputError, "of int64"),
    (["a", "\ud800"], {}, InputError, "element 1, '\\ud800'"),
    (np.array(["a", "\ud800"]), {}, InputError, "element 1 has a character that is not Unicode"),
    (np.array([0x61, 0x110000], np.uint32).view("U1"), {}, InputError, "element 1 has a character that is not Unicode"),
    *(
        (["a"], given, OptionError, f"{next(iter(given))}=")
        for given in ({"seed": 2**64}, {"seed": 0.5}, {"null": 2**63}, {"null": "x"})
    ),
]


@pytest.mark.parametrize(("values", "given", "kind", "named"), REFUSALS)
def test_what_is_no_string_or_no_number_of_64_bits_is_refused(
    values: Any, given: dict[str, Any], kind: type[Exception], named: str
) -> None:
    check_refusal((lambda: hash_keys(values, **given), kind, named))
