from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

os.environ.setdefault("TIERBED_HASH_SEED", "1")  # slots of rows, and so what a small cache evicts, repeat

pytest.register_assert_rewrite("support")  # before anything imports it

from support import warm  # noqa: E402
from support.cells import pytest_collection_modifyitems  # noqa: E402

__all__ = ["pytest_collection_modifyitems"]

for profile, max_examples in {"suite": 20, "slow": 200, "sanitize": 20}.items():
    settings.register_profile(profile, max_examples=max_examples, deadline=None)
settings.load_profile("suite")  # --hypothesis-profile takes another

# Seconds: a guard against what hangs, no bar. Four times what the longest test took on a machine that was busy.
LIMIT, SLOW_LIMIT = 600, 3600
STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", type=Path, help="another build of the native core to test, an extension module's file")


def pytest_configure(config: pytest.Config) -> None:
    # a shell's background jobs ignore it, and so would all processes that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"  # or a new worker may run the test again that ended the last
    if not hasattr(config, "workerinput"):  # the workers of a run share one
        ending = contextlib.ExitStack()
        ending.enter_context(warm.running_server())
        config.add_cleanup(ending.close)
    config.stash[STDERR] = os.dup(2)  # which tests redirect
    gc.set_threshold(10_000)  # a seventh of the time of collecting tests, a twentieth of that of running them
    config.addinivalue_line("markers", "limit(seconds): how long the test may take before it counts as hanging")
    if core := config.getoption("core"):
        assert core.is_file(), f"--core {core}: no such file"
        assert "tierbed.engine" not in sys.modules
        spec = spec_from_file_location("tierbed.engine._core", core)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that hangs shows where each thread stands and fails. Where nothing interrupts it, its process ends."""
    marker = item.get_closest_marker("limit")
    limit = marker.args[0] if marker else SLOW_LIMIT if item.get_closest_marker("slow") else LIMIT
    stderr = item.config.stash[STDERR]

    def hangs(number: int, frame: object) -> None:
        faulthandler.dump_traceback(stderr)
        pytest.fail(f"it hangs: not over after {limit} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(limit)
    faulthandler.dump_traceback_later(2 * limit, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        _without_limit()
        signal.signal(signal.SIGALRM, before)


def _without_limit() -> None:
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish() -> None:
    if "support.ranks" in sys.modules:
        sys.modules["support.ranks"].end_kept()


def pytest_enter_pdb() -> None:
    _without_limit()


def _poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned(*args: Any, **kwargs: Any) -> Any:
        array = allocate(*args, **kwargs)
        if array.dtype.kind in "fcb":
            array.fill(np.nan)  # True for booleans
        elif array.nbytes and not array.dtype.hasobject:
            array.reshape(-1, order="A").view(np.uint8)[:] = 0xA5
        return array

    return poisoned


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN and nonsense, so that a result nobody wrote cannot pass for zeros."""
    import torch  # not where the workers of a run are started

    from tierbed.engine import _core
    from tierbed.engine.ops import batch

    def scratch(size: int) -> np.ndarray:
        memory = allocate_scratch(size)
        memory.fill(0xFF)  # NaN of any width
        return memory

    allocate_scratch = _core.scratch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "scratch", scratch)
        patch.setattr(batch, "LARGE_ALLOCATION_BYTES", 256)
        patch.setattr(np, "empty", _poisoned(np.empty))
        patch.setattr(np, "empty_like", _poisoned(np.empty_like))
        # torch fills its own where algorithms are deterministic; without the variable cuBLAS warns of that
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        gc.freeze()  # collections leave what was imported alone: a seventh of the time of tests
        yield
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A test that listens to the log by a handler and a level of its own leaves neither to those after it."""
    log = logging.getLogger("tierbed")
    level, handlers = log.level, log.handlers[:]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Each test draws the same numbers. A test that leaves its thread with other dispatch keys or without gradients
    fails, not those after it."""
    import torch

    def state() -> tuple[str, str, bool]:
        keys = torch._C._dispatch_tls_local_exclude_set(), torch._C._dispatch_tls_local_include_set()
        return str(keys[0]), str(keys[1]), torch.is_grad_enabled()

    torch.manual_seed(0)
    before = state()
    yield
    assert state() == before


@pytest.fixture(params=[1, 2, 16], ids="threads{}".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The test runs with this many native threads."""
    import torch

    from tierbed.engine import _core

    _core.set_num_threads(request.param)
    yield request.param
    _core.set_num_threads(torch.get_num_threads())


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Any:
    """A device of `cuda_tables.on_devices`, made when the test runs."""
    return request.param()


@pytest.fixture
def place(device: Any) -> Iterator[Any]:
    """The torch device of `device`, where tables are while the test runs."""
    from support.cuda_tables import tables_on  # not where the workers of a run are started

    with tables_on(device) as where:
        yield where


@pytest.fixture
def few_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer sizes of arguments have a step of their own, so that a step for many comes sooner."""
    from support.graphs import FEW

    monkeypatch.setattr("tierbed.graph.run.step_cache.MAX_STATIC_SHAPES", FEW)


@pytest.fixture
def native_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, which the native loops follow, until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """torch's process group, of this process alone."""
    import torch.distributed as dist  # not where the workers of a run are started

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
