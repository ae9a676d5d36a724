"""Store options as values, as dicts and from a TOML file; what each of them refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed
from support.embeddings import DIM, attach, make
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
}
CACHE = {"cache_policy": "lru", "overflow_mb": None}
ROCKSDB = {
    "host_cache_budget_mb": 0,
    "shards": None,
    "read_mode": "buffered",
    "async_io": True,
    "rocksdb_cache_mb": None,
    "rocksdb_options": None,
}
MADE = {
    "device_mem": (tierbed.make_device_mem_store_options, {}),
    "host_mem": (tierbed.make_host_mem_store_options, {}),
    "cached_host_mem": (tierbed.make_cached_host_mem_store_options, {"cache_budget_mb": 64}),
    "cached_ssd": (tierbed.make_cached_ssd_store_options, {"cache_budget_mb": 64, "persistent_path": "/ssd"}),
}
makers = pytest.mark.parametrize(("maker", "needed"), MADE.values(), ids=MADE)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def embedding(store_options: Any) -> MultiTableEmbedding:
    return MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, None, store_options)


@makers
def test_options_read_print_and_compare_as_dicts(maker: Callable[..., Any], needed: dict[str, Any]) -> None:
    options = maker(**needed)
    store = next(name for name, made in MADE.items() if made[0] is maker)
    more: dict[str, Any] = CACHE if store.startswith("cached") else {}
    if store == "cached_ssd":
        more = {**more, **ROCKSDB, "io_threads": options["io_threads"]}  # of the machine
    expected = {"store": store, **COMMON, **more, **needed}
    assert dict(options) == expected == options.as_dict()
    assert options == expected
    assert expected == options
    assert eval(repr(options)) == expected
    assert options == maker(**needed)
    assert hash(options) == hash(maker(**needed))
    assert options != maker(**needed, capacity=7)
    assert options["store"] == options.store == store
    assert options.get("nothing") is None
    assert len(options) == len(expected)
    with pytest.raises(KeyError):
        options["as_dict"]


@makers
def test_options_cannot_be_changed(maker: Callable[..., Any], needed: dict[str, Any]) -> None:
    options = maker(**needed)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.capacity = 3
    with pytest.raises(TypeError):
        options["capacity"] = 3


@makers
def test_an_embedding_takes_the_dict_that_options_print_as(maker: Callable[..., Any], needed: dict[str, Any]) -> None:
    options = maker(**needed, capacity=12)
    made = embedding(dict(options)).store_options
    assert made == options
    assert type(made) is type(options)


def test_makers_take_the_documented_arguments_by_place() -> None:
    assert tierbed.make_device_mem_store_options("/path", 12) == {"store": "device_mem", **COMMON} | {
        "persistent_path": "/path",
        "capacity": 12,
    }
    ssd = tierbed.make_cached_ssd_store_options(8142, "/path", 40000000, size_factor=1, physical_block_size=512)
    assert (ssd.cache_budget_mb, ssd.persistent_path, ssd.capacity, ssd.size_factor) == (8142, "/path", 40000000, 1)
    assert tierbed.make_cached_host_mem_store_options(8, "/path", 12).cache_budget_mb == 8
    assert tierbed.make_host_mem_store_options(Path("/path")).persistent_path == "/path"
    assert tierbed.make_device_mem_store_options(storage_dim=-1).storage_dim is None  # the seed's word for not given


@makers
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"capacity": 0}, r"capacity=0: give a whole number > 0"),
        ({"capacity": -5}, r"capacity=-5"),
        ({"capacity": 1.5}, r"capacity=1\.5"),
        ({"capacity": True}, r"capacity=True"),
        ({"capacity": "10"}, r"capacity='10'"),
        ({"size_factor": 0}, r"size_factor=0"),
        ({"storage_dim": 0}, r"storage_dim=0"),
        ({"persistent_path": ""}, r"persistent_path=''"),
        ({"persistent_path": 3}, r"persistent_path=3"),
        ({"persistent_path": ["/a", "/b"]}, r"persistent_path=\['/a', '/b'\]: give one folder"),
        ({"snapshot_path": "", "persistent_path": "/a"}, r"snapshot_path=''"),
        ({"snapshot_path": ["/a"], "persistent_path": "/a"}, r"snapshot_path=\['/a'\]: give one folder"),
        ({"physical_block_size": 1000}, r"physical_block_size=1000: give a power of two from 512"),
        ({"physical_block_size": "4096"}, r"physical_block_size='4096'"),
        ({"open": "append"}, r"open='append': give one of 'resume', 'fresh', 'error'"),
        ({"open": ["resume"]}, r"open=\['resume'\]"),
        ({"capacity": 1 << 63}, r"capacity=9223372036854775808: give a whole number > 0 and < 2\*\*63"),
        (
            {"eviction": "random", "capacity": 9},
            r"eviction='random': give one of 'none', 'lru', 'lfu', 'ttl', 'distance_",
        ),
        ({"eviction": None}, r"eviction=None: give one of"),
        (
            {"eviction": "lru"},
            r"eviction='lru' .* capacity=None; give a capacity",
        ),
        ({"eviction": "ttl", "capacity": 9}, r"eviction='ttl' .* ttl_steps=None; give ttl_steps"),
        ({"eviction": "ttl", "ttl_steps": 9}, r"eviction='ttl' .* capacity=None"),
        ({"ttl_steps": 0}, r"ttl_steps=0: give a whole number > 0"),
        ({"ttl_steps": 1 << 32}, r"ttl_steps=4294967296: .*less than 2\*\*32"),
        (
            {"admission": 0},
            r"admission=0: give the number of steps that must look a row up, from 2 to 255, a probability",
        ),
        ({"admission": 1}, r"admission=1: "),
        ({"admission": 256}, r"admission=256: "),
        ({"admission": True}, r"admission=True: "),
        ({"admission": 1.0}, r"admission=1\.0: "),
        ({"admission": 0.0}, r"admission=0\.0: "),
        ({"admission": float("nan")}, r"admission=nan: "),
        ({"admission": "3"}, r"admission='3': "),
    ],
)
def test_a_value_that_cannot_work_is_refused_when_made(
    maker: Callable[..., Any], needed: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        maker(**{**needed, **wrong})


@pytest.mark.parametrize("name", ["cache_budget_mb", "host_cache_budget_mb"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "64", None, True, 1 << 50])
def test_a_budget_that_is_no_size_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"{name}={value!r}: give a number of MiB >"):
        tierbed.make_cached_ssd_store_options(**{"cache_budget_mb": 1, "persistent_path": "/ssd", name: value})


def test_a_cache_of_nothing_is_refused_and_one_too_small_for_a_set_is_named_at_first_use(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cache_budget_mb=0: give a number of MiB > 0"):
        tierbed.make_cached_host_mem_store_options(0)
    small = tierbed.make_cached_host_mem_store_options(0.0001)
    with pytest.raises(OptionError, match=r"cache_budget_mb=0\.0001 is too small for rows of \d+ bytes"):
        make(small).size()
    host = tierbed.make_cached_ssd_store_options(1, tmp_path, host_cache_budget_mb=0.0001)
    with pytest.raises(OptionError, match=r"host_cache_budget_mb=0\.0001 is too small"):
        make(host).size()
    with make(tierbed.make_cached_ssd_store_options(1, tmp_path, open="error")) as after:  # the folder is free again
        assert after.size() == 0


def test_ssd_needs_a_folder() -> None:
    with pytest.raises(OptionError, match=r"persistent_path=None: cached_ssd keeps rows on disk; give a folder"):
        tierbed.make_cached_ssd_store_options(64, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"store_options=None: make one with make_device_mem_store_options"),
        ("device_mem", r"store_options='device_mem'"),
        ({}, r"store=None; give one of device_mem, host_mem, cached_host_mem, cached_ssd"),
        ({"store": "tape"}, r"store='tape'; give one of"),
        ({"store": ["device_mem"]}, r"store=\['device_mem'\]"),
        ({"store": "device_mem", "size": 3}, r"device_mem has no option size; it has .*capacity"),
        ({"store": "host_mem", "cache_budget_mb": 3}, r"host_mem has no option cache_budget_mb"),
        ({"store": "device_mem", "capacity": 0}, r"capacity=0"),
        ({"store": "cached_host_mem"}, r"cached_host_mem.*cache_budget_mb"),
        ({"store": "cached_ssd", "cache_budget_mb": 3}, r"cached_ssd.*persistent_path"),
    ],
)
def test_a_dict_that_is_no_store_is_refused(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        embedding(given)


def test_a_file_gives_each_deployment_its_store(tmp_path: Path) -> None:
    file = written(
        tmp_path / "deploy.toml",
        '[users]\nstore = "device_mem"\ncapacity = 1000\neviction = "ttl"\nttl_steps = 50\nadmission = 0.25\n'
        '[items]\nstore = "cached_ssd"\npersistent_path = "/ssd"\ncache_budget_mb = 0.5\nhost_cache_budget_mb = 8\n'
        '["my embedding"]\nstore = "cached_host_mem"\ncache_budget_mb = 3\nopen = "error"\n',
    )
    assert load_store_options(file, "users") == tierbed.make_device_mem_store_options(
        capacity=1000, eviction="ttl", ttl_steps=50, admission=0.25
    )
    assert load_store_options(str(file), "items") == tierbed.make_cached_ssd_store_options(
        0.5, "/ssd", host_cache_budget_mb=8
    )
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
    assert tierbed.make_host_mem_store_options("a~b/5$").persistent_path == "a~b/5$"


@pytest.mark.parametrize("path", ["${TIERBED_UNSET}/a", "/ssd/$TIERBED_UNSET", "${TIERBED_EMPTY}/a", "${NVME:-/ssd}"])
def test_a_variable_that_is_not_set_makes_no_folder_of_its_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERBED_EMPTY", "")
    with pytest.raises(OptionError, match=r"snapshot_path=.*environment variable '.*' is unset or empty"):
        tierbed.make_host_mem_store_options("a", snapshot_path=path)


def test_an_unknown_user_makes_no_folder_of_its_name() -> None:
    with pytest.raises(OptionError, match=r"'~nobody-here' is not a user here; .*give '\./~nobody-here'"):
        tierbed.make_host_mem_store_options("~nobody-here/a")
    assert tierbed.make_host_mem_store_options("./~nobody-here").persistent_path == "./~nobody-here"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no table \[users\]; it has none"),
        ("[items]\n[others]\n", r"has no table \[users\]; it has items, others"),
        ("users = 3\n", r"users is outside a table; put it under \[name\]"),
        ("[users\n", r"deploy\.toml': "),
        ('[users]\nstore = "tape"\n', r"deploy\.toml \[users\]: store='tape'; give one of device_mem"),
        ('[users]\nstore = "device_mem"\nsize = 3\n', r"\[users\]: device_mem has no option size; it has"),
        ('[users]\nstore = "device_mem"\ncapacity = "3"\n', r"\[users\].*capacity='3'"),
        ('[users]\nstore = "cached_host_mem"\ncache_budget_mb = "3"\n', r"\[users\].*cache_budget_mb='3'"),
        ('[users]\nstore = "cached_host_mem"\n', r"\[users\].*cache_budget_mb"),
        ("[users]\ncapacity = 3\n", r"\[users\]: store=None"),
    ],
)
def test_a_file_that_says_nothing_useful_names_itself_and_the_table(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path / "deploy.toml", text)
    with pytest.raises(OptionError, match=message):
        load_store_options(file, "users")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(OptionError, match=path.name):
            load_store_options(path, "users")
    (tmp_path / "latin.toml").write_bytes(b'[users]\nstore = "\xe9"\n')
    with pytest.raises(OptionError, match=r"latin\.toml"):
        load_store_options(tmp_path / "latin.toml", "users")


@pytest.mark.parametrize(("optimizer", "factor"), [("sgd", 1), ("momentum", 2), ("adagrad", 2), ("adam", 3)])
def test_a_given_row_size_is_checked_against_the_optimizer(optimizer: str, factor: int) -> None:
    for right in ({"size_factor": factor}, {"storage_dim": factor * DIM}, {"storage_dim": -1}):
        assert make(tierbed.make_device_mem_store_options(**right), optimizer).size() == 0
    wrong = make(tierbed.make_device_mem_store_options(size_factor=factor + 1), optimizer)
    with pytest.raises(
        OptionError, match=rf"size_factor={factor + 1}: .* takes {factor * DIM} floats.*leave size_factor"
    ):
        wrong.size()
    wrong = make(tierbed.make_device_mem_store_options(storage_dim=factor * DIM + 1), optimizer)
    with pytest.raises(OptionError, match=rf"storage_dim={factor * DIM + 1}: .* takes {factor * DIM} floats"):
        wrong.size()


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


@pytest.mark.parametrize(
    ("maker", "args", "kwargs", "message"),
    [
        (
            "make_host_mem_store_options",
            (),
            {"persistant_path": "x"},
            "no argument persistant_path; did you mean persistent_path",
        ),
        ("make_device_mem_store_options", (), {"zzz": 1}, "zzz; it has persistent_path, capacity"),
        ("make_cached_host_mem_store_options", (), {"cache_mb": 1}, "cache_budget_mb"),
        ("make_cached_ssd_store_options", (1,), {}, "missing a required argument: 'persistent_path'"),
        ("make_uniform_initializer", (0, 1, 2), {}, "too many positional arguments; its arguments are low, high"),
        ("make_normal_initializer", (), {"sdt": 1}, "sdt; did you mean std"),
        ("make_constant_initializer", (), {}, "missing a required argument: 'value'"),
        ("make_trunc_normal_initializer", (), {"men": 1}, "did you mean mean"),
        ("make_table_options", ({"type": "uniform"},), {"nam": "a"}, "did you mean name"),
        ("make_column_options", ({"type": "uniform"},), {"initialiser": 1}, "did you mean initializer"),
        ("make_persistent_table_reader", ("x", "y"), {"storage_dims": 1}, "did you mean storage_dim"),
    ],
)
def test_wrong_arguments_of_a_maker_are_an_option_error_that_names_the_nearest(
    maker: str, args: Any, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=f"^{maker}: .*{message}"):
        getattr(tierbed, maker)(*args, **kwargs)
