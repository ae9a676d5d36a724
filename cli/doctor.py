"""`tierbed doctor` checks the software, the machine and a file system. An error in a check is reported, not raised."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..engine.errors import StoreError
from .arguments import Json, find_nearest_existing
from .output import EXIT_PROBLEM, align, format_size, print_json

MIN_OPEN_FILES = 4096  # with a lower limit, RocksDB keeps opening and closing its files
_REQUIRED_PACKAGES = "numpy", "torch", "lazy-loader", "msgpack", "safetensors"  # without typer and rich, imported above
_EXTRAS = {  # maps each optional extra to its modules and its purpose
    "parquet": (("pyarrow",), "export and import of Parquet"),
    "plot": (("matplotlib",), "`snapshot inspect --plot`"),
    "metrics": (("prometheus_client", "tensorboard"), "`prometheus_text` and `write_tensorboard`"),
}
MIN_FREE_BYTES = 1 << 30  # a disk with less free space fails its check


class Check(NamedTuple):
    """The result of one check."""

    name: str
    ok: bool
    value: str  # what the check found, or the error text
    remedy: str | None = None
    fatal: bool = False  # True if this check failed and tierbed therefore cannot work at all
    optional: bool = False  # True if the check is only for the feature that `value` names

    @property
    def state(self) -> str:
        return "ok" if self.ok else "optional" if self.optional else "missing"


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[PATH]", help="A persistent_path, to check its file system too.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this installation, and say how to fix what is missing. Exits with 1 if tierbed cannot work at all.

    Example: tierbed doctor /data/embeddings
    """
    checks = [*_yield_checks(), *(_yield_disk_checks(path) if path is not None else ())]
    if as_json:
        plain = [{field: value for field, value in check._asdict().items() if field != "fatal"} for check in checks]
        print_json({"works": not any(check.fatal for check in checks), "checks": plain})
    else:
        lines = align([[check.state, check.name, check.value] for check in checks])
        for check, line in zip(checks, lines, strict=True):
            print(line)
            if check.remedy:
                print(f"          -> {check.remedy}")
    if any(check.fatal for check in checks):
        raise typer.Exit(EXIT_PROBLEM)


def _run_check(name: str, check: Callable[[], str], remedy: str, consequence: str = "", **flags: bool) -> Check:
    """Return a `Check` with the result of `check`. If `check` raises, the value is the error and `consequence`."""
    try:
        return Check(name, True, check())
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        return Check(name, False, message + consequence, remedy, **flags)


def _yield_checks() -> Iterator[Check]:
    yield Check("tierbed", True, version("tierbed"))
    yield Check("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    reinstall = "install it again: pip install --force-reinstall"
    packages = [_run_check(p, partial(_check_package, p), f"{reinstall} {p}", fatal=True) for p in _REQUIRED_PACKAGES]
    yield from packages
    if all(package.ok for package in packages):  # the core needs these packages
        core = _run_check("core", _check_core, "install tierbed again, for this Python and this machine", fatal=True)
        yield core
        if core.ok:
            yield from (_check_rocksdb(), *_check_cuda())
    for extra, (modules, purpose) in _EXTRAS.items():
        versions = partial(_read_versions, modules)
        yield _run_check(extra, versions, f"pip install 'tierbed[{extra}]'", f": it is for {purpose}", optional=True)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES
    remedy = f"RocksDB uses half of them: raise the limit to {MIN_OPEN_FILES} or more by `ulimit -n {MIN_OPEN_FILES}`"
    value = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    yield Check("open files", is_enough, value, None if is_enough else remedy)


def _check_package(name: str) -> str:
    import_module(name.replace("-", "_"))
    return version(name)


def _read_versions(modules: Sequence[str]) -> str:
    return ", ".join(f"{module} {version(module.replace('_', '-'))}" for module in modules)


def _check_core() -> str:
    core: Any = import_module("tierbed.engine._core")
    import torch

    sets = core.list_instruction_sets()
    return f"{sets[0]} of {', '.join(sets)}; {torch.get_num_threads()} threads of {os.cpu_count()} processors"


def _check_rocksdb() -> Check:
    from ..engine.store.rocksdb import rocksdb_info

    try:
        info = rocksdb_info()
    except StoreError as error:
        return Check("rocksdb", False, "none: no cached_ssd stores", str(error))
    reads = "reads by io_uring" if info["async_io"] else "reads without io_uring"
    return Check("rocksdb", True, f"{info['version']}, {reads}")


def _check_cuda() -> Iterator[Check]:
    import torch

    if (cuda := torch.version.cuda) is None:
        reason, remedy = f"torch {torch.__version__} is built without it", "install torch with CUDA"
    elif not torch.cuda.is_available():
        reason, remedy = f"torch for CUDA {cuda} finds no device", "check nvidia-smi"
    else:
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield Check(f"cuda:{index}", True, f"{device.name}, {device.total_memory / 1e9:.0f} GB")
        remedy = f"pip install 'tierbed[cuda{cuda.partition('.')[0]}]'"
        yield _run_check("cupy", _check_cupy, remedy, ": no tables on a GPU")
        return
    yield Check("cuda", False, f"no tables on a GPU: {reason}", remedy, optional=True)


def _check_cupy() -> str:
    cupy: Any = import_module("cupy")
    if not (devices := cupy.cuda.runtime.getDeviceCount()):
        raise RuntimeError(f"cupy {cupy.__version__} finds no GPU")
    return f"{cupy.__version__}, {devices} devices"


def _yield_disk_checks(path: Path) -> Iterator[Check]:
    """Check a folder. If the folder does not exist, check its nearest existing parent, and report which one."""
    folder = find_nearest_existing(path)
    if not folder.is_dir():
        yield Check("folder", False, f"{folder} is not a folder", "give a folder, or the path of a new one")
        return
    if folder != path.absolute():
        yield Check("folder", True, f"{path} does not exist yet, so {folder} was checked")
    free_bytes = shutil.disk_usage(folder).free
    remedy = None if free_bytes >= MIN_FREE_BYTES else "free space"
    yield Check("free space", remedy is None, f"{format_size(free_bytes)} in {folder}", remedy)
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".tierbed-doctor-", dir=folder)
    except OSError as error:
        yield Check("writable", False, str(error), "give a folder that this user can write, or change its owner")
        return
    with scratch as name:
        for feature, (check, remedy) in _DISK_FEATURES.items():
            yield _run_check(feature, partial(check, Path(name)), remedy)


def _time_fsync(folder: Path) -> str:
    from ..engine.durable import fsync_dir, fsync_file

    times = []
    for _ in range(5):
        begin = time.perf_counter()
        (folder / "file").write_bytes(bytes(4096))
        fsync_file(folder / "file")
        times.append(time.perf_counter() - begin)
    fsync_dir(folder)
    return f"{1000 * sorted(times)[2]:.2g} ms"


def _check_rename(folder: Path) -> str:
    (folder / "a").mkdir()
    (folder / "a").rename(folder / "b")
    return "atomic"


def _check_lock(folder: Path) -> str:
    with open(folder / "lock", "w") as first, open(folder / "lock", "w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise OSError("two exclusive locks on one file were both granted")
    return "exclusive"


def _check_link(folder: Path) -> str:
    (folder / "linked").write_bytes(b"")
    os.link(folder / "linked", folder / "link")
    return "supported"


def _check_direct_reads(folder: Path) -> str:
    (folder / "direct").write_bytes(bytes(4096))
    os.close(os.open(folder / "direct", os.O_RDONLY | os.O_DIRECT))
    return "supported"


def _check_socket(folder: Path) -> str:
    # a socket's address has at most 108 bytes, so use a short path
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"/proc/self/fd/{descriptor}/socket")
    finally:
        os.close(descriptor)
    return "supported"


_LOCAL_REMEDY = "persistent_path must be on a file system that supports it: a local one, such as ext4 or xfs"
_SOCKET_REMEDY = "`tierbed snapshot save` cannot ask a running trainer here; save in the trainer, or close it first"
_DISK_FEATURES = {
    "fsync": (_time_fsync, _LOCAL_REMEDY),
    "rename": (_check_rename, _LOCAL_REMEDY),
    "locks": (_check_lock, _LOCAL_REMEDY),
    "hard links": (_check_link, "RocksDB checkpoints copy files here, and take that much space again"),
    "direct reads": (_check_direct_reads, 'leave read_mode="buffered", the default'),
    "sockets": (_check_socket, _SOCKET_REMEDY),
}
