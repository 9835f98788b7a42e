"""The microscope: where a value that is not finite came from, named as a person would."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from resilient_train.extensions.armor import armor
from resilient_train.extensions.armor.armor import is_patched
from resilient_train.extensions.diagnosis.microscope import Microscope
from resilient_train.ground.operations import op_name

HERE = __file__


class Body(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.does = does

    def forward(self, inputs: Tensor) -> Tensor:
        return self.does(self.layer(inputs))


def origin_of(does: Callable[[Tensor], Tensor], inputs: Tensor | None = None) -> Any:
    torch.manual_seed(0)
    model = Body(does)
    inputs = torch.randn(3, 4) if inputs is None else inputs
    with Microscope(model, is_patched) as microscope:
        microscope.knows([inputs])
        loss = model(inputs)
        microscope.judge(loss)
        loss.backward()
    return microscope.origin


def line_of(does: Callable[..., Any], mark: str = "# breaks") -> int:
    """The line of a lambda, or the one of a function that is marked."""
    lines, first = inspect.getsourcelines(does)
    if does.__name__ == "<lambda>":
        return does.__code__.co_firstlineno
    (number,) = [first + place for place, line in enumerate(lines) if mark in line]
    return number


def by_a_view(hidden: Tensor) -> Tensor:
    whole = hidden.clone()
    whole[:2].zero_().log_()  # breaks
    return (whole + 1).sum()


def by_a_sparse_matrix(hidden: Tensor) -> Tensor:
    values, edges = (torch.ones(3) - 1).log(), torch.arange(3).expand(2, 3)  # breaks
    logs = torch.sparse_coo_tensor(edges, values, (3, 3), check_invariants=True)
    shared: Tensor = torch.sparse.mm(logs, hidden)
    return shared.sum()


def in_a_hook(hidden: Tensor) -> Tensor:
    doubled = hidden * 2
    doubled.register_hook(lambda slope: slope / 0)  # type: ignore[no-untyped-call]  # breaks
    return doubled.sum()


Program = Callable[[Tensor], Any]
BIRTHS: dict[str, tuple[str, str, str, Program]] = {
    "logarithm": ("forward", "log", "inf", lambda h: -(F.softmax(h * 1e5, -1).log() * torch.eye(3, 4)).sum(-1).mean()),
    "distances": ("backward", "sqrt", "inf", lambda h: ((h[:, None] - h[None]) ** 2).sum(-1).sqrt().mean()),
    "mask": ("forward", "softmax", "nan", lambda h: (torch.softmax(h.masked_fill(h > -99, -math.inf), -1) * h).sum()),
    "power": ("forward", "pow", "nan", lambda h: ((h - 100) ** 2.5).mean()),
    "again": ("backward", "sqrt", "inf", lambda h: checkpoint(lambda x: (x * 0).sqrt().mean(), h, use_reentrant=False)),
    "redone": ("backward", "sqrt", "inf", lambda h: checkpoint(lambda x: (x * 0).sqrt().mean(), h, use_reentrant=True)),
    # Values and slopes that reach the loss by other ways than torch's functions.
    "view": ("forward", "log", "inf", by_a_view),
    "list": ("forward", "log", "inf", lambda h: sum(one.sum() for one in torch._foreach_log([h * 0, h * 0 + 1]))),
    "sparse": ("forward", "log", "inf", by_a_sparse_matrix),
    "vmap": ("forward", "log", "inf", lambda h: torch.func.vmap(lambda row: (row * 0).log().sum())(h).sum()),
    "func.grad": ("backward", "sqrt", "inf", lambda h: (torch.func.grad(lambda x: (x * 0).sqrt().sum())(h) * h).sum()),
    "hook": ("backward", "div", "inf", in_a_hook),
    "penalty": ("backward", "sqrt", "inf", lambda h: slope_of((h * 0).sqrt().sum(), h).square().mean()),
    "thread": ("forward", "log", "inf", lambda h: ThreadPoolExecutor(1).submit(lambda: (h * 0).log()).result().sum()),
}


def slope_of(value: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(value, at, create_graph=True)[0]


@pytest.mark.parametrize("name", BIRTHS)
def test_it_names_operation_and_line(name: str) -> None:
    """Origins are named by the operation's name, in the user's own line, forward or backward."""
    phase, op, kind, does = BIRTHS[name]
    found = origin_of(does)
    assert (found.phase, found.op) == (phase, op)
    assert found.kind in (kind, "nan")
    assert (found.line.file, found.line.line) == (HERE, line_of(does))


UNKNOWN = torch.tensor(float("nan"))
GIVEN: dict[str, Program] = {
    "where": lambda h: torch.where(h > -9, UNKNOWN, h).abs().log().mean(),
    "sub": lambda h: (h - torch.from_numpy(np.full(4, -np.inf, dtype=np.float32))).mean(),
}


@pytest.mark.parametrize("op", GIVEN)
def test_values_that_the_program_gives_itself_are_named_where_they_enter(op: str) -> None:
    """A constant, or what numpy made: no operation is to blame, but the line is known if it reaches the loss."""
    found = origin_of(GIVEN[op])
    assert (found.op, found.was_given) == (op, True)
    assert found.line.line == line_of(GIVEN[op])


class InNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(value.detach().numpy() * 0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def of_what_was_made_up(hidden: Tensor) -> Tensor:
    root = (hidden * 0 - 1).sqrt()  # in armor
    return (hidden / root).sum()  # breaks


def of_its_own(hidden: Tensor) -> Tensor:
    made = (hidden * 0 - 1).sqrt()  # in armor
    return (hidden * 0).log().sum() + made.sum()  # breaks


@pytest.mark.parametrize(
    ("does", "op", "follows"),
    [
        (of_what_was_made_up, "div", "sqrt"),
        (of_its_own, "log", ""),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_breaks_of_made_up_values_is_told_from_what_breaks_of_itself(does: Any, op: str, follows: str) -> None:
    """A consequence knows the armored operation that it comes of; what has nothing to do with it does not."""
    patched = HERE, line_of(does, "# in armor"), "sqrt"
    armor.add(*patched)
    try:
        found = origin_of(does)
    finally:
        armor.remove()
    assert (found.op, found.line.line) == (op, line_of(does))
    first = found.after
    assert (first.op if first else "") == follows
    assert first is None or (first.line is not None and first.line.line == patched[1])


def test_of_several_births_the_earliest_is_told() -> None:
    """Whatever the order in which they meet. Infinite values of a mask, which softmax takes out again, are none."""

    def meeting(hidden: Tensor) -> Tensor:
        first = (hidden * 0).log()
        second = (hidden * 0 - 1).sqrt()
        return (second + first).sum()

    found = origin_of(meeting)
    assert found.op == "log"
    mask = torch.tril(torch.ones(3, 4)) == 0
    assert origin_of(lambda h: torch.softmax(h.masked_fill(mask, -math.inf), -1).square().mean()) is None
    assert origin_of(lambda h: h.sum(), torch.full((3, 4), torch.nan)) is None  # what the batch brings with it


def test_a_healthy_model_shows_nothing_and_computes_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 1))
    inputs, microscope = torch.randn(5, 4), Microscope(model, is_patched)
    grads = []
    for watching in (nullcontext(), microscope):
        torch.manual_seed(1)
        model.zero_grad()
        with watching:
            model(inputs).square().mean().backward()
        grads.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    assert microscope.origin is None
    assert all(map(torch.equal, *grads))


def test_what_the_inputs_were() -> None:
    """Of the call whose backward is to blame: shape, type, range, the smallest magnitude."""
    (inputs,) = origin_of(BIRTHS["distances"][-1]).inputs
    assert (inputs["shape"], inputs["dtype"], inputs["nonfinite"]) == ([3, 3], "float32", 0)
    assert inputs["min"] == inputs["smallest"] == 0.0 < inputs["max"]


class Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        spoiled: Tensor = grad * value / (value.abs() * 0)  # always by zero
        return spoiled


@pytest.mark.parametrize(
    ("kind", "phase", "op"),
    [(Careless, "backward", "div"), (InNumpy, "forward", "")],
)
def test_a_users_own_operation_is_named(kind: Any, phase: str, op: str) -> None:
    """What torch computes there is seen as elsewhere; what leaves torch is named by the class, where it is called."""

    def called(hidden: Tensor) -> Tensor:
        applied: Tensor = kind.apply(hidden)  # breaks
        return applied.sum()

    found = origin_of(called)
    assert (found.phase, found.op, found.was_given) == (phase, op or kind.__name__, False)
    at = line_of(Careless.backward, "# always by zero") if op else line_of(called)
    assert (found.line.file, found.line.line) == (HERE, at)


def test_operations_are_called_as_torch_calls_the_function() -> None:
    of_div = dict.fromkeys(("__rtruediv__", "__rdiv__", "__itruediv__", "true_divide"), "div")
    others = {"__pow__": "pow", "__rpow__": "pow", "__rsub__": "sub", "__getitem__": "getitem", "__matmul__": "matmul"}
    names = {"sqrt_": "sqrt", "_softmax": "softmax", "log": "log", "arctan2": "atan2"}
    expected = of_div | others | names | {"linalg_vector_norm": "linalg_vector_norm"}
    assert {spelling: op_name(spelling) for spelling in expected} == expected
