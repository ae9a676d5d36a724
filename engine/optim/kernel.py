"""How an optimizer's file declares its kernel, and the C++ header that is generated from all of them.

A kernel is C++ text over named inputs, in the spirit of `cupy.ElementwiseKernel`. Each file of this folder holds
`NAME = Kernel(...)` of literals, or `NAME = replace(OTHER, ...)` of one above it, whose texts it may name, so that this
module reads them without importing the files: the build runs it as a script, `python kernel.py OUTPUT`, with a Python
that has neither torch nor NumPy; for a GPU `header()` gives the same text at run time.

What a body may name:

    element   w, g            the weight, and the row's summed and clipped gradient
              element states  of this element; the body updates them and w
              row_values      made by `row`, and for `finish` by `after`
              first, step     whether the row was never written; the embedding's step, from 1
    row       row_states      of this row; the body updates them
              total, dim      the sum of `term` over the row's elements (kernels/gradients.h); elements of the row
              row_values      which the body sets
    after     norms           by name, sums over the row's elements of w and g after `element`
              row_values      which the body sets
    finish    as element      a last pass, with g after `element`
    any       hypers          float32, rounded once from double; `doubles` stay double
              functions       of kernels/rule.h
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

LIMITS = ("clip_grad_value", "clip_grad_row_norm", "max_row_norm")  # of every rule, after its other numbers; 0 is none


@dataclass(frozen=True)
class CatchUp:
    """How a row gets the steps that it missed when it is next needed.

    At most `limit` steps (an expression of hyper-parameters) are applied one by one, the rest at once. Bodies see
    hypers, and `values` (float32) and `doubles`, which one body passes to the next:
    `begin` (may name `last`, the row's step); then for each step `step`, and `element` for w and element states;
    then `rest` and `rest_element` with `rest`, the number of further steps; once if all rates are equal, else several
    times. They see `rate`, the learning rate of the step (past_rates.py), or the mean of those of all `rest` steps, and
    `is_constant`, whether these are equal. The double `lr` is the rate of the present step.
    unwritten: "steps" if rows that were never written miss steps as well, "rest" if those change by `rest` alone.
    """

    limit: str
    values: tuple[str, ...]
    doubles: tuple[str, ...]
    begin: str
    step: str
    element: str
    rest: str = ""
    rest_element: str = ""
    unwritten: str = ""


@dataclass(frozen=True)
class Kernel:
    """The kernel of one rule.

    Without `term` and `row` there is no pass before the one over a row's elements, and without `norms`, `after` and
    `finish` none after it. hypers, doubles: names with spaces between them. norms: (name, term) of each sum.
    """

    name: str
    hypers: str
    element: str
    doubles: str = ""
    element_states: tuple[str, ...] = ()
    row_states: tuple[str, ...] = ()
    term: str = ""
    row: str = ""
    row_values: tuple[str, ...] = ()
    norms: tuple[tuple[str, str], ...] = ()
    after: str = ""
    finish: str = ""
    catch_up: CatchUp | None = None

    @property
    def all_hypers(self) -> tuple[str, ...]:
        """The names of all hyper-parameters in the order of the native rule, without limits."""
        return (*self.hypers.split(), *self.doubles.split())

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states, in the order of the line."""
        return self.element_states + self.row_states

    def state_widths(self, dim: int) -> tuple[int, ...]:
        """The floats of each state in a row of `dim` elements."""
        return (dim,) * len(self.element_states) + (1,) * len(self.row_states)


def declared(folder: Path = Path(__file__).parent) -> list[Kernel]:
    """Every kernel of the files in `folder`, by name. Raises ValueError for one that is not made of literals."""
    kernels = []
    for path in folder.glob("*.py"):
        found: dict[str, Any] = {"__builtins__": {}, "Kernel": Kernel, "CatchUp": CatchUp, "replace": replace}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign([ast.Name(name)], ast.Call(ast.Name("Kernel" | "CatchUp" | "replace")) as call):
                    try:
                        found[name] = eval(compile(ast.Expression(call), path.name, "eval"), found)
                    except NameError as error:
                        where = f"{path.name}, line {node.lineno}"
                        raise ValueError(f"{where}: a kernel is made of literals alone: {error}") from error
        kernels += [one for one in found.values() if isinstance(one, Kernel)]
    return sorted(kernels, key=lambda kernel: str(kernel.name))


@cache
def kernels() -> dict[str, Kernel]:
    """Every kernel of this folder, by name, without loading torch."""
    found = {str(kernel.name): kernel for kernel in declared()}
    if not found:
        raise ImportError(
            f"{str(Path(__file__).parent)!r} has no sources of optimizers: install tierbed with its .py files"
        )
    return found


def header() -> str:
    """The C++ text: a struct for each rule, and `AllRules`, the list of them."""
    found = declared()
    names = ", ".join(struct_name(kernel.name) for kernel in found)
    structs = "\n".join(_struct(kernel) for kernel in found)
    return f"""// Made by engine/optim/kernel.py of the kernels in engine/optim.
#pragma once
#include "ops/kernels/rule.h"

namespace tierbed {{
{structs}

using AllRules = Rules<{names}>;

}}  // namespace tierbed
"""


def struct_name(rule: str) -> str:
    """The name of a rule's struct in the header."""
    return "".join(part.capitalize() for part in rule.split("_"))


def _struct(kernel: Kernel) -> str:
    hypers = dict.fromkeys(kernel.hypers.split(), "float") | dict.fromkeys(kernel.doubles.split(), "double")
    reads = "".join(
        f"\n        {name} = static_cast<{kind}>(hyper[{i}]);" for i, (name, kind) in enumerate(hypers.items())
    )
    reads += "\n        past = hyper + HYPERS + LIMITS;" if kernel.catch_up else ""
    unwritten = kernel.catch_up.unwritten if kernel.catch_up else ""
    row = {"first": "bool", "step": "u32", "total": "float", "dim": "float"} | dict.fromkeys(kernel.row_values, "float")
    elements = {name: f"state[{i}]" for i, name in enumerate(kernel.element_states)}
    rows = {name: f"state[{i}]" for i, name in enumerate(kernel.row_states)}
    name = struct_name(kernel.name)
    arguments = f"float& w, float{'&' if kernel.norms else ''} g, float* state, const Row& row"
    return f"""
struct {name} : Limits {{
    static constexpr const char* NAME = "{kernel.name}";
    static constexpr u32 ELEMENT_STATES = {len(elements)}, ROW_STATES = {len(rows)}, HYPERS = {len(hypers)};
    static constexpr bool REDUCES = {_flag(kernel.term)}, CATCHES_UP = {_flag(kernel.catch_up)};
    static constexpr bool MISSES_UNWRITTEN = {_flag(unwritten)}, RESTS_UNWRITTEN = {_flag(unwritten == "rest")};
    static constexpr u32 NORMS = {len(kernel.norms)};
{_members(hypers)}
    struct Row {{
{_members(row, indent=8)}
    }};
    TIERBED_FN explicit {name}(const double* hyper) : Limits(hyper + HYPERS) {{{reads}
    }}
{_function("float", "term", "float w, float g", {}, f"return {kernel.term or '0.0f'};")}
{_function("void", "row", "Row& row, float* state", _references(rows, row), kernel.row)}
{_function("void", "element", arguments, _references(elements, row), kernel.element)}
{_norms(kernel, elements, row)}{_catch_up(kernel.catch_up, elements)}}};"""


def _norms(kernel: Kernel, elements: dict[str, str], row: dict[str, str]) -> str:
    if not kernel.norms:
        return ""
    sums = {name: f"sums[{i}]" for i, (name, _) in enumerate(kernel.norms)}
    terms = "\n".join(f"if (i == {i}) return {term};" for i, (_, term) in enumerate(kernel.norms))
    element = "float& w, float g, float* state, const Row& row"
    functions = (
        _function("float", "norm", "u32 i, float w, float g", {}, f"{terms}\nreturn 0.0f;"),
        _function("void", "after", "Row& row, const float* sums", _references(sums, row), kernel.after),
        _function("void", "finish", element, _references(elements, row), kernel.finish),
    )
    return "\n".join(functions) + "\n"


def _catch_up(catch_up: CatchUp | None, elements: dict[str, str]) -> str:
    if catch_up is None:
        return ""
    fields = {"last": "u32", "rest": "u32", "is_constant": "bool"}
    fields |= dict.fromkeys(("rate", *catch_up.doubles), "double") | dict.fromkeys(catch_up.values, "float")
    values, states = _references({}, fields, "missed"), _references(elements, fields, "missed")
    step = "float& w, float* state, const Missed& missed"
    return f"""    struct Missed {{
{_members(fields, indent=8)}
    }};
    const double* past;
    TIERBED_FN Rates rates() const {{ return Rates(past, lr); }}
    TIERBED_FN float limit() const {{ return {catch_up.limit}; }}
{_function("void", "begin_missed", "Missed& missed", values, catch_up.begin)}
{_function("void", "missed_step", "Missed& missed", values, catch_up.step)}
{_function("void", "missed_element", step, states, catch_up.element)}
{_function("void", "missed_rest", "Missed& missed", values, catch_up.rest)}
{_function("void", "rest_element", step, states, catch_up.rest_element)}
"""


def _references(states: dict[str, str], fields: dict[str, str], owner: str = "row") -> dict[str, str]:
    return states | {name: f"{owner}.{name}" for name in fields}


def _function(result: str, name: str, arguments: str, references: dict[str, str], body: str) -> str:
    """A member function whose body names `references`; references and arguments that it does not name are left out."""
    lines = [line.strip() for line in body.strip().splitlines()]
    lines = [f"auto& {name} = {place};" for name, place in references.items() if _names(body, name)] + lines
    text = "\n".join(lines)
    kept = [a if _names(text, a.split()[-1]) else a.rsplit(" ", 1)[0] for a in arguments.split(", ")]
    inner = "".join(f"\n        {line}" for line in lines)
    return f"    TIERBED_FN {result} {name}({', '.join(kept)}) const {{{inner}\n    }}"


def _members(types: dict[str, str], indent: int = 4) -> str:
    return "\n".join(f"{' ' * indent}{kind} {name};" for name, kind in types.items())


def _names(body: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", body) is not None


def _flag(value: object) -> str:
    return "true" if value else "false"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(header(), encoding="utf-8")
