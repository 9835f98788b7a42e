"""Safe operations where people use them: by torch's names, compiled, under autocast, with the knob turned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from resilient_train import numerics

# torch, while it imports its own compiler
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

Operation = Callable[..., Tensor]

X = torch.tensor([[0.2, 0.7, 0.4], [0.9, 0.3, 0.6]])
BAD = torch.tensor([[0.0, 1.0, -0.5], [0.0, 0.0, 0.0]])

ALIKE: dict[str, Operation] = {
    "torch.log": torch.log,
    "log": lambda x: x.log(),
    "log2": lambda x: x.log2(),
    "log10": lambda x: x.log10(),
    "torch.special.log1p": lambda x: torch.special.log1p(-x),
    "exp": lambda x: (x * 90).exp(),
    "torch.exp": torch.exp,
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": torch.rsqrt,
    "reciprocal": lambda x: x.reciprocal(),
    "/": lambda x: x / x.flip(0),
    "/ number": lambda x: x / 0.3,
    "number /": lambda x: 3 / x,
    "div, rounding": lambda x: x.div(x.flip(0), rounding_mode="trunc"),
    "torch.true_divide": lambda x: torch.true_divide(x, x.flip(0)),
    "torch.divide": lambda x: torch.divide(x, x.flip(0)),
    "**": lambda x: x**-1.5,
    "number **": lambda x: 2.0**x,
    "torch.pow": lambda x: torch.pow(x, x.flip(0)),
    "acos": lambda x: x.acos(),
    "arccos": torch.arccos,
    "asin": torch.asin,
    "arcsin": lambda x: x.arcsin(),
    "atanh": torch.atanh,
    "arctanh": torch.arctanh,
    "atan2": lambda x: x.atan2(x.flip(0)),
    "arctan2": lambda x: torch.arctan2(x, x.flip(0)),
    "torch.norm": torch.norm,
    "norm": lambda x: x.norm(dim=1),
    "torch.linalg.norm": torch.linalg.norm,
    "torch.linalg.norm, inf": lambda x: torch.linalg.norm(x, math.inf, dim=1),
    "torch.linalg.norm, matrix": lambda x: torch.linalg.norm(x + torch.eye(2, 3), 2),
    "torch.linalg.vector_norm": lambda x: torch.linalg.vector_norm(x, 2, dim=(0, 1), keepdim=True),
    "std": lambda x: x.std(),
    "std, dim": lambda x: x.std(1),
    "std, dims": lambda x: torch.std(x, (0, 1), correction=0, keepdim=True),
    "std, unbiased": lambda x: x.std(False),
    "std, dim, unbiased": lambda x: torch.std(x, 1, unbiased=False, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "softmax, dtype": lambda x: torch.softmax(x, -1, torch.float64),
    "F.softmax": lambda x: F.softmax(x, -1, dtype=torch.float64),
    "nn.Softmax": nn.Softmax(1),
    "torch.special.softmax": lambda x: torch.special.softmax(x, 1),
    "log_softmax": lambda x: x.log_softmax(1),
    "nn.LogSoftmax": nn.LogSoftmax(1),
    "F.cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), dim=1, eps=1e-6),
    "nn.CosineSimilarity": lambda x: nn.CosineSimilarity()(x, x.flip(0)),
    "F.normalize": F.normalize,
    "F.normalize, p": lambda x: F.normalize(x, 1.0, dim=0),
    "F.binary_cross_entropy": lambda x: F.binary_cross_entropy(x.clamp(0, 1), x.detach().flip(0).clamp(0, 1)),
    "F.binary_cross_entropy, sum": lambda x: F.binary_cross_entropy(
        x.clamp(0, 1), x.detach().clamp(0, 1), reduction="sum"
    ),
    "nn.BCELoss": lambda x: nn.BCELoss(weight=torch.ones(3))(x.clamp(0, 1), x.detach().clamp(0, 1)),
}


class Substituting(TorchFunctionMode):
    """Calls the safe operation for each of torch's that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        safe = numerics.substitute(getattr(function, "__name__", ""))
        self.count += safe is not None
        result: Tensor = (safe or function)(*args, **(kwargs or {}))
        return result


@pytest.fixture(autouse=True)
def eps_at_rest() -> Iterator[None]:
    yield
    numerics.raise_eps(1.0)


def answer(operation: Operation, *inputs: Tensor) -> list[Tensor]:
    """The value and the slopes."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    value = operation(*inputs)
    return [value.detach(), *torch.autograd.grad(value.sum(), inputs)]


def everything(x: Tensor, y: Tensor) -> Tensor:
    """One number of all operations there are."""
    alone = ("log", "log1p", "exp", "sqrt", "rsqrt", "reciprocal", "acos", "asin", "atanh")
    total: Tensor = sum((getattr(numerics, name)(x).sum() for name in alone), torch.zeros(()))
    total += (
        numerics.div(x, y).sum() + numerics.atan2(x, y).sum() + numerics.pow(x, -0.5).sum() + numerics.pow(x, y).sum()
    )
    total += numerics.softmax(x, 1).sum() + numerics.log_softmax(x, 1).sum() + numerics.normalize(x).sum()
    total += numerics.norm(x) + numerics.norm(x, 1, 1).sum() + numerics.std(x, 1).sum()
    total += numerics.cosine_similarity(x, y).sum() + numerics.binary_cross_entropy(x, y.detach().clamp(0, 1))
    return total + numerics.cross_entropy_of_probabilities(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))


def test_every_way_to_call_it_has_a_substitute() -> None:
    """It takes what the function, method or operator takes, and gives the same, or what is finite where that is not.

    What is unknown, and what writes into its input, has none.
    """
    for name, operation in ALIKE.items():
        with Substituting() as substituting:
            ours = answer(operation, X)
        assert substituting.count, name
        for mine, theirs in zip(ours, answer(operation, X), strict=True):
            assert mine.dtype is theirs.dtype, name
            assert torch.equal(mine, theirs), name
        with substituting:
            bad = answer(operation, BAD)
        assert all(x.isfinite().all() for x in bad), name
    for name in ("add", "div_", "__itruediv__", "log_", "", "__getitem__"):
        assert numerics.substitute(name) is None


def test_what_only_torch_can_do_is_left_to_it() -> None:
    """Complex and whole numbers, singular values, results that go somewhere."""
    z = torch.tensor([1j, 2.0])
    assert torch.equal(numerics.log(z), torch.log(z))
    assert torch.equal(numerics.div(z, torch.tensor(2j)), z / 2j)
    whole = torch.tensor([1, 2, 4])
    for bare, safe in ((torch.log, numerics.log), (torch.sqrt, numerics.sqrt), (torch.exp, numerics.exp)):
        assert torch.equal(safe(whole), bare(whole))
    assert torch.equal(numerics.div(whole, 2), whole / 2)
    assert torch.equal(numerics.div(whole, 2, rounding_mode="floor"), whole // 2)
    assert torch.equal(numerics.pow(whole, 2), whole**2)
    assert torch.equal(numerics.norm(X, "nuc"), torch.norm(X, "nuc"))
    out = torch.empty(3)
    assert numerics.substitute("div")(whole, whole, out=out) is out  # type: ignore[misc]
    assert numerics.std(torch.empty(0)).item() == 0
    assert numerics.softmax(torch.empty(2, 0), 1).shape == (2, 0)


@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.float32), (torch.float64, torch.bfloat16)], ids=str)
def test_two_types(dtype: torch.dtype, other: torch.dtype) -> None:
    """They are promoted as torch does, and a slope is finite in the type that it is for."""
    x, y = X.to(dtype), torch.tensor([[1.0, 3.0, 0.1], [2.0, 1e-6, 0.0]], dtype=other)
    for bare, safe in ((torch.div, numerics.div), (torch.atan2, numerics.atan2), (torch.pow, numerics.pow)):
        theirs, ours = answer(bare, x, y), answer(safe, x, y)
        assert [t.dtype for t in ours] == [t.dtype for t in theirs]
        assert all(torch.equal(mine[0], its[0]) for mine, its in zip(ours, theirs, strict=True))
        assert all(t.isfinite().all() for t in ours)


def test_eps_is_one_knob() -> None:
    """It multiplies a base that depends on the type; it does not add up, is not lowered, and leaves something of 1."""
    base = {dtype: torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
    for factor in (1.0, 10.0, 100.0, 1.0, 1e8):
        numerics.raise_eps(factor)
        assert {dtype: numerics.eps(dtype) for dtype in base} == {
            dtype: min(b * factor, 0.1) for dtype, b in base.items()
        }
    for factor in (0.5, 0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="factor of 1 or more"):
            numerics.raise_eps(factor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_raised_eps_widens_what_counts_as_singular(dtype: torch.dtype) -> None:
    """Within eps nothing is steeper than it is at eps; beyond it all is torch's still."""
    numerics.raise_eps(8.0)
    eps = numerics.eps(dtype)
    x = torch.tensor([eps / 2, -eps / 2, 0.0, 0.25], dtype=dtype)
    ones = torch.ones_like(x)
    for operation in (
        torch.log,
        torch.sqrt,
        torch.rsqrt,
        torch.reciprocal,
        lambda x: ones / x,
        lambda x: x**-1.5,
        lambda x: torch.acos(1 - x),
        lambda x: torch.atanh(1 - x),
        lambda x: torch.log1p(x - 1),
        lambda x: torch.norm(x[:, None], dim=1),
        lambda x: F.normalize(x[:, None], eps=0.0),
        lambda x: torch.atan2(x, x),
    ):
        own, own_slope = answer(operation, x)
        with Substituting():
            value, slope = answer(operation, x)
        assert value[3] == own[3]
        assert slope[3] == own_slope[3]
        assert not slope[:3].any()
        largest = torch.pow(torch.tensor(eps, dtype=dtype), -1.5) * 1.01
        assert (value.abs() <= largest).all()
    _, slope = answer(numerics.exp, torch.tensor([80.0, 1.0], dtype=dtype))
    assert slope[0].item() == pytest.approx(1 / eps, rel=0.01)
    assert slope[1] == torch.tensor(1.0, dtype=dtype).exp()


def compiled(operation: Operation, backend: str) -> Operation:
    torch._dynamo.reset()
    return torch.compile(operation, fullgraph=True, backend=backend)


def close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-4) for x, y in zip(ours, theirs, strict=True))


def test_everything_compiles_as_one_graph() -> None:
    """Also where it is bad, and to the same numbers. So nothing waits for the device: reading breaks a graph."""
    inputs = torch.cat([X, BAD]), torch.cat([X.flip(0), torch.zeros(2, 3)])
    expected = answer(everything, *inputs)
    assert all(x.isfinite().all() for x in expected)
    assert close(answer(compiled(everything, "aot_eager"), *inputs), expected)


def test_compiled_code_takes_up_the_knob() -> None:
    """For a raise and back."""
    function = compiled(numerics.log, "aot_eager")
    values = []
    for factor in (1.0, 100.0, 1.0):
        numerics.raise_eps(factor)
        values.append(answer(function, BAD))
        assert close(values[-1], answer(numerics.log, BAD))
    assert close(values[0], values[2])
    assert not close(values[0], values[1])


def test_inductor() -> None:
    """Its code has singularities of its own: divisions that became products, numbers that became zero."""

    def some(x: Tensor) -> Tensor:
        return numerics.div(numerics.log(x), x)

    x = torch.cat([X, BAD, torch.tensor([[1e-40, -1e-40, 1e-30]])])
    with torch._inductor.config.patch(compile_threads=1):  # more would be processes, which take longer to start
        ours = answer(compiled(some, "inductor"), x)
    assert all(t.isfinite().all() for t in ours)
    assert all(torch.allclose(t[0], its[0]) for t, its in zip(ours, answer(some, x), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(dtype: torch.dtype) -> None:
    """The result has the type and the bits that torch's has there."""
    names = ["log", "torch.exp", "/", "torch.pow", "norm", "softmax", "F.binary_cross_entropy"]
    with torch.autocast("cpu", dtype=dtype):
        for x, name in product((X, X.to(dtype)), names):
            with Substituting():
                ours = answer(ALIKE[name], x)
            for mine, theirs in zip(ours, answer(ALIKE[name], x), strict=True):
                assert mine.dtype is theirs.dtype, name
                assert torch.equal(mine, theirs), name


def test_under_function_transforms() -> None:
    """Gradients of single examples are those of the batch, and forward derivatives are those of the backward pass."""
    x = torch.tensor([0.0, 1.0, -1.0, 0.3, 300.0])
    for safe in (
        numerics.log,
        numerics.exp,
        numerics.sqrt,
        numerics.acos,
        lambda x: numerics.div(torch.ones_like(x), x),
    ):
        expected = answer(safe, x)[1]
        assert torch.equal(torch.func.vmap(torch.func.grad(safe))(x), expected)
        assert torch.equal(torch.func.grad(lambda x, safe=safe: safe(x).sum())(x), expected)
        assert torch.equal(torch.func.jvp(safe, (x,), (torch.ones(5),))[1], expected)
