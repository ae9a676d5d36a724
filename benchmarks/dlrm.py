"""Time whole steps of a DLRM against TorchRec and torch's sparse embeddings, and gate the ratios.

    make peers
    python benchmarks/dlrm.py [--section NAME ...] [--quick] [--json FILE]

A section has figures only where the losses of every step agree. Exits with 1 if a bar is missed, or where TorchRec is
not installed. See README.md here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from dlrm_contenders import Contender, DenseAlone, Tierbed, Torch, TorchRec
from dlrm_model import Batches, Model
from sections import measured, options, prepared
from tier_report import Figure, listed, report
from tier_stores import Mismatch
from torch import Tensor

WITHOUT = "TorchRec is not installed: `make peers` installs it"


@dataclass(frozen=True)
class Section:
    """share, whole: the bars. turn: steps that one takes before the others do; rounds: the first two only warm up.

    tolerance: of losses. Rounding alone moved them apart by a third of it, in more steps than it takes a learning rate
    of the rows that is 1 % off to move them by the whole.
    """

    model: Model
    tolerance: float
    share: float | None = None
    whole: float | None = None
    turn: int = 10
    rounds: int = 12


SECTIONS = {
    "1 id": Section(Model(batch=2048, length=1), 2e-5, share=0.35, whole=1.8),
    "10 ids": Section(Model(batch=2048, length=10), 5e-4, share=0.5, whole=1.75, turn=6),
    "batch 256": Section(Model(batch=256, length=1), 2e-5, turn=40),
}


def quick(section: Section) -> Section:
    model = replace(section.model, batch=16, tables=3, rows=50, bottom=(8,), top=(8,))
    return replace(section, model=model, turn=2, rounds=4)


def has_torchrec() -> bool:
    return importlib.util.find_spec("torchrec") is not None


def contenders(model: Model) -> list[Contender]:
    ours = [Tierbed(model), Tierbed(model, recommended=True)]
    torchrec = [TorchRec(model), TorchRec(model, compiled=True)] if has_torchrec() else []
    return [*ours, *torchrec, Torch(model), DenseAlone(model)]


def measure(name: str, section: Section) -> list[Figure]:
    model = section.model
    given = Batches(model)
    everyone = contenders(model)
    seconds: dict[str, list[float]] = {each.name: [] for each in everyone}
    for first in range(0, section.turn * section.rounds, section.turn):
        batches = [given[number] for number in range(first, first + section.turn)]
        losses: dict[str, list[Tensor]] = {}
        for each in everyone:
            own = [each.prepared(batch) for batch in batches]
            begin = time.perf_counter()
            losses[each.name] = each.run(own)
            seconds[each.name].append((time.perf_counter() - begin) / section.turn)
        del losses[DenseAlone.name]
        check(losses, first, section.tolerance)
    return figures(name, section, {each: taken[2:] for each, taken in seconds.items()})


def check(losses: dict[str, list[Tensor]], first: int, tolerance: float) -> None:
    """Raises Mismatch unless all have the losses of the first one, to that share of them, from step `first` on."""
    (ours, wanted), *others = losses.items()
    for name, given in others:
        for step, (one, other) in enumerate(zip(wanted, given, strict=True), first):
            if not abs(float(one) - float(other)) <= tolerance * float(one):
                raise Mismatch(f"loss {float(one)} of step {step} by {ours}, {float(other)} by {name}")


def figures(name: str, section: Section, seconds: dict[str, list[float]]) -> list[Figure]:
    """Medians of the ratios of each turn."""
    dense, ours, best = (seconds[each] for each in (DenseAlone.name, Tierbed.name, Tierbed.recommended_name))
    notes = listed((each, f"{1e3 * median(taken):.1f} ms") for each, taken in seconds.items())

    def ratio(of: Callable[..., float], *taken: Sequence[float]) -> float:
        return median(of(*turn) for turn in zip(*taken, strict=True))

    found = []
    if has_torchrec():
        peer, compiled = seconds[TorchRec.name], seconds[TorchRec.compiled_name]
        share = ratio(lambda one, other, alone: (one - alone) / (other - alone), ours, peer, dense)
        whole = ratio(lambda one, other: other / one, best, peer)
        found = [
            Figure(name, "embeddings' share of a step, of TorchRec's", share, "", section.share, True, notes),
            Figure(name, "a step of TorchRec, of a recommended one", whole, "", section.whole),
            Figure(name, "the same, its dense part compiled", ratio(lambda one, other: other / one, best, compiled)),
        ]
    sparse = ratio(lambda one, other: other / one, best, seconds[Torch.name])
    return [*found, Figure(name, "a step of torch sparse, of a recommended one", sparse, notes="" if found else notes)]


def main(arguments: list[str] | None = None) -> int:
    given = options(__doc__, SECTIONS).parse_args(arguments)
    about = prepared()
    for package in ("torchrec", "fbgemm-gpu-cpu") if has_torchrec() else ():
        about[package] = importlib.metadata.version(package)
    torch.sparse.check_sparse_tensor_invariants.disable()  # as by default, which Adagrad warns of
    sections = {name: quick(section) if given.quick else section for name, section in SECTIONS.items()}
    names = given.section or SECTIONS
    found, failed = measured(names, given.folder, lambda name, folder: measure(name, sections[name]))
    passed = report(found, about, given.json)
    if not has_torchrec():
        print(WITHOUT, file=sys.stderr)
    return int(failed or not (given.quick or (passed and has_torchrec())))


if __name__ == "__main__":
    sys.exit(main())
