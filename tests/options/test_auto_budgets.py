"""Free memory of a host is misread, or budgets that are "auto" divide it wrongly, in silence, or to other bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierbed
from support.cuda_emulation import EmulatedDevice
from support.embeddings import attach, contents, make, train
from support.places import BENCHMARKS, environment
from support.refusals import check_refusal
from tierbed import OptionError, plan
from tierbed.engine.cache.memory_split import MB, MIN_CACHE_ROWS, compute_index_bytes, split_memory
from tierbed.engine.host_memory import FreeMemory, read_free_host_memory
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.processors.cuda import make_cuda_factory
from tierbed.engine.table.auto_budgets import AutoBudgets
from tierbed.engine.table.stack import get_processor_factory

sys.path.insert(0, str(BENCHMARKS))
from disk.memory_limit import find_limit_problem, memory_limit

LINE = re.compile(
    r"tierbed: embedding '(\w+)': (\w+)='auto' divides ([\d.]+) MiB free (on this machine|in the memory cgroup '[^']*')"
    r": cache ([\d.]+) MiB, (.*)\n"
)


ROWS = 5000  # more than are trained; it keeps "auto" from taking half of the machine


def laid_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def machine(root: Path, free_mb: float) -> Path:
    return laid_out(root, {"proc/meminfo": f"MemAvailable: {int(free_mb * 1024)} kB\n"})


def ssd(path: Path, budget_mb: Any = "auto", **more: Any) -> Any:
    return tierbed.make_cached_ssd_store_options(budget_mb, path, **{"shards": 2, **more})


def processor(options: Any) -> Any:
    return get_processor_factory(torch.device("cpu"), options)(make(options).spec, RowState(), None)


def numbers(options: Any, root: Path, name: str = "rows") -> Any:
    return AutoBudgets(name, options, root).resolve(processor(options))


@given(
    st.floats(1, 1e6),
    st.sampled_from(["rocksdb", "table", "device"]),
    st.one_of(st.none(), st.integers(1, 1 << 40)),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)
def test_the_parts_add_up_to_no_more_than_is_of_use(
    free_mb: float, beside: Any, capacity: int | None, overflow_mb: float, fixed_mb: float
) -> None:
    part = split_memory(free_mb, 177, beside, capacity=capacity, overflow_mb=overflow_mb, fixed_mb=fixed_mb)
    assert min(part[:6]) >= 0
    shared = max(free_mb - fixed_mb, 0)
    assert part.cache_mb + part.overflow_mb + part.rocksdb_mb + part.rest_mb == pytest.approx(shared)
    assert part.cache_mb <= shared / 2
    assert part.rest_mb >= shared / 4 * (1 - 1e-9)
    assert part.overflow_mb <= overflow_mb
    if capacity is not None:
        assert part.cache_mb * MB <= max(1.5 * capacity, MIN_CACHE_ROWS) * 177 * (1 + 1e-9)
        assert part.rocksdb_mb <= 64 + compute_index_bytes(177) * capacity / MB + 1e-9


def test_the_rule_of_the_docs() -> None:
    assert split_memory(4000, 177, "rocksdb", overflow_mb=192)[1:6] == (2000, 192, 500, 0, 1308)
    assert split_memory(800, 177, "rocksdb", overflow_mb=192)[1:6] == (400, 100, 100, 0, 200)
    assert split_memory(4000, 177, "table", overflow_mb=64)[1:6] == (500, 64, 0, 0, 3436)
    assert split_memory(4000, 177, "device")[1:6] == (2000, 0, 0, 0, 2000)


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {"cache_budget_mb": 500, "overflow_mb": 125}),
        ({"overflow_mb": 8}, {"cache_budget_mb": 500}),
        # what other options take of the same memory is not divided
        ({"overflow_mb": 8, "host_cache_budget_mb": 100, "read_mode": "direct"}, {"cache_budget_mb": 860 / 2}),
        ({"overflow_mb": 8, "index_mb": 60}, {"cache_budget_mb": 940 / 2}),
        ({"budget_mb": 100, "overflow_mb": 8, "host_cache_budget_mb": "auto"}, {"host_cache_budget_mb": 892 / 2}),
        ({"overflow_mb": 8, "host_cache_budget_mb": "auto"}, {"cache_budget_mb": 500, "host_cache_budget_mb": 0}),
    ],
)
def test_auto_is_what_the_division_of_free_memory_says(tmp_path: Path, given: Any, changed: Any) -> None:
    options, root = ssd(tmp_path / "store", **given), machine(tmp_path, 1000)
    assert numbers(options, root) == {**options, **changed}
    host = tierbed.make_cached_host_mem_store_options("auto")
    assert numbers(host, root) == {**host, "cache_budget_mb": 125, "overflow_mb": 64}
    known = ssd(tmp_path / "store", 3, host_cache_budget_mb=2)
    assert numbers(known, root / "nothing is looked at") is known


@pytest.mark.parametrize(("cache_mb", "host_mb", "ssd_mb"), [(0.01, 0.01, 0.01), (100, 64, 100), (1000, 64, 192)])
def test_the_overflow_area_is_no_larger_than_its_cache(cache_mb: float, host_mb: float, ssd_mb: float) -> None:
    host, disk = tierbed.make_cached_host_mem_store_options(cache_mb), ssd(Path("/ssd"), cache_mb)
    assert (host.compute_overflow_mb(cache_mb), disk.compute_overflow_mb(cache_mb)) == (host_mb, ssd_mb)
    assert ssd(Path("/ssd"), cache_mb, overflow_mb=3).compute_overflow_mb(cache_mb) == 3
    assert (host.memory_mb, disk.memory_mb) == (cache_mb + host_mb, cache_mb + ssd_mb)
    two = ssd(Path("/ssd"), cache_mb, host_cache_budget_mb=5, overflow_mb=3)
    assert (two.memory_mb, ssd(Path("/ssd"), "auto").memory_mb) == (cache_mb + 3 + 5 + 3, None)
    few = split_memory(4000, 177, "rocksdb", capacity=10_000, overflow_mb=None)
    assert few.overflow_mb == few.cache_mb < 3


def test_each_rank_of_a_host_divides_an_equal_part(tmp_path: Path, capsys: Any) -> None:
    options, root = ssd(tmp_path / "store"), machine(tmp_path, 1000)
    one_of_four = AutoBudgets("rows", options, root, num_ranks=4).resolve(processor(options))
    assert one_of_four == {**options, "cache_budget_mb": 125, "overflow_mb": 31.25}
    assert "divides 250.0 MiB free on this machine for each of 4 ranks: cache 125.0 MiB" in capsys.readouterr().err


def test_a_device_divides_its_own_memory_and_a_host_cache_that_of_the_host(tmp_path: Path) -> None:
    root = machine(tmp_path, 1000)
    options = ssd(tmp_path / "store", overflow_mb=8, host_cache_budget_mb="auto")
    on_gpu = make_cuda_factory(EmulatedDevice(), options)(make(options).spec, RowState(), None)
    taken = AutoBudgets("rows", options, root).resolve(on_gpu)
    assert taken == {**options, "cache_budget_mb": EmulatedDevice.memory / MB / 2, "host_cache_budget_mb": 500}


def test_no_more_than_the_whole_table_needs(tmp_path: Path) -> None:
    root = machine(tmp_path, 100_000)
    options = ssd(tmp_path / "store", capacity=1_000_000)
    row_bytes = processor(options).layout.line_bytes + 33
    assert numbers(options, root).cache_budget_mb == 1_500_000 * row_bytes / MB
    few = ssd(tmp_path / "store", capacity=10)
    assert numbers(few, root).cache_budget_mb == MIN_CACHE_ROWS * row_bytes / MB


def test_embeddings_of_a_process_divide_what_the_others_left(tmp_path: Path) -> None:
    root = machine(tmp_path, 1000)
    options = ssd(tmp_path / "store", overflow_mb=8)
    on = processor(options)
    first, second, again = (AutoBudgets(name, options, root) for name in ("first", "second", "first"))
    assert first.resolve(on).cache_budget_mb == 500
    assert second.resolve(on).cache_budget_mb == (1000 - 500 - 8 - 125) / 2  # untouched memory is free to the system
    assert first.resolve(on).cache_budget_mb == 500  # opened again
    first.release()
    assert again.resolve(on).cache_budget_mb == pytest.approx((1000 - 367 / 2 - 8 - 367 / 8) / 2, abs=1e-5)
    for opened in (second, again):
        opened.release()
    assert numbers(options, root).cache_budget_mb == 500


def test_too_little_memory_and_a_system_that_does_not_report_it_are_refused(tmp_path: Path) -> None:
    little, given, store = machine(tmp_path / "little", 0.125), machine(tmp_path / "given", 99), tmp_path / "store"
    for options, root, *named in (
        (ssd(store), little, "cache_budget_mb='auto'", "0.1 MiB are free on this machine", "4096 rows"),
        (ssd(store, host_cache_budget_mb=100), given, "'auto'", "99.0 MiB are free", "options take", "0.0 MiB"),
        (ssd(store), tmp_path, "cache_budget_mb='auto'", "/proc/meminfo"),
        (ssd(store, 1, host_cache_budget_mb="auto"), tmp_path, "host_cache_budget_mb='auto'", "/proc/meminfo"),
    ):
        check_refusal((lambda options=options, root=root: numbers(options, root), OptionError, "'rows'", *named))


def test_the_division_is_printed_once_and_is_that_of_the_cache(tmp_path: Path, capsys: Any) -> None:
    options = ssd(tmp_path, overflow_mb=2, capacity=100_000)
    with make(options, "adam") as embedding:
        assert capsys.readouterr().err == ""
        train(embedding, range(50))
        embedding.save_snapshot("one")
        embedding.load_snapshot("one")
        printed = LINE.fullmatch(capsys.readouterr().err)
        assert printed is not None
        assert (printed[1], printed[2]) == ("rows", "cache_budget_mb")
        assert float(printed[5]) == pytest.approx(embedding.metrics()["device"]["bytes"] / MB, abs=0.1)
        parts = [float(part) for part in re.findall(r"([\d.]+) MiB", printed[0])]
        assert parts[0] == pytest.approx(sum(parts[1:]), abs=0.3)
        assert embedding.store_options == options
    with make(ssd(tmp_path / "wider", capacity=100_000)) as embedding:
        embedding.put([1, 2], torch.ones(2, embedding.dim), 0)
        before = embedding.metrics()["device"]["capacity"]
        attach(embedding, "adam")
        train(embedding, [1, 2, 3])
        assert embedding.metrics()["device"]["capacity"] == before
    first, second = (LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines(keepends=True))
    assert first is not None
    assert second is not None
    assert first[3] == second[3]  # memory is looked at once


def trained(options: Any, steps: range) -> bytes:
    """All that the table holds after these steps, on top of what it held."""
    with make(options, "adam") as embedding:
        for step in steps:
            train(embedding, (torch.arange(200) * (step + 3) ** 2) % 700, torch.arange(200) % 3)
        return contents(embedding).tobytes()


@pytest.fixture(scope="module")
def expected() -> bytes:
    return trained(tierbed.make_device_mem_store_options(), range(6))


@pytest.mark.parametrize(
    "given",
    [
        {"cache_budget_mb": "auto", "capacity": ROWS},
        {"cache_budget_mb": 0.01, "overflow_mb": 0.02},
        {"cache_budget_mb": 0.01, "overflow_mb": 0.02, "host_cache_budget_mb": "auto", "capacity": ROWS},
    ],
)
def test_auto_has_the_bits_of_a_number(tmp_path: Path, given: dict[str, Any], expected: bytes) -> None:
    assert (
        trained(tierbed.make_cached_ssd_store_options(persistent_path=tmp_path, shards=2, **given), range(6))
        == expected
    )


@pytest.mark.parametrize("budgets", [(0.01, "auto", 1), ("auto", 0.01, "auto")])
def test_a_store_is_resumed_with_another_budget(tmp_path: Path, budgets: tuple[Any, ...], expected: bytes) -> None:
    for number, budget_mb in enumerate(budgets):
        rows = trained(ssd(tmp_path, budget_mb, overflow_mb=0.02, capacity=ROWS), range(2 * number, 2 * number + 2))
    assert rows == expected


def test_a_plan_has_the_division_of_auto(tmp_path: Path) -> None:
    trace = [torch.arange(10_000)] * 2
    planned = plan(trace, dim=5, state=0, memory_mb=900)
    options = numbers(ssd(tmp_path / "store"), machine(tmp_path, 900))
    part = planned.division()
    assert (part.cache_mb, part.overflow_mb) == (options.cache_budget_mb, options.overflow_mb)
    assert f"'auto' divides 900.0 MiB: {part}" in repr(planned)
    limited = numbers(ssd(tmp_path / "store", capacity=9000), tmp_path)
    assert planned.division(capacity=9000).cache_mb == limited.cache_budget_mb
    assert re.search(r"'auto' divides \d+\.\d MiB: cache ", repr(plan(trace, dim=5, state=0)))
    check_refusal((lambda: plan(trace, dim=5, state=0, memory_mb=-1), OptionError, "memory_mb=", "-1"))
    check_refusal((lambda: planned.division(capacity=0), OptionError, "capacity=", "0"))


MACHINE = {
    "proc/meminfo": "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   4000 kB\nHugePages_Total:  0\n"
}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
OF_MACHINE = FreeMemory(4000 << 10, "on this machine")
UNLIMITED_V1 = "9223372036854771712\n"


def files_of(folder: str, group: str, **texts: object) -> dict[str, str]:
    return {f"{folder}/{group}memory.{name}": f"{text}\n" for name, text in texts.items()}


def v2(group: str, limit: str, used: int, files: int = 0) -> dict[str, str]:
    stat = f"anon 5\nfile 7\nactive_file {files}\ninactive_file {2 * files}"
    return files_of(V2, group, max=limit, current=used, stat=stat)


def v1(group: str, limit: str, used: int, files: int = 0) -> dict[str, str]:
    stat = f"cache 9\nactive_file 1\ntotal_cache 7\ntotal_active_file {files}\ntotal_inactive_file {2 * files}"
    return files_of(V1, group, limit_in_bytes=limit, usage_in_bytes=used, stat=stat)


def own(*lines: str) -> dict[str, str]:
    return {"proc/self/cgroup": "".join(f"{line}\n" for line in lines)}


LAYOUTS = {  # files, free bytes, and of which group; None of the machine
    "no cgroup": ({}, None, None),
    "a group without a limit": ({**own("0::/a"), **v2("a/", "max", 10)}, None, None),
    "a limit beyond the machine": ({**own("0::/a"), **v2("a/", str(1 << 40), 10)}, None, None),
    "a limit, pages of files given back": ({**own("0::/a"), **v2("a/", "100000", 70000, files=10000)}, 60000, "/a"),
    "the limit of a group around it": (
        {**own("0::/a/b/c"), **v2("a/b/c/", "max", 10), **v2("a/b/", "900000", 100), **v2("a/", "9000", 2000)},
        7000, "/a",
    ),
    "its own limit, below that around it": (
        {**own("0::/a/b"), **v2("a/b/", "5000", 1000), **v2("a/", "9000", 2000)}, 4000, "/a/b",
    ),
    "a container, whose root is its group": ({**own("0::/"), **v2("", "8000", 500)}, 7500, "/"),
    "a group outside of the container": ({**own("0::/../../other"), **v2("", "8000", 500)}, 7500, "/"),
    "memory.high, which slows a process down": (
        {**own("0::/a"), **v2("a/", "9000", 500), f"{V2}/a/memory.high": "6000\n"}, 5500, "/a",
    ),
    "more in use than the limit": ({**own("0::/a"), **v2("a/", "9000", 10000)}, 0, "/a"),
    "version 1": (
        {**own("5:cpu,cpuacct:/x", "4:memory:/a/b", "0::/"), **v1("a/b/", "70000", 60000, files=5000)}, 25000, "/a/b",
    ),
    "version 1, the limit of a group around it": (
        {**own("4:memory:/a/b"), **v1("a/b/", UNLIMITED_V1, 6), **v1("a/", "7000", 4000), **v1("", UNLIMITED_V1, 7)},
        3000, "/a",
    ),
    "version 1, a container that shows its group as the root": (
        {**own("4:memory:/docker/0123"), **v1("", "7000", 4000)}, 3000, "/",
    ),
    "both versions, memory in version 1": (
        {**own("4:memory:/a", "1:name=systemd:/s:x", "0::/a"), **v1("a/", "7000", 4000),
         f"{V2}/unified/a/pids.max": "max\n"},
        3000, "/a",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "free", "group"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_least_of_the_machine_and_its_groups_is_free(
    tmp_path: Path, files: dict[str, str], free: int | None, group: str | None
) -> None:
    expected = OF_MACHINE if free is None else FreeMemory(free, f"in the memory cgroup '{group}'")
    assert read_free_host_memory(laid_out(tmp_path, {**MACHINE, **files})) == expected


@pytest.mark.parametrize("files", [{}, {"proc/meminfo": "MemTotal: 8000 kB\n"}, {**own("0::/a"), **v2("a/", "9", 1)}])
def test_where_proc_does_not_tell_nothing_is_known(tmp_path: Path, files: dict[str, str]) -> None:
    assert read_free_host_memory(laid_out(tmp_path, files)) is None


def test_this_process_in_a_group_of_its_own_has_what_the_limit_leaves() -> None:
    if reason := find_limit_problem():
        pytest.skip(f"this user may make no memory cgroup: {reason}")
    code = "from tierbed.engine.host_memory import read_free_host_memory as f; m = f(); print(m.bytes, m.location)"
    limit = 192 << 20
    with memory_limit(limit) as enter:
        found = subprocess.check_output([sys.executable, "-c", code], preexec_fn=enter, env=environment(), text=True)
    free, _, where = found.partition(" ")
    assert limit / 2 < int(free) < limit
    assert where.startswith("in the memory cgroup '/")
