"""Store options as values, as dicts and from a TOML file; what each of them refuses."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed
from support.embeddings import DIM, attach, make
from support.refusals import check_refusal
from tierbed import MultiTableEmbedding, OptionError, StoreError, load_store_options
from tierbed.engine import _core

COMMON = {
    "persistent_path": None,
    "capacity": None,
    "size_factor": None,
    "storage_dim": None,
    "physical_block_size": 4096,
    "open": "resume",
    "snapshot_path": None,
    "eviction": "none",
    "admission": None,
    "ttl_steps": None,
    "state_dict_snapshots": False,
    "changed_keys_mb": 256,
}
CACHE = {"cache_policy": "lru", "overflow_mb": None}
ROCKSDB = {
    "host_cache_budget_mb": 0,
    "shards": None,
    "read_mode": "buffered",
    "async_io": True,
    "rocksdb_cache_mb": None,
    "index_mb": None,
    "rocksdb_options": None,
}
MADE = {
    "device_mem": (tierbed.make_device_mem_store_options, {}),
    "host_mem": (tierbed.make_host_mem_store_options, {}),
    "cached_host_mem": (tierbed.make_cached_host_mem_store_options, {"cache_budget_mb": 64}),
    "cached_ssd": (tierbed.make_cached_ssd_store_options, {"cache_budget_mb": 64, "persistent_path": "/ssd"}),
}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def embedding(store_options: Any) -> MultiTableEmbedding:
    return MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, None, store_options)


@pytest.mark.parametrize(("name", "maker", "needed"), [(name, *made) for name, made in MADE.items()], ids=MADE)
def test_options_read_print_and_compare_as_constant_dicts(name: str, maker: Any, needed: dict[str, Any]) -> None:
    options = maker(**needed)
    more: dict[str, Any] = CACHE if name.startswith("cached") else {}
    if name == "cached_ssd":
        more = {**more, **ROCKSDB, "io_threads": options["io_threads"]}  # of the machine
    expected = {"store": name, **COMMON, **more, **needed}
    assert dict(options) == expected == options.as_dict() == eval(repr(options))
    assert options == expected
    assert expected == options
    assert (options, hash(options)) == (maker(**needed), hash(maker(**needed)))
    assert options != maker(**needed, capacity=7)
    assert options["store"] == options.store == name
    assert options.get("nothing") is None
    assert len(options) == len(expected)
    for change, error in (
        (lambda: options["as_dict"], KeyError),
        (lambda: setattr(options, "capacity", 3), dataclasses.FrozenInstanceError),
        (lambda: operator.setitem(options, "capacity", 3), TypeError),
    ):
        with pytest.raises(error):
            change()
    made = embedding(dict(options)).store_options
    assert (made, type(made)) == (options, type(options))


def host(**options: Any) -> Callable[[], Any]:
    return lambda: tierbed.make_host_mem_store_options(**options)


def ssd(**options: Any) -> Callable[[], Any]:
    return lambda: tierbed.make_cached_ssd_store_options(**{"cache_budget_mb": 1, "persistent_path": "/ssd", **options})


NO_SIZES = [-1, float("nan"), float("inf"), "64", None, True, 1 << 50]
VALUES = [
    *[(host(capacity=one), "capacity=", repr(one)) for one in (0, -5, 1.5, True, "10", 1 << 63)],
    *[(host(**{name: 0}), f"{name}=", "0") for name in ("size_factor", "storage_dim")],
    *[(host(persistent_path=one), "persistent_path=", repr(one)) for one in ("", 3, ["/a", "/b"])],
    *[(host(snapshot_path=one, persistent_path="/a"), "snapshot_path=", repr(one)) for one in ("", ["/a"])],
    *[(host(physical_block_size=one), "physical_block_size=", repr(one)) for one in (1000, "4096")],
    *[(host(open=one), "open=", repr(one)) for one in ("append", ["resume"])],
    (host(eviction="random", capacity=9), "eviction=", "'random'", "'lru', 'lfu', 'ttl'"),
    (host(eviction=None), "eviction=", "None"),
    (host(eviction="lru"), "eviction='lru'", "capacity=None"),
    (host(eviction="ttl", capacity=9), "eviction='ttl'", "ttl_steps=None"),
    (host(eviction="ttl", ttl_steps=9), "eviction='ttl'", "capacity=None"),
    *[(host(ttl_steps=one), "ttl_steps=", str(one)) for one in (0, 1 << 32)],
    *[(host(admission=one), "admission=", repr(one)) for one in (0, 1, 256, True, 1.0, 0.0, float("nan"), "3")],
    *[(ssd(cache_budget_mb=one), "cache_budget_mb=", repr(one)) for one in (0, *NO_SIZES)],
    *[(ssd(host_cache_budget_mb=one), "host_cache_budget_mb=", repr(one)) for one in NO_SIZES],
    *[(ssd(cache_budget_mb=one), "cache_budget_mb=", repr(one), '"auto"') for one in ("Auto", "", "1 GiB")],
    (ssd(host_cache_budget_mb="Auto"), "host_cache_budget_mb=", "'Auto'", '"auto"'),
    (ssd(overflow_mb="auto"), "overflow_mb=", "'auto'"),
    (ssd(persistent_path=None), "persistent_path=", "None"),
    *[(ssd(index_mb=one), "index_mb=", repr(one)) for one in (0, -1, "64", float("nan"))],
    (ssd(index_mb=0.9), "index_mb=0.9", "at least 1,"),
    (ssd(index_mb=3, capacity=200_000_000), "index_mb=3", "capacity=200000000", "at least 5,"),
    (ssd(index_mb=64, read_mode="mmap"), "index_mb=64", "read_mode='buffered'"),
    (lambda: tierbed.make_cached_host_mem_store_options(0), "cache_budget_mb=", "0"),
    (host(persistent_path="~nobody-here/a"), "'~nobody-here'", "'./~nobody-here'"),
    (lambda: embedding(None), "store_options=", "None"),
    (lambda: embedding("device_mem"), "store_options=", "'device_mem'"),
    (lambda: embedding({}), "store=", "None", "device_mem, host_mem, cached_host_mem, cached_ssd"),
    *[(lambda one=one: embedding({"store": one}), "store=", repr(one)) for one in ("tape", ["device_mem"])],
    (lambda: embedding({"store": "device_mem", "size": 3}), "device_mem", "size", "capacity"),
    (lambda: embedding({"store": "host_mem", "cache_budget_mb": 3}), "host_mem", "cache_budget_mb"),
    (lambda: embedding({"store": "device_mem", "capacity": 0}), "capacity=", "0"),
    (lambda: embedding({"store": "cached_host_mem"}), "cached_host_mem", "cache_budget_mb"),
    (lambda: embedding({"store": "cached_ssd", "cache_budget_mb": 3}), "cached_ssd", "persistent_path"),
    (host(persistant_path="x"), "make_host_mem_store_options: ", "did you mean persistent_path"),
    (lambda: tierbed.make_device_mem_store_options(zzz=1), "zzz", "persistent_path, capacity"),
    (lambda: tierbed.make_cached_host_mem_store_options(cache_mb=1), "cache_mb", "cache_budget_mb"),
    (lambda: tierbed.make_cached_ssd_store_options(1), "make_cached_ssd_store_options: ", "'persistent_path'"),
    (lambda: tierbed.make_uniform_initializer(0, 1, 2), "too many", "low, high"),
    (lambda: tierbed.make_normal_initializer(sdt=1), "sdt", "did you mean std"),
    (lambda: tierbed.make_constant_initializer(), "'value'"),
    (lambda: tierbed.make_trunc_normal_initializer(men=1), "did you mean mean"),
    (lambda: tierbed.make_table_options({"type": "uniform"}, nam="a"), "did you mean name"),
    (lambda: tierbed.make_column_options({"type": "uniform"}, initialiser=1), "did you mean initializer"),
    (lambda: tierbed.make_persistent_table_reader("x", "y", storage_dims=1), "did you mean storage_dim"),
]


@pytest.mark.parametrize("refusal", VALUES)
def test_a_value_that_cannot_work_is_refused_when_made(refusal: Any) -> None:
    call, *named = refusal
    check_refusal((call, OptionError, *named))


def test_a_cache_too_small_for_a_set_is_named_at_first_use(tmp_path: Path) -> None:
    small = tierbed.make_cached_host_mem_store_options(0.0001)
    below = tierbed.make_cached_ssd_store_options(1, tmp_path, host_cache_budget_mb=0.0001)
    check_refusal((lambda: make(small).size(), OptionError, "cache_budget_mb=", "0.0001"))
    check_refusal((lambda: make(below).size(), OptionError, "host_cache_budget_mb=", "0.0001"))
    with make(tierbed.make_cached_ssd_store_options(1, tmp_path, open="error")) as after:  # the folder is free again
        assert after.size() == 0


def test_a_file_gives_each_deployment_its_store(tmp_path: Path) -> None:
    file = written(
        tmp_path / "deploy.toml",
        '[users]\nstore = "device_mem"\ncapacity = 1000\neviction = "ttl"\nttl_steps = 50\nadmission = 0.25\n'
        '[items]\nstore = "cached_ssd"\npersistent_path = "/ssd"\ncache_budget_mb = 0.5\nhost_cache_budget_mb = 8\n'
        '["my embedding"]\nstore = "cached_host_mem"\ncache_budget_mb = 3\nopen = "error"\n',
    )
    more = {"capacity": 1000, "eviction": "ttl", "ttl_steps": 50, "admission": 0.25}
    assert load_store_options(file, "users") == tierbed.make_device_mem_store_options(**more)
    disk = tierbed.make_cached_ssd_store_options(0.5, "/ssd", host_cache_budget_mb=8)
    assert load_store_options(str(file), "items") == disk
    assert load_store_options(file, "my embedding").open == "error"
    assert embedding(load_store_options(file, "users")).size() == 0


def test_paths_are_those_that_a_shell_would_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = '[users]\nstore = "host_mem"\npersistent_path = "${NVME}/a"\nsnapshot_path = "~/b"\n'
    found = load_store_options(written(tmp_path / "deploy.toml", text), "users")
    assert (found.persistent_path, found.snapshot_path) == (f"{tmp_path}/a", f"{tmp_path}/home/b")
    made = tierbed.make_host_mem_store_options("$NVME/a", snapshot_path=Path("~/b"))
    assert made == found == tierbed.make_host_mem_store_options(**{k: v for k, v in made.items() if k != "store"})
    for plain in ("a~b/5$", "./~nobody-here"):
        assert tierbed.make_host_mem_store_options(plain).persistent_path == plain


@pytest.mark.parametrize("path", ["${TIERBED_UNSET}/a", "/ssd/$TIERBED_UNSET", "${TIERBED_EMPTY}/a", "${NVME:-/ssd}"])
def test_a_variable_that_is_not_set_makes_no_folder_of_its_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERBED_EMPTY", "")
    with pytest.raises(OptionError, match=r"snapshot_path=.*environment variable '.*' is unset or empty"):
        tierbed.make_host_mem_store_options("a", snapshot_path=path)


@pytest.mark.parametrize(
    "refusal",
    [
        ("", "[users]", "it has none"),
        ("[items]\n[others]\n", "[users]", "items, others"),
        ("users = 3\n", "users", "[embedding name]"),
        ("[users\n", "deploy.toml"),
        ('[users]\nstore = "tape"\n', "deploy.toml", "[users]", "store=", "'tape'"),
        ('[users]\nstore = "device_mem"\nsize = 3\n', "[users]", "size"),
        ('[users]\nstore = "device_mem"\ncapacity = "3"\n', "[users]", "capacity=", "'3'"),
        ('[users]\nstore = "cached_host_mem"\n', "[users]", "cache_budget_mb"),
        ("[users]\ncapacity = 3\n", "[users]", "store=", "None"),
    ],
)
def test_a_file_that_says_nothing_useful_names_itself_and_the_table(tmp_path: Path, refusal: Any) -> None:
    text, *named = refusal
    file = written(tmp_path / "deploy.toml", text)
    check_refusal((lambda: load_store_options(file, "users"), OptionError, *named))
    (tmp_path / "latin.toml").write_bytes(b'[users]\nstore = "\xe9"\n')
    for path in (tmp_path / "missing.toml", tmp_path, tmp_path / "latin.toml"):
        check_refusal((lambda path=path: load_store_options(path, "users"), OptionError, path.name))


@pytest.mark.parametrize(("optimizer", "factor"), [("sgd", 1), ("momentum", 2), ("adagrad", 2), ("adam", 3)])
def test_a_given_row_size_is_checked_against_the_optimizer(optimizer: str, factor: int) -> None:
    for right in ({"size_factor": factor}, {"storage_dim": factor * DIM}, {"storage_dim": -1}):
        assert make(tierbed.make_device_mem_store_options(**right), optimizer).size() == 0
    for name, value in (("size_factor", factor + 1), ("storage_dim", factor * DIM + 1)):
        wrong = make(tierbed.make_device_mem_store_options(**{name: value}), optimizer)
        check_refusal((wrong.size, OptionError, f"{name}=", str(value), f"{factor * DIM} floats"))


def test_a_given_row_size_is_checked_when_the_optimizer_comes_after_reading() -> None:
    late = make(tierbed.make_device_mem_store_options(size_factor=1), tables=1)
    assert late.get([1]).shape == (1, DIM)
    with pytest.raises(OptionError, match="size_factor=1"):  # noqa: PT012 either may be the first to know
        attach(late, "adam")
        late.size()


def test_a_build_without_rocksdb_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "has_rocksdb", False)
    with pytest.raises(StoreError, match=r"cached_ssd.*no RocksDB; install it \(apt install librocksdb-dev\)"):
        tierbed.make_cached_ssd_store_options(1, "store")
    tierbed.make_cached_host_mem_store_options(1, "store")
