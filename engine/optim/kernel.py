"""Declares optimizer kernels, and generates a C++ header from all kernels.

A kernel is C++ text with named inputs, similar to `cupy.ElementwiseKernel`. A file in this folder declares a kernel as
`NAME = RuleKernel(...)` with literal arguments. `NAME = replace(OTHER, ...)` declares a variant of an earlier kernel
OTHER. Its arguments may use OTHER's fields. This module can read such kernels without importing the files. The build
runs this script, `python kernel.py OUTPUT`, without torch and NumPy. For a GPU, `generate_header()` runs at run time.

A kernel's bodies in the order in which they run for a row, each with the names that it may use:

    row_body: runs once per row, and sets `row_values`.
        row_states: the row's states; this body updates the states.
        total: the sum of `reduction_term` over the row's elements (kernels/gradients.h).
        dim: the number of elements in a row.
    element_body: runs once per element, and updates `w` and the element's states.
        w, g: the weight, and the summed and clipped gradient.
        row_values: the values that `row_body` has set.
        first: true if the row was never written.
        step: the embedding's step number, counted from 1.
    row_from_norms: runs once per row, and sets `row_values`.
        norms: one variable for each norm, with the name given in `norms`. Its value is the sum of the norm's term over
            the row's elements, computed from the `w` and `g` that `element_body` left.
    second_pass: runs once per element, and may use the same names as `element_body`.
        g: the value that `element_body` left in `g`.
        row_values: the values that `row_body` or `row_from_norms` has set.
    All bodies may also use the functions in kernels/rule.h and the hyper-parameters. Hyper-parameters are float32,
    rounded once from double. The hyper-parameters in `doubles` stay double.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

# Limits that every rule has. In a rule's list of numbers, the limits come after the hyper-parameters. 0 means no limit.
LIMITS = ("clip_grad_value", "clip_grad_row_norm", "max_row_norm")


@dataclass(frozen=True)
class CatchUp:
    """How a row catches up on missed steps before the row is looked up or updated.

    The bodies are C++ texts, and run in the order of these fields. Each body can use the rule's hyper-parameters. `lr`
    is a double, the current step's learning rate. All bodies share the variables named in `values` and `doubles`.
    """

    limit: str  # the largest number of steps that are applied one by one; a C++ expression of hyper-parameters
    values: tuple[str, ...]  # names of float32 variables
    doubles: tuple[str, ...]
    begin_body: str  # runs once; may use `last`, the step of the row's last update
    step_body: str  # runs for each step up to `limit`, before `element_body`; `rate` is the step's learning rate
    element_body: str  # runs for each element; updates w and element states
    # `combined_body` and `combined_element_body` apply the steps beyond `limit` at once. Both run once if these steps
    # have one learning rate, otherwise several times. Both may use three variables: `num_combined` is the number of
    # these steps, `rate` is the mean of their learning rates, and `is_constant` is true if these rates are equal.
    combined_body: str = ""
    combined_element_body: str = ""
    # Missed steps of a row that was never written: "" skips them, "steps" applies them, "combined" applies all at once.
    unwritten_rows: Literal["", "steps", "combined"] = ""


@dataclass(frozen=True)
class RuleKernel:
    """The kernel of one optimizer rule. The file's docstring describes the bodies.

    If `reduction_term` and `row_body` are both empty, `element_body` is the first pass over the row. If `norms`,
    `row_from_norms` and `second_pass` are all empty, `element_body` is the last pass over the row.
    """

    name: str
    hyperparams: str  # names separated by spaces
    element_body: str
    doubles: str = ""  # names separated by spaces
    element_states: tuple[str, ...] = ()
    row_states: tuple[str, ...] = ()
    reduction_term: str = ""
    row_body: str = ""
    row_values: tuple[str, ...] = ()
    norms: tuple[tuple[str, str], ...] = ()  # (name, term) pairs
    row_from_norms: str = ""
    second_pass: str = ""
    catch_up: CatchUp | None = None

    @property
    def all_hyperparams(self) -> tuple[str, ...]:
        """The names of all hyper-parameters except limits, in the native rule's order."""
        return (*self.hyperparams.split(), *self.doubles.split())

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states, in the order in which a row stores them."""
        return self.element_states + self.row_states

    def state_widths(self, dim: int) -> tuple[int, ...]:
        """Returns, for each state, how many numbers a row of `dim` elements stores."""
        return (dim,) * len(self.element_states) + (1,) * len(self.row_states)


def find_kernels(folder: Path = Path(__file__).parent) -> list[RuleKernel]:
    """Return the kernels in a folder's files, sorted by name. Raises ValueError if an argument is not a literal."""
    kernels = []
    for path in folder.glob("*.py"):
        names: dict[str, Any] = {"__builtins__": {}, "RuleKernel": RuleKernel, "CatchUp": CatchUp, "replace": replace}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign([ast.Name(name)], ast.Call(ast.Name("RuleKernel" | "CatchUp" | "replace")) as call):
                    try:
                        names[name] = eval(compile(ast.Expression(call), path.name, "eval"), names)
                    except NameError as error:
                        problem = f"a kernel's arguments must be literals: {error}"
                        raise ValueError(f"{path.name}, line {node.lineno}: {problem}") from error
        kernels += [value for value in names.values() if isinstance(value, RuleKernel)]
    return sorted(kernels, key=lambda kernel: str(kernel.name))


@cache
def load_kernels() -> dict[str, RuleKernel]:
    """Return the kernels in this folder by name, without loading torch."""
    by_name = {str(kernel.name): kernel for kernel in find_kernels()}
    if not by_name:
        raise ImportError(f"no optimizer source files in {str(Path(__file__).parent)!r}: install tierbed's .py files")
    return by_name


def generate_header() -> str:
    """Return the C++ text: a struct for each rule, and the list `AllRules`."""
    kernels = find_kernels()
    names = ", ".join(make_struct_name(kernel.name) for kernel in kernels)
    structs = "\n".join(_define_struct(kernel) for kernel in kernels)
    return f"""// Generated by engine/optim/kernel.py from the kernels in engine/optim.
#pragma once
#include "ops/kernels/rule.h"

namespace tierbed {{
{structs}

using AllRules = Rules<{names}>;

}}  // namespace tierbed
"""


def make_struct_name(rule_name: str) -> str:
    return "".join(part.capitalize() for part in rule_name.split("_"))


def _define_struct(kernel: RuleKernel) -> str:
    hyperparams = dict.fromkeys(kernel.hyperparams.split(), "float") | dict.fromkeys(kernel.doubles.split(), "double")
    reads = [f"{name} = static_cast<{kind}>(hyperparams[{i}]);" for i, (name, kind) in enumerate(hyperparams.items())]
    reads += ["past = hyperparams + HYPERPARAMS + LIMITS;"] if kernel.catch_up else []
    unwritten = kernel.catch_up.unwritten_rows if kernel.catch_up else ""
    row = {"first": "bool", "step": "u32", "total": "float", "dim": "float"} | dict.fromkeys(kernel.row_values, "float")
    elements = {name: f"state[{i}]" for i, name in enumerate(kernel.element_states)}
    rows = {name: f"state[{i}]" for i, name in enumerate(kernel.row_states)}
    name = make_struct_name(kernel.name)
    arguments = f"float& w, float{'&' if kernel.norms else ''} g, float* state, const Row& row"
    return f"""
struct {name} : Limits {{
    static constexpr const char* NAME = "{kernel.name}";
    static constexpr u32 ELEMENT_STATES = {len(elements)}, ROW_STATES = {len(rows)}, HYPERPARAMS = {len(hyperparams)};
    static constexpr bool HAS_REDUCTION = {_bool(kernel.reduction_term)}, CATCHES_UP = {_bool(kernel.catch_up)};
    static constexpr bool MISSES_UNWRITTEN = {_bool(unwritten)}, COMBINES_UNWRITTEN = {_bool(unwritten == "combined")};
    static constexpr u32 NORMS = {len(kernel.norms)};
{_declare_members(hyperparams)}
    struct Row {{
{_declare_members(row, indent=8)}
    }};
    TIERBED_FN explicit {name}(const double* hyperparams) : Limits(hyperparams + HYPERPARAMS) {{{_indent(reads)}
    }}
{_define_function("float", "reduction_term", "float w, float g", {}, f"return {kernel.reduction_term or '0.0f'};")}
{_define_function("void", "row", "Row& row, float* state", _make_references(rows, row), kernel.row_body)}
{_define_function("void", "element", arguments, _make_references(elements, row), kernel.element_body)}
{_define_norms(kernel, elements, row)}{_define_catch_up(kernel.catch_up, elements)}}};"""


def _define_norms(kernel: RuleKernel, elements: dict[str, str], row: dict[str, str]) -> str:
    if not kernel.norms:
        return ""
    sums = {name: f"sums[{i}]" for i, (name, _) in enumerate(kernel.norms)}
    terms = "\n".join(f"if (i == {i}) return {term};" for i, (_, term) in enumerate(kernel.norms))
    element = "float& w, float g, float* state, const Row& row"
    row_arguments, references = "Row& row, const float* sums", _make_references(sums, row)
    functions = (
        _define_function("float", "norm", "u32 i, float w, float g", {}, f"{terms}\nreturn 0.0f;"),
        _define_function("void", "row_from_norms", row_arguments, references, kernel.row_from_norms),
        _define_function("void", "second_pass", element, _make_references(elements, row), kernel.second_pass),
    )
    return "\n".join(functions) + "\n"


def _define_catch_up(catch_up: CatchUp | None, elements: dict[str, str]) -> str:
    if catch_up is None:
        return ""
    fields = {"last": "u32", "num_combined": "u32", "is_constant": "bool"}
    fields |= dict.fromkeys(("rate", *catch_up.doubles), "double") | dict.fromkeys(catch_up.values, "float")
    values, states = _make_references({}, fields, "missed"), _make_references(elements, fields, "missed")
    step = "float& w, float* state, const Missed& missed"
    return f"""    struct Missed {{
{_declare_members(fields, indent=8)}
    }};
    const double* past;
    TIERBED_FN Rates rates() const {{ return Rates(past, lr); }}
    TIERBED_FN float limit() const {{ return {catch_up.limit}; }}
{_define_function("void", "begin_missed", "Missed& missed", values, catch_up.begin_body)}
{_define_function("void", "missed_step", "Missed& missed", values, catch_up.step_body)}
{_define_function("void", "missed_element", step, states, catch_up.element_body)}
{_define_function("void", "begin_combined", "Missed& missed", values, catch_up.combined_body)}
{_define_function("void", "combined_element", step, states, catch_up.combined_element_body)}
"""


def _make_references(states: dict[str, str], fields: dict[str, str], owner: str = "row") -> dict[str, str]:
    return states | {name: f"{owner}.{name}" for name in fields}


def _define_function(result: str, name: str, arguments: str, references: dict[str, str], body: str) -> str:
    """Return the C++ text of a member function, without unused references and without names of unused arguments."""
    lines = [line.strip() for line in body.strip().splitlines()]
    lines = [f"auto& {name} = {target};" for name, target in references.items() if _mentions(body, name)] + lines
    text = "\n".join(lines)
    named = [a if _mentions(text, a.split()[-1]) else a.rsplit(" ", 1)[0] for a in arguments.split(", ")]
    return f"    TIERBED_FN {result} {name}({', '.join(named)}) const {{{_indent(lines)}\n    }}"


def _indent(lines: list[str]) -> str:
    return "".join(f"\n        {line}" for line in lines)


def _declare_members(types: dict[str, str], indent: int = 4) -> str:
    return "\n".join(f"{' ' * indent}{kind} {name};" for name, kind in types.items())


def _mentions(body: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", body) is not None


def _bool(value: object) -> str:
    return "true" if value else "false"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(generate_header(), encoding="utf-8")
