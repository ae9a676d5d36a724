"""Row files hold what was written, find every row and no other, and never make a reader leave the file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.examples import examples
from tierbed import InputError, ServingError, StoreError
from tierbed.engine import _core
from tierbed.engine.checksum import crc32
from tierbed.engine.options.initializers import make_normal_initializer
from tierbed.engine.options.table_spec import make_table_spec
from tierbed.serving.row_file import (
    ENCODINGS,
    TRAILER_BYTES,
    RowFile,
    RowFileWriter,
    compute_bound,
    decode,
    encode,
    hash_rows,
)
from tierbed.serving.settings import pack_settings

DIM = 5
TOP, OTHER = 2**64 - 1, 2**62 + 1


def write(
    path: Path, hashes: Any, encoding: str = "int8", kind: str = "base", deleted: Any = (), pieces: int = 1
) -> NDArray[np.uint8]:
    """Write rows that differ, for ascending hashes. Returns the encoded rows."""
    path.unlink(missing_ok=True)
    hashes = np.array(hashes, np.uint64)
    values = np.random.default_rng(len(hashes)).normal(size=(len(hashes), DIM)).astype(np.float32)
    rows = encode(values, encoding, 0, hashes)
    is_deleted = np.isin(hashes, np.array(deleted, np.uint64))
    writer = RowFileWriter(path, DIM, encoding, kind, 0)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.abort)
        for part in np.array_split(np.arange(len(hashes)), pieces):
            writer.append_encoded(hashes[part], rows[part], is_deleted[part] if kind == "delta" else None)
        counts = len(hashes) - is_deleted.sum(), is_deleted.sum()
        assert writer.close() == (path.stat().st_size, crc32(path.read_bytes()), *counts)
    return rows


def find_keys(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The keys of table 0 with these hashes: the inverse of `hash_row` in engine/ops/kernels/hash.h."""
    x = hashes ^ hashes >> np.uint64(31) ^ hashes >> np.uint64(62)
    with np.errstate(over="ignore"):
        x = x * np.uint64(0x319642B2D24D8EC3)
        x = (x ^ x >> np.uint64(27) ^ x >> np.uint64(54)) * np.uint64(0x96DE1B173F119089)
    return x ^ x >> np.uint64(30) ^ x >> np.uint64(60) ^ np.uint64(0x9E3779B97F4A7C15)


def look_up(path: Path, kind: str, hashes: NDArray[np.uint64], encoding: str) -> NDArray[np.float32]:
    """Look up rows as `open_served` does: a delta above a base with one row. Unknown ids get zeros."""
    paths = str(path), ""
    if kind == "delta":
        write(path.with_name("base"), [OTHER], encoding)
        paths = str(path.with_name("base")), str(path)
    spec = make_table_spec("rows", DIM, torch.uint64, [make_normal_initializer(0.0, 1.0)], None, 0)
    out = np.full((len(hashes), DIM), np.nan, np.float32)
    served = _core.ServedTables(pack_settings(spec), [paths], False)
    assert served.look_up((find_keys(hashes), None, None), out, False, None, "float32") is None
    return out


def reseal(data: bytearray) -> bytes:
    """A file's bytes with the checksum of its trailer, which an attacker can compute."""
    return bytes(data[:-4]) + crc32(data[-TRAILER_BYTES:-4]).to_bytes(4, "little")


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(st.integers(0, 2**32), st.sampled_from([1e-9, 1e-4, 1.0, 30.0]), st.sampled_from([0.0, 1.0, -100.0]))
def test_decoded_values_are_within_the_bound(encoding: str, seed: int, spread: float, middle: float) -> None:
    values = np.random.default_rng(seed).normal(middle, spread, (4, DIM)).astype(np.float32)
    values[1] = values[1, 0]
    values[2, 1:3] = 0.0, -0.0
    rows = encode(values, encoding, 0, np.arange(4))
    errors = np.abs(decode(rows, encoding, DIM) - values.astype(np.float64))
    assert (errors <= compute_bound(values, encoding)).all()
    if encoding == "float32":
        assert decode(rows, encoding, DIM).tobytes() == values.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_value_that_cannot_be_encoded_is_named(encoding: str) -> None:
    limit = {"float16": 65520.0, "int8": 70000.0, "bfloat16": 3.4e38, "float32": np.inf}[encoding]
    for value, problem in ((np.nan, "nan, which is not finite"), (-np.inf, "-inf, which is not"), (limit, f"{limit}")):
        values = np.zeros((3, DIM), np.float32)
        values[1] = value if problem == f"{limit}" else 0.0
        values[1, 2] = value
        with pytest.raises(InputError, match=r"row 8 of table 6 has the value"):
            encode(values, encoding, 6, np.array([7, 8, 9]))


hash_sets = st.one_of(
    st.sets(st.integers(0, TOP), max_size=200),
    # neighbours, so that directory lines are crowded, with others far away
    st.tuples(st.integers(0, TOP - 400), st.integers(1, 400), st.sets(st.integers(0, TOP), max_size=3)).map(
        lambda x: {*range(x[0], x[0] + x[1])} | x[2]
    ),
    # groups that are each much narrower than the group above
    st.integers(0, TOP).map(lambda x: {x ^ bit << shift for shift in range(0, 61, 3) for bit in range(8)}),
)


@given(hash_sets, st.sampled_from(["base", "delta"]), st.data())
@examples(0.5)
def test_every_row_is_found_and_no_other(tmp_path_factory: Any, hashes: set[int], kind: str, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "found.rows"
    known = sorted(hashes)
    deleted = data.draw(st.sets(st.sampled_from(known))) if kind == "delta" and known else set()
    rows = write(path, known, "bfloat16", kind, sorted(deleted), pieces=data.draw(st.integers(1, 4)))
    others = {hash ^ bit for hash in known for bit in (1, 1 << 20, 1 << 63)} | {0, TOP}
    asked = np.array([*known, *sorted(others - hashes)], np.uint64)
    file = RowFile(path)
    is_present, found = file.find(asked)
    assert is_present.tolist() == [hash in hashes and hash not in deleted for hash in asked.tolist()]
    assert (found == rows[is_present[: len(known)]]).all()
    expected = np.zeros((len(asked), DIM), np.float32)
    expected[is_present] = decode(found, "bfloat16", DIM)
    is_other = (asked == OTHER) & (kind == "delta")  # the base has it
    assert (look_up(path, kind, asked, "bfloat16")[~is_other] == expected[~is_other]).all()
    read = list(file.pieces(7))
    assert [hash for piece in read for hash in piece.hashes.tolist()] == known
    assert [row.tobytes() for piece in read for row in piece.rows] == [row.tobytes() for row in rows]
    assert {hash for piece in read for hash in piece.hashes[piece.is_deleted].tolist()} == deleted
    verify(path)


def verify(path: Path) -> None:
    """Compare a file with the checksums in its trailer."""
    RowFile(path)
    data = path.read_bytes()
    checksum = int.from_bytes(data[-TRAILER_BYTES:][28:32], "little")
    if crc32(data[:-TRAILER_BYTES]) != checksum:
        raise ServingError("damaged")


def test_equal_rows_give_equal_bytes_and_hashes_must_ascend(tmp_path: Path) -> None:
    hashes = sorted(hash_rows(0, np.arange(1000, dtype=np.uint64)).tolist())
    write(tmp_path / "one", hashes)
    write(tmp_path / "other", hashes, pieces=9)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    for wrong in ([5, 5], [6, 5]):
        with pytest.raises(ValueError, match="hashes must ascend"):
            write(tmp_path / "wrong", wrong)
        with pytest.raises(ValueError, match="hashes must ascend"):
            write(tmp_path / "wrong", wrong, pieces=2)


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write(path, range(0, 2**60, 2**54))
    intact = path.read_bytes()
    size = len(intact)
    for at in [*range(0, size - TRAILER_BYTES, 97), *range(size - TRAILER_BYTES, size, 61), size - 1]:
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 4]) + intact[at + 1 :])
        with pytest.raises(ServingError, match=r"damaged|no row file"):
            verify(path)
        if at >= size - TRAILER_BYTES:
            with pytest.raises(ServingError, match=r"damaged|no row file.* Publish again"):
                RowFile(path)
    for length in (0, 1, TRAILER_BYTES - 1, size - 64, size - 1):
        path.write_bytes(intact[:length])
        with pytest.raises(ServingError, match="truncated"):
            RowFile(path)
    path.write_bytes(bytes(64) + intact)
    with pytest.raises(ServingError, match="size does not match"):
        RowFile(path)
    for missing in (tmp_path / "missing", tmp_path):
        with pytest.raises(ServingError, match=r"cannot (open|map)"):
            RowFile(missing)


@given(st.data())
@examples(0.5)
def test_a_hostile_file_never_leads_outside(tmp_path_factory: Any, data: Any) -> None:
    """Numbers in a sealed file may be anything. Reads outside of the mapping would end this process."""
    path = tmp_path_factory.getbasetemp() / "hostile.rows"
    hashes = range(2**40, 2**40 + 300)  # one crowded line leads to others
    write(path, hashes, kind="delta")
    forged = bytearray(path.read_bytes())
    directory, trailer = -(-300 * 24 // 64) * 64, len(forged) - TRAILER_BYTES  # a record has 24 bytes
    words = np.frombuffer(forged, np.uint16)
    for begin, end in data.draw(st.lists(st.sampled_from([(directory, trailer), (trailer + 8, trailer + 64)]))):
        at = data.draw(st.integers(begin // 2, end // 2 - 1))
        words[at] = data.draw(st.sampled_from([0, 1, 29, 0x7FFF, 0xFFFE, 0xFFFF]))
    path.write_bytes(reseal(forged))
    asked = np.array([*hashes, 0, TOP, 2**63], np.uint64)
    with contextlib.suppress(ServingError):  # the trailer may be refused
        is_present, _ = RowFile(path).find(asked)
        assert not is_present[300:].any()
        with contextlib.suppress(StoreError):  # a version refuses files of another encoding, width or kind
            assert (look_up(path, "delta", asked, "int8")[300:] == 0).all()
