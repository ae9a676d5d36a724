"""What `tierbed doctor` finds of the software and the machine. Nothing here raises: what fails is a finding."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

FILES = 4096  # open at a time; fewer make RocksDB open and close its files again and again

_NEEDED = "numpy", "torch", "lazy-loader", "msgpack", "safetensors"  # beside those of the command line itself
_EXTRAS = {  # what imports of each, and what it is for
    "parquet": (("pyarrow",), "export and import of Parquet"),
    "plot": (("matplotlib",), "`snapshot inspect --plot`"),
    "metrics": (("prometheus_client", "tensorboard"), "`prometheus_text` and `write_tensorboard`"),
}


class Check(NamedTuple):
    """One finding: `value` tells what is there, `remedy` what to do where it is not `ok`.

    `fatal`: nothing works without it.
    """

    name: str
    ok: bool
    value: str
    remedy: str | None = None
    fatal: bool = False

    def plain(self) -> dict[str, Any]:
        """The finding as plain values for JSON."""
        return {"name": self.name, "ok": self.ok, "value": self.value, "remedy": self.remedy}


def checks() -> Iterator[Check]:
    """The findings on this installation."""
    yield Check("tierbed", True, version("tierbed"))
    yield Check("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    packages = [_imported(package) for package in _NEEDED]
    yield from packages
    if all(package.ok for package in packages):  # the core would only lack the same
        yield (core := _core())
        if core.ok:
            yield _rocksdb()
            yield from _cuda()
    for extra, (modules, use) in _EXTRAS.items():
        yield _extra(extra, modules, use)
    yield _open_files()


def _imported(package: str) -> Check:
    try:
        import_module(package.replace("-", "_"))
        return Check(package, True, version(package))
    except Exception as error:
        return Check(package, False, _said(error), f"install it again: pip install --force-reinstall {package}", True)


def _core() -> Check:
    try:
        core: Any = import_module("tierbed.engine._core")
        import torch

        sets, threads = core.instruction_sets(), torch.get_num_threads()
    except Exception as error:
        return Check("core", False, _said(error), "install tierbed again, for this Python and this machine", True)
    return Check("core", True, f"{sets[0]} of {', '.join(sets)}; {threads} threads of {os.cpu_count()} processors")


def _rocksdb() -> Check:
    from ..engine import StoreError, rocksdb_info

    try:
        info = rocksdb_info()
    except StoreError as error:
        return Check("rocksdb", False, "none: no cached_ssd stores", str(error))
    reads = "reads by io_uring" if info["async_io"] else "reads without io_uring"
    return Check("rocksdb", True, f"{info['version']}, {reads}")


def _cuda() -> Iterator[Check]:
    import torch

    if torch.version.cuda is None:
        yield Check("cuda", False, f"none: torch {torch.__version__} is built without it", "install torch with CUDA")
        return
    if not torch.cuda.is_available():
        yield Check("cuda", False, f"none: torch for CUDA {torch.version.cuda} finds no device", "look at nvidia-smi")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield Check(f"cuda:{index}", True, f"{found.name}, {found.total_memory / 1e9:.0f} GB")
    yield _cupy(torch.version.cuda)


def _cupy(cuda: str) -> Check:
    remedy = f"pip install 'tierbed[cuda{cuda.partition('.')[0]}]'"
    try:
        cupy: Any = import_module("cupy")
        devices = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return Check("cupy", False, f"{_said(error)}: no tables on a GPU", remedy)
    return Check("cupy", devices > 0, f"{cupy.__version__}, {devices} devices", None if devices else remedy)


def _extra(extra: str, modules: tuple[str, ...], use: str) -> Check:
    try:
        versions = [f"{module} {version(module.replace('_', '-'))}" for module in modules]
    except PackageNotFoundError as error:
        return Check(extra, False, f"no {error.name}, for {use}", f"pip install 'tierbed[{extra}]'")
    return Check(extra, True, ", ".join(versions))


def _open_files() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = limit == resource.RLIM_INFINITY or limit >= FILES
    remedy = None if ok else f"RocksDB keeps half of them open: raise it to {FILES} or more by `ulimit -n {FILES}`"
    return Check("open files", ok, "unlimited" if limit == resource.RLIM_INFINITY else str(limit), remedy)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
