"""`permute_multi_embedding` reads values on the host, cannot be traced, or has other gradients than plain cat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from support.graphs import graph_of
from support.keyed import GROUPS, KEYS, LENGTHS, features, gradients, tensors
from support.refusals import check_refusal
from tierbed import InputError
from tierbed.jagged import multi_remap_to_groups, permute_multi_embedding
from tierbed.jagged.tensors import columns

PERMUTES, IN, OUT = multi_remap_to_groups(KEYS, LENGTHS, GROUPS)
WIDTHS = OUT.tolist()


def permuted(values: list[Tensor], permutes: Tensor = PERMUTES) -> list[Tensor]:
    return permute_multi_embedding(values, permutes, WIDTHS, IN, OUT)


def plain(values: list[Tensor]) -> list[Tensor]:
    parts = features(values)
    return [torch.cat([parts[key] for key in group], 1) for group in GROUPS]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.pairs
def test_columns_of_every_dtype_are_those_of_plain_cat(dtype: str, batch: int, integers: torch.dtype) -> None:
    values = [(one * 5).to(getattr(torch, dtype)) for one in tensors(batch)]
    for one, other in zip(permuted(values, PERMUTES.to(integers)), plain(values), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "columns", "turned", "expanded"])
def test_gradients_of_every_order_are_those_of_plain_cat(native: bool, layout: str, monkeypatch: Any) -> None:
    """native=False: as on a GPU, by torch's ops."""
    if not native:
        monkeypatch.setattr(columns, "_NATIVE_DTYPES", ())
    values = [one.double().requires_grad_() for one in tensors()]
    given = {
        "contiguous": lambda one: one,
        "columns": lambda one: torch.cat([one, one], 1)[:, 1 : 1 + one.shape[1]],
        "turned": lambda one: (one * 1).t().contiguous().t(),
        "expanded": lambda one: one[:1].expand(5, -1),
    }[layout]

    def read() -> list[Tensor]:
        return [given(one) for one in values]

    made, expected = permuted(read()), plain(read())
    assert all(map(torch.equal, made, expected))
    for one, other in zip(gradients(permuted(read()), values), gradients(plain(read()), values), strict=True):
        torch.testing.assert_close(one, other)
    unused = torch.autograd.grad(made[1].sum(), values, allow_unused=True, retain_graph=True)  # an expanded gradient
    for one, other in zip(unused, torch.autograd.grad(expected[1].sum(), values, materialize_grads=True), strict=True):
        assert torch.equal(torch.zeros_like(other) if one is None else one, other)
    for one, other in zip(second_order(permuted(read()), values), second_order(plain(read()), values), strict=True):
        torch.testing.assert_close(one, other)


def second_order(made: list[Tensor], values: list[Tensor]) -> tuple[Tensor, ...]:
    grads = torch.autograd.grad([one.square().sum() for one in made], values, create_graph=True)
    return torch.autograd.grad([grad.square().sum() for grad in grads], values)


def test_zero_columns_come_first_in_a_sum_of_moves() -> None:
    moves = [[0, 0, 2, 2, 1], [0, 0, 0, 2, 0], [0, 0, 1, 0, 2], [0, 0, 0, 3, 0], [0, 0, 0, 0, 0]]
    index = columns._find_source_columns(torch.tensor(moves), torch.tensor([3]), torch.tensor([3]), 3)
    assert index.tolist() == [1, 2, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # which torch.func itself gives
def test_torch_func_and_forward_gradients_pass_it() -> None:
    def squares(function: Any) -> Any:
        return lambda *values: sum((one.square() * (at + 1)).sum() for at, one in enumerate(function([*values])))

    values, tangents = tuple(tensors()), tuple(tensors())
    several = tuple(torch.stack([one, other]) for one, other in zip(values, tangents, strict=True))
    for transformed in (
        lambda function: torch.func.jvp(function, values, tangents),
        lambda function: torch.func.grad(function, argnums=(0, 1, 2))(*values),
        lambda function: torch.vmap(function)(*several),
    ):
        torch.testing.assert_close(transformed(squares(permuted)), transformed(squares(plain)))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(permuted([*map(forward_ad.make_dual, values, tangents)])[0])
        assert torch.equal(dual.tangent, plain([*tangents])[0])
    with pytest.raises(InputError, match="reads columns -1 to 2"):
        torch.vmap(lambda *values: tuple(permuted([*values], BACKWARDS)))(*several)


@pytest.mark.filterwarnings("ignore")
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_code_checks_the_batch_when_it_runs() -> None:
    """Sizes that depend on values: while it is compiled nobody knows that they differ."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def chosen(values: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        return permuted([one[mask.nonzero()[:, 0]] for one, mask in zip(values, masks, strict=True)])

    values, every = tensors(), torch.ones(5, dtype=torch.bool)
    assert all(map(torch.equal, chosen(values, [every] * 3), plain(values)))
    with pytest.raises(InputError, match="values: give tensors of one batch"):
        chosen(values, [every, every, every.clone().fill_(False)])


def test_the_ops_pass_torchs_checks() -> None:
    values = tensors(requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(columns.move_columns, (values, PERMUTES, IN, OUT, WIDTHS, False), test_utils=checks)
    grads = [torch.randn(5, width) for width in WIDTHS]
    torch.library.opcheck(columns.move_columns, (grads, PERMUTES, IN, OUT, IN.tolist(), True), test_utils=checks)


def regrouping(regroup: Any) -> Any:
    """A graph that trains linear layers whose outputs are regrouped; the moves are a buffer, or an argument."""

    def build(graph: Any, x: Tensor, moves: Tensor | None = None) -> Any:
        groups = regroup([layer(x) for layer in graph.layers], graph.layers.moves if moves is None else moves)
        loss = sum((one * (at + 1)).square().mean() for at, one in enumerate(groups))
        loss.backward()
        return loss

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, sum(widths)) for widths in LENGTHS)
    layers.register_buffer("moves", PERMUTES)
    return graph_of(build, torch.optim.SGD(layers.parameters(), lr=0.1), layers=layers)


def test_a_graph_traces_it_trains_as_with_plain_cat_and_raises_in_a_step_of_wrong_moves() -> None:
    graph, expected = regrouping(permuted), regrouping(lambda values, _: plain(values))
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(graph(x), expected(x))
    torch.testing.assert_close(graph(x, PERMUTES), expected(x))
    torch.testing.assert_close([*graph.layers.parameters()], [*expected.layers.parameters()])
    wrong = PERMUTES.clone()
    wrong[0, 3] = 2
    with pytest.raises(InputError, match="give one move for each column"):
        graph(x, wrong)


VALUES = [torch.ones(5, 7), torch.ones(5, 18), torch.ones(5, 8)]
BACKWARDS = PERMUTES.clone()
BACKWARDS[0, 2] = -1  # an index from the end


@pytest.mark.parametrize(
    "refusal",
    [
        *[([one.to(dtype) for one in VALUES], BACKWARDS, "-1 to 2") for dtype in (torch.float, torch.int)],
        ([], PERMUTES, "values"),
        ([torch.ones(3)], PERMUTES, "values"),
        ([VALUES[0], torch.ones(4, 18), VALUES[2]], PERMUTES, "values", "one batch"),
        ([VALUES[0], VALUES[1].double(), VALUES[2]], PERMUTES, "values"),
        (VALUES, PERMUTES.flatten(), "permutes"),
        (VALUES, PERMUTES.float(), "permutes"),
        (VALUES, PERMUTES.to(torch.complex64), "permutes"),
        (VALUES, PERMUTES.tolist(), "permutes"),
    ],
)
def test_arguments_that_cannot_be_are_refused(refusal: Any) -> None:
    values, permutes, *named = refusal
    check_refusal((lambda: permuted(values, permutes), InputError, *named))
