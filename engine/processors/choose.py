"""The processor of a table, by the device of its module."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import InputError
from ..options.inputs import DEVICES
from ..options.options import StoreOptions
from .processor import Factory


def _cpu(device: torch.device, options: StoreOptions) -> Factory:
    from .cpu import CpuProcessor

    return CpuProcessor


def _cuda(device: torch.device, options: StoreOptions) -> Factory:
    from ..ops.cuda.device import cuda_device
    from .cuda import on_device

    return on_device(cuda_device(device.index), options)


PROCESSORS: dict[str, Callable[[torch.device, StoreOptions], Factory]] = {"cpu": _cpu, "cuda": _cuda}


def processor_of(device: torch.device, options: StoreOptions) -> Factory:
    """The maker of processors for a device of torch. InputError for a device that tables cannot be on.

    OptionError for options that the device lacks. StoreError where the software for it is not installed.
    """
    if device.type not in DEVICES:
        raise InputError(
            f"the embedding was moved to {device}; tables live on the CPU or on CUDA devices: move it by .cpu() or "
            ".cuda()"
        )
    return PROCESSORS[device.type](device, options)
