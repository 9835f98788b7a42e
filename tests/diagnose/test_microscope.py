"""The microscope: where a value that is not finite came from, named as a person would."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from resilient_train.diagnose.frames import Line
from resilient_train.diagnose.microscope import Microscope, Origin
from resilient_train.numerics.armor import Armor
from resilient_train.numerics.operations import op_name

HERE = __file__


class Body(nn.Module):
    """A linear layer, and what a test does with its output."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.does = does

    def forward(self, inputs: Tensor) -> Tensor:
        return self.does(self.layer(inputs))


def by_hand(hidden: Tensor) -> Tensor:
    return -(F.softmax(hidden * 1e5, dim=-1).log() * torch.eye(4)).sum(-1).mean()


def branch(hidden: Tensor) -> Tensor:
    return torch.where(hidden > 0, hidden.sqrt(), torch.zeros_like(hidden)).sum()


def distances(hidden: Tensor) -> Tensor:
    apart = hidden[:, None] - hidden[None]
    return (apart**2).sum(-1).sqrt().mean()


def ratio(hidden: Tensor) -> Tensor:
    difference = hidden - hidden
    return (hidden / difference).sum()


def masked(hidden: Tensor) -> Tensor:
    scores = hidden.masked_fill(torch.ones_like(hidden, dtype=torch.bool), float("-inf"))
    return (torch.softmax(scores, -1) * hidden).sum()


def squared(hidden: Tensor) -> Tensor:
    grown = (hidden * 0 + 10).exp()
    for _ in range(6):
        grown = grown * grown
    return grown.mean()


def in_place(hidden: Tensor) -> Tensor:
    hidden = hidden.clone()
    hidden.mul_(0)
    hidden.log_()
    return hidden.sum()


def angle(hidden: Tensor) -> Tensor:
    cosine = hidden * 0 + 1
    return torch.acos(cosine).mean()


def nested(hidden: Tensor) -> Tensor:
    def inner(value: Tensor) -> Tensor:
        return (value * 0).pow(0.5)

    return inner(hidden).mean()


def in_torch(hidden: Tensor) -> Tensor:
    return F.cosine_similarity(hidden * float("nan"), hidden, dim=-1).mean()


def power(hidden: Tensor) -> Tensor:
    return ((hidden - 100) ** 2.5).mean()


def in_slices(hidden: Tensor) -> Tensor:
    filled = torch.zeros(3, 8)
    filled[:, :4] = hidden / (hidden - hidden)
    return nn.functional.linear(filled, torch.ones(2, 8)).sum()


def swallowed(hidden: Tensor) -> Tensor:
    odds = (hidden * 0).log()
    weights = torch.ones(4, 4, requires_grad=True)
    return torch.tanh(odds @ weights + hidden).mean()


def rematerialised(hidden: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda value: (value * 0).sqrt().mean(), hidden, use_reentrant=False)
    return result


def origin_of(does: Callable[[Tensor], Tensor], **options: Any) -> Origin | None:
    torch.manual_seed(0)
    model = Body(does)
    with Microscope(model, **options) as microscope:
        loss = model(torch.randn(3, 4) if does is not by_hand else torch.randn(4, 4))
        microscope.judge(loss)
        loss.backward()
    found: Origin | None = microscope.of_loss or microscope.backward
    return found


def line_of(does: Callable[..., Tensor], text: str) -> int:
    lines, first = inspect.getsourcelines(does)
    (number,) = [first + place for place, line in enumerate(lines) if text in line]
    return number


# Values and slopes that reach the loss by other ways than torch's functions.


def by_attribute(hidden: Tensor) -> Tensor:
    phases = torch.complex(hidden * 0, hidden * 0).log()
    return (phases.mH.imag @ torch.ones(3, 4)).sum() + phases.real.sum()


def by_a_view(hidden: Tensor) -> Tensor:
    whole = hidden.clone()
    whole[:2].zero_().log_()
    return (whole + 1).sum()


def by_data(hidden: Tensor) -> Tensor:
    scale = nn.Parameter(torch.ones(4))
    scale.data = (hidden[0] * 0).log()
    return (hidden * scale).sum()


def by_a_list(hidden: Tensor) -> Tensor:
    rooted = torch._foreach_log([hidden * 0, hidden * 0 + 1])
    return sum(one.sum() for one in rooted)  # type: ignore[return-value]


def by_a_sparse_matrix(hidden: Tensor) -> Tensor:
    edges = torch.eye(3).to_sparse()
    logs = torch.sparse_coo_tensor(edges.indices(), (edges.values() - 1).log(), edges.shape, check_invariants=True)
    shared: Tensor = torch.sparse.mm(logs, hidden)
    return shared.sum()


def by_a_number(hidden: Tensor) -> Tensor:
    shift = (hidden.detach().sum() * 0).log().item()
    return (hidden * shift).sum()


def in_vmap(hidden: Tensor) -> Tensor:
    summed: Tensor = torch.func.vmap(lambda row: (row * 0).log().sum())(hidden)
    return summed.sum()


def in_func_grad(hidden: Tensor) -> Tensor:
    slope: Tensor = torch.func.grad(lambda values: (values * 0).sqrt().sum())(hidden)
    return (slope * hidden).sum()


def in_a_penalty(hidden: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad((hidden * 0).sqrt().sum(), hidden, create_graph=True)  # root
    return slope.square().mean()


def of_a_slope(hidden: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(((hidden * 0) ** 1.5).sum(), hidden, create_graph=True)  # power
    return slope.sum() + hidden.sum()


def recomputed(hidden: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda value: (value * 0).sqrt().mean(), hidden, use_reentrant=True)
    return result


def in_a_hook(hidden: Tensor) -> Tensor:
    doubled = hidden * 2
    doubled.register_hook(lambda slope: slope / 0)  # type: ignore[no-untyped-call]
    return doubled.sum()


class InNumpy(torch.autograd.Function):
    """Leaves torch in its forward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(value.detach().numpy() * 0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def in_a_thread(hidden: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: (hidden * 0).log()).result().sum()


def never_filled(hidden: Tensor) -> Tensor:
    batch = hidden.masked_fill(hidden > -9, float("nan"))
    return batch.nanmean() + hidden.sum()


@pytest.mark.parametrize(
    ("does", "phase", "op", "kind", "text"),
    [
        (by_hand, "forward", "log", "inf", ".log()"),
        (branch, "backward", "sqrt", "nan", "torch.where"),
        (distances, "backward", "sqrt", "inf", ".sqrt()"),
        (ratio, "forward", "div", "inf", "/ difference"),
        (masked, "forward", "softmax", "nan", "torch.softmax"),
        (squared, "forward", "mul", "inf", "grown * grown"),
        (in_place, "forward", "log", "inf", "log_()"),
        (angle, "backward", "acos", "inf", "acos"),
        (nested, "backward", "pow", "inf", ".pow("),
        (power, "forward", "pow", "nan", "** 2.5"),
        (in_slices, "forward", "div", "inf", "hidden / (hidden - hidden)"),
        (swallowed, "forward", "log", "inf", ".log()"),
        (rematerialised, "backward", "sqrt", "inf", ".sqrt()"),
        (by_attribute, "forward", "log", "inf", ".log()"),
        (by_a_view, "forward", "log", "inf", ".log_()"),
        (by_data, "forward", "log", "inf", ".log()"),
        (by_a_list, "forward", "log", "inf", "_foreach_log"),
        (by_a_sparse_matrix, "forward", "log", "inf", ".log()"),
        (by_a_number, "forward", "log", "inf", ".log()"),
        (in_vmap, "forward", "log", "inf", ".log()"),
        (in_func_grad, "backward", "sqrt", "inf", ".sqrt()"),
        (in_a_penalty, "backward", "sqrt", "inf", "# root"),
        (of_a_slope, "backward", "pow", "nan", "# power"),
        (recomputed, "backward", "sqrt", "inf", ".sqrt()"),
        (in_a_hook, "backward", "div", "inf", "slope / 0"),
        (in_a_thread, "forward", "log", "inf", ".log()"),
        (never_filled, "forward", "nanmean", "nan", ".nanmean()"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_names_operation_and_line(does: Any, phase: str, op: str, kind: str, text: str) -> None:
    """Origins are named by the operation's name, in the user's own line, forward or backward."""
    found = origin_of(does)
    assert found is not None
    assert (found.phase, found.op) == (phase, op)
    assert found.kind in (kind, "nan")
    assert found.line is not None
    assert (found.line.file, found.line.line) == (HERE, line_of(does, text))


UNKNOWN = torch.tensor(float("nan"))


def a_constant(hidden: Tensor) -> Tensor:
    return torch.where(hidden > -9, UNKNOWN, hidden).abs().log().mean()


def a_fill(hidden: Tensor) -> Tensor:
    return hidden.masked_fill(hidden > -9, float("nan")).sqrt().mean()


def an_array(hidden: Tensor) -> Tensor:
    lengths = np.full(4, -np.inf, dtype=np.float32)
    return (hidden - torch.from_numpy(lengths)).mean()


@pytest.mark.parametrize(("does", "op"), [(a_constant, "where"), (a_fill, "masked_fill"), (an_array, "sub")])
def test_values_that_the_program_gives_itself_are_named_where_they_enter(does: Any, op: str) -> None:
    """A constant, or what numpy made: no operation is to blame, but the line is known if it reaches the loss."""
    found = origin_of(does)
    assert found is not None
    assert (found.op, found.was_given) == (op, True)
    lines, first = inspect.getsourcelines(does)
    assert found.line is not None
    assert first < found.line.line < first + len(lines)


def of_what_was_made_up(hidden: Tensor) -> Tensor:
    root = (hidden * 0 - 1).sqrt()  # in armor
    return (hidden / root).sum()  # breaks


def of_the_same_values(hidden: Tensor) -> Tensor:
    large = hidden * 0 + 200
    made = large.exp()  # in armor
    return (large / 2).exp().sum() + made.sum()  # breaks


def by_its_slope(hidden: Tensor) -> Tensor:
    made = (hidden * 0 - 1).sqrt()  # in armor
    small = hidden * 1e-30
    large = small * 1e30  # breaks
    return (large * 1e30).sum() * 1e-10 + made.sum()


def of_its_own(hidden: Tensor) -> Tensor:
    made = (hidden * 0 - 1).sqrt()  # in armor
    return (hidden * 0).log().sum() + made.sum()  # breaks


def of_its_own_slope(hidden: Tensor) -> Tensor:
    made = (hidden * 0 - 1).sqrt()  # in armor
    return (hidden * 0).pow(0.5).sum() + made.sum()  # breaks


def unhurt(hidden: Tensor) -> Tensor:
    made = (hidden * 0 + 1).sqrt()  # in armor
    return (hidden / (made - 1)).sum()  # breaks


@pytest.mark.parametrize(
    ("does", "op", "follows"),
    [
        (of_what_was_made_up, "div", "sqrt"),
        (of_the_same_values, "exp", "exp"),
        (by_its_slope, "mul", "sqrt"),
        (of_its_own, "log", ""),
        (of_its_own_slope, "pow", ""),
        (unhurt, "div", ""),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_breaks_of_made_up_values_is_told_from_what_breaks_of_itself(does: Any, op: str, follows: str) -> None:
    """A consequence knows the armored operation that it comes of; what has nothing to do with it does not."""
    patched = HERE, line_of(does, "# in armor"), "exp" if follows == "exp" else "sqrt"
    armor = Armor()
    armor.add(*patched)
    try:
        found = origin_of(does, armored=[patched])
    finally:
        armor.remove()
    assert found is not None
    assert found.line is not None
    assert (found.op, found.line.line) == (op, line_of(does, "# breaks"))
    first = found.after
    assert (first.op if first else "") == follows
    assert first is None or (first.line is not None and first.line.line == patched[1])


def test_of_several_births_the_earliest_is_told() -> None:
    """Whatever the order in which they meet."""

    def meeting(hidden: Tensor) -> Tensor:
        first = (hidden * 0).log()
        second = (hidden * 0 - 1).sqrt()
        return (second + first).sum()

    found = origin_of(meeting)
    assert found is not None
    assert found.op == "log"


def test_what_was_not_finite_already_is_nobodys_fault() -> None:
    """A NaN that came in with the batch came from no operation."""
    model, batch = Body(lambda hidden: hidden.sum()), torch.full((2, 4), torch.nan)
    with Microscope(model) as microscope:
        microscope.knows([batch])
        loss = model(batch)
        microscope.judge(loss)
    assert microscope.of_loss is None


def test_masks_are_on_purpose() -> None:
    """Infinite values of a mask, which softmax takes out again, have no origin."""

    def attention(hidden: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(3, 4)) == 0
        return torch.softmax(hidden.masked_fill(mask, float("-inf")), -1).square().mean()

    assert origin_of(attention) is None


def test_a_healthy_model_shows_nothing_and_computes_the_same() -> None:
    """Watching changes no bit of loss and gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 1))
    inputs = torch.randn(5, 4)
    grads = []
    for watched in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        if watched:
            with Microscope(model) as microscope:
                model(inputs).square().mean().backward()
            assert microscope.of_loss is None
            assert microscope.backward is None
        else:
            model(inputs).square().mean().backward()
        grads.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_second_look_tells_what_the_inputs_were() -> None:
    """Of the call whose backward is to blame: shape, type, range, zeros, the smallest magnitude."""
    found = origin_of(distances)
    assert found is not None
    torch.manual_seed(0)
    model = Body(distances)
    with Microscope(model, look_at=found.call) as microscope:
        model(torch.randn(3, 4)).backward()
    (inputs,) = microscope.inputs
    assert (inputs["shape"], inputs["dtype"], inputs["zeros"], inputs["nonfinite"]) == ([3, 3], "float32", 3, 0)
    assert inputs["min"] == 0.0 < inputs["smallest"] <= inputs["max"]


def test_a_module_is_named_by_its_path() -> None:
    """An operation within torch's own modules is placed at the user's line that calls the module."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Softmax(dim=-1)])

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.blocks[0](inputs)
            hidden = hidden + float("-inf")
            shares: Tensor = self.blocks[1](hidden)  # the line
            return shares.sum()

    model = Net()
    with Microscope(model) as microscope:
        loss = model(torch.randn(2, 4))
        microscope.judge(loss)
    found = microscope.of_loss
    assert found is not None
    assert found.op == "softmax"
    assert isinstance(found.line, Line)
    assert found.line.module == "blocks.1"
    assert "# the line" in Path(HERE).read_text().splitlines()[found.line.line - 1]


class Careless(torch.autograd.Function):
    """A user's own operation."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        spoiled: Tensor = grad * value / (value.abs() * 0)  # always by zero
        return spoiled


class InNumpyBackward(InNumpy):
    """Leaves torch in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with np.errstate(divide="ignore", invalid="ignore"):
            return torch.from_numpy(grad.numpy() / (grad.numpy() * 0))


def test_the_line_in_the_backward_of_a_users_own_operation_is_named() -> None:
    """What torch computes there is seen as elsewhere; what leaves torch is named by the class and its backward."""
    found = origin_of(lambda hidden: Careless.apply(hidden).sum())  # type: ignore[no-untyped-call]
    assert found is not None
    assert (found.phase, found.op) == ("backward", "div")
    assert found.line is not None
    assert found.line.line == line_of(Careless.backward, "# always by zero")
    found = origin_of(lambda hidden: InNumpyBackward.apply(hidden).sum())  # type: ignore[no-untyped-call]
    assert found is not None
    assert (found.phase, found.op) == ("backward", "InNumpyBackward")
    assert found.line is not None
    assert found.line.line == line_of(InNumpyBackward.backward, "def backward")


def test_the_forward_of_a_users_own_operation_is_named() -> None:
    """What its forward makes outside of torch is named by its class and the line of its forward."""
    found = origin_of(lambda hidden: InNumpy.apply(hidden).sum())  # type: ignore[no-untyped-call]
    assert found is not None
    assert (found.phase, found.op, found.was_given) == ("forward", "InNumpy", False)
    assert found.line is not None
    assert found.line.line == line_of(InNumpy.forward, "def forward")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("__rtruediv__", "div"),
        ("__rdiv__", "div"),
        ("__itruediv__", "div"),
        ("__pow__", "pow"),
        ("__rpow__", "pow"),
        ("__rsub__", "sub"),
        ("sqrt_", "sqrt"),
        ("_softmax", "softmax"),
        ("log", "log"),
        ("arctan2", "atan2"),
        ("true_divide", "div"),
        ("__getitem__", "getitem"),
        ("__matmul__", "matmul"),
        ("linalg_vector_norm", "linalg_vector_norm"),
    ],
)
def test_operations_are_called_as_torch_calls_the_function(given: str, name: str) -> None:
    """Operators and in-place forms by the function that does it."""
    assert op_name(given) == name
