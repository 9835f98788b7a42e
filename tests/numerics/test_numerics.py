"""Safe operations: torch's own to the last bit where it has a finite value and slope, finite everywhere else."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from resilient_train import numerics

HALF, BRAIN, SINGLE, DOUBLE = DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = {HALF: torch.int16, BRAIN: torch.int16, SINGLE: torch.int32, DOUBLE: torch.int64}
BORDERS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-7, 1e-20, 1e-30, 1e-40, 1e20, 11.09, 88.72, 709.78)

Operation = Callable[..., Tensor]

SEEDS = range(6)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

ALONE: dict[str, tuple[Operation, Operation]] = {
    name: (getattr(torch, name), getattr(numerics, name))
    for name in ("log", "log2", "log10", "log1p", "exp", "sqrt", "rsqrt", "reciprocal", "acos", "asin", "atanh")
}
for _p in (0, 0.5, 1, 2, 2.5, 3, -0.5, -1, -2, 100):
    ALONE[f"pow {_p}"] = partial(torch.pow, exponent=_p), partial(numerics.pow, exponent=_p)
for _base in (0.0, 0.5, 3, -2.0):
    ALONE[f"{_base} pow"] = partial(torch.pow, _base), partial(numerics.pow, _base)
for _d in (0.0, 1e-30, -3, 0.1, 1e30):
    ALONE[f"div {_d}"] = partial(torch.div, other=_d), partial(numerics.div, other=_d)
IN_PAIRS: dict[str, tuple[Operation, Operation]] = {
    "div": (torch.div, numerics.div),
    "div down": (partial(torch.div, rounding_mode="floor"), partial(numerics.div, rounding_mode="floor")),
    "atan2": (torch.atan2, numerics.atan2),
    "pow": (torch.pow, numerics.pow),
    "pow of whole exponents": (torch.pow, numerics.pow),
}
ALONG: dict[str, tuple[Operation, Operation]] = {
    "std": (partial(torch.std, dim=1), partial(numerics.std, dim=1)),
    "std of all": (partial(torch.std, dim=1, correction=0), partial(numerics.std, dim=1, correction=0)),
    "softmax": (partial(torch.softmax, dim=1), partial(numerics.softmax, dim=1)),
    "log_softmax": (partial(torch.log_softmax, dim=1), partial(numerics.log_softmax, dim=1)),
}
for _of in ("fro", 1, 2, math.inf):
    ALONG[f"norm {_of}"] = partial(torch.norm, p=_of, dim=1), partial(numerics.norm, p=_of, dim=1)
for _of in (1.0, 2.0, math.inf):
    ALONG[f"normalize {_of}"] = partial(F.normalize, p=_of), partial(numerics.normalize, p=_of)


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(WHOLE[dtype]).view(dtype)


def borders(dtype: torch.dtype) -> Tensor:
    """The numbers around the places where something happens: three to each side, of both signs."""
    info = torch.finfo(dtype)
    of_type = [info.tiny, info.tiny / 4, info.tiny**0.5, info.eps, info.max, info.max**0.5, info.max ** (-2 / 3)]
    places = torch.tensor([*BORDERS, *of_type], dtype=DOUBLE).to(dtype).view(WHOLE[dtype])
    around = from_bits((places[:, None] + torch.arange(-3, 4)).flatten(), dtype)
    both = torch.cat([around, -around])
    return both[both.isfinite()]


def numbers(dtype: torch.dtype, seed: int, count: int = 120) -> Tensor:
    """Finite numbers: of all there are, of ordinary size, and of those around the borders."""
    draw = torch.Generator().manual_seed(seed)
    kind = torch.randint(3, (count,), generator=draw)
    bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=draw)
    special = borders(dtype)
    of_all = from_bits(bits >> (64 - 8 * dtype.itemsize), dtype)
    ordinary = (bits.double() / 2**61).to(dtype)
    x = torch.where(kind == 0, special[bits % len(special)], torch.where(kind == 1, ordinary, of_all))
    return torch.where(x.isfinite(), x, torch.rand(count, generator=draw).to(dtype))


def slices(dtype: torch.dtype, seed: int, width: int) -> Tensor:
    """Rows of any numbers, of zeros, of one number, and of numbers of one scale, however large or small."""
    highest = min(math.log2(torch.finfo(dtype).max), 1023.9)  # of doubles it is 1024 when rounded, and 2**1024 is inf
    x = numbers(dtype, seed, 9 * width).view(9, width)
    scales = highest * (2 * torch.rand(5, 1, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)) - 1)
    x[0], x[1] = 0.0, x[1, :1]
    x[4:] = (numbers(DOUBLE, seed + 100, 5 * width).view(5, width).clamp(-1, 1) * 2**scales).to(dtype)
    return x


def answer(
    operation: Operation, inputs: tuple[Tensor, ...], grads: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The value, and the slopes for a gradient of 1 or the given ones."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    value = operation(*inputs)
    grads = torch.ones_like(value) if grads is None else grads.to(value.dtype).expand(value.shape)
    return value.detach(), list(torch.autograd.grad(value, inputs, grads))


def same_bits(x: Tensor, y: Tensor) -> Tensor:
    return x.contiguous().view(WHOLE[x.dtype]) == y.contiguous().view(WHOLE[y.dtype])


def per_row(said: Tensor, rows: int) -> Tensor:
    return said.reshape(rows, -1).all(1)


def check(bare: Operation, safe: Operation, *inputs: Tensor, few: Tensor | None = None, signed: bool = True) -> None:
    """What torch can do is torch's, all else is finite: by rows, and where there are none by element.

    `few`: rows that need not be torch's. `signed`: a slope of zero has torch's sign, which exp and atan2 lose.
    """
    rows = len(inputs[0])
    value, slopes = answer(bare, inputs)
    fine = per_row(value.isfinite(), rows)
    for slope in slopes:
        fine &= per_row(slope.isfinite(), rows)
    if few is not None:
        fine &= ~few
    for grads in (None, torch.tensor(-0.7)):
        value, slopes = answer(bare, inputs, grads)
        safe_value, safe_slopes = answer(safe, inputs, grads)
        assert safe_value.dtype is value.dtype
        assert safe_value.shape == value.shape
        assert (per_row(same_bits(value, safe_value), rows) | ~fine).all()
        assert safe_value.isfinite().all()
        for slope, safe_slope in zip(slopes, safe_slopes, strict=True):
            same = same_bits(slope, safe_slope) if signed else (slope == safe_slope)
            assert (per_row(same, rows) | ~fine).all()
            assert safe_slope.isfinite().all()


@pytest.mark.parametrize("name", ALONE)
@each_dtype
def test_an_operation_on_one_number(dtype: torch.dtype, name: str) -> None:
    """It is torch's where torch is finite, bit by bit, whatever lies beside it in the tensor, and finite elsewhere.

    Of 16 bits it is every number that there is.
    """
    if dtype.itemsize == 2:
        every = from_bits(torch.arange(2**16), dtype)
        some = [every[every.isfinite()]]
    else:
        some = [torch.cat([borders(dtype), numbers(dtype, seed)]) for seed in SEEDS]
    for x in some:
        check(*ALONE[name], x, signed=name != "exp")


@pytest.mark.parametrize("name", IN_PAIRS)
@each_dtype
def test_an_operation_on_two_numbers(dtype: torch.dtype, name: str) -> None:
    """It is torch's where torch is finite, also where only one of both has a slope, and finite elsewhere."""
    bare, safe = IN_PAIRS[name]
    signed = name != "atan2"
    for seed in SEEDS:
        x, y = numbers(dtype, seed), numbers(dtype, seed + 100)
        y = y.round() if "whole" in name else y
        check(bare, safe, x, y, signed=signed)
        check(lambda x, y=y: bare(x, y), lambda x, y=y: safe(x, y), x, signed=signed)
        check(lambda y, x=x: bare(x, y), lambda y, x=x: safe(x, y), y, signed=signed)


@pytest.mark.parametrize("name", ALONG)
@each_dtype
def test_an_operation_along_a_dimension(dtype: torch.dtype, name: str) -> None:
    """Slices that torch can do are torch's, whatever lies beside them, and the others are finite."""
    for seed in SEEDS:
        x = slices(dtype, seed, 2 + seed % 5)
        # In float16 what a gradient adds up to on its way to a tiny norm overflows, or does not, as the gradient wants.
        few = x.double().norm(dim=1) < 1e-3 if dtype is HALF and name.startswith("normalize") else None
        check(*ALONG[name], x, few=few)


@each_dtype
def test_the_cosine(dtype: torch.dtype) -> None:
    """Pairs of vectors that torch can do are torch's, and the others are finite."""
    for seed, eps in product(SEEDS, (1e-8, 0.0, 1e-30)):
        x, y = slices(dtype, seed, 1 + seed), slices(dtype, seed + 50, 1 + seed)
        check(partial(torch.cosine_similarity, eps=eps), partial(numerics.cosine_similarity, eps=eps), x, y)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@each_dtype
def test_cross_entropy_of_two_classes(dtype: torch.dtype, reduction: str) -> None:
    """Probabilities that torch can do are torch's; the ends are finite in every type, and what lies beside them too."""
    bare, safe = (partial(f, reduction=reduction) for f in (F.binary_cross_entropy, numerics.binary_cross_entropy))
    for seed in SEEDS:
        x, target = numbers(dtype, seed, 40), numbers(dtype, seed + 100, 40).clamp(0, 1)
        probability = torch.where((x >= 0) & (x <= 1), x, 0.25)
        _, (slope,) = answer(lambda p, t=target: F.binary_cross_entropy(p, t, reduction="none"), (probability,))
        probability = torch.where(slope.isfinite(), probability, 0.25)
        theirs = answer(lambda p, t=target: bare(p, t), (probability,))
        ours = answer(lambda p, t=target: safe(p, t), (probability,))
        assert same_bits(theirs[0], ours[0]).all()
        assert same_bits(theirs[1][0], ours[1][0]).all()
        value, slopes = answer(safe, (x, target))
        assert value.isfinite().all()
        assert all(slope.isfinite().all() for slope in slopes)


@each_dtype
def test_cross_entropy_of_probabilities(dtype: torch.dtype) -> None:
    """It is the negative log likelihood of their logarithms, and a class that had no chance costs -log(eps)."""
    p = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]], dtype=dtype)
    classes, weight = torch.tensor([2, 0]), torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    soft = F.one_hot(classes, 3).to(dtype)
    for kind in ("none", "mean", "sum"):
        theirs = F.nll_loss(p.log(), classes, weight, reduction=kind)
        assert torch.equal(numerics.cross_entropy_of_probabilities(p, classes, weight, reduction=kind), theirs)
        of_logits = F.cross_entropy(p.log(), soft, weight, reduction=kind)
        of_probabilities = numerics.cross_entropy_of_probabilities(p, soft, weight, reduction=kind)
        torch.testing.assert_close(
            of_probabilities, of_logits, atol=0.02 if dtype in (HALF, BRAIN) else 1e-6, rtol=0.01
        )
    hopeless = torch.tensor([0.0, 1.0], dtype=dtype)
    value, (slope,) = answer(lambda p: numerics.cross_entropy_of_probabilities(p, torch.tensor(0)), (hopeless,))
    assert value.item() == pytest.approx(-math.log(numerics.eps(dtype)), rel=0.01)
    assert slope.isfinite().all()


def test_a_sign_survives() -> None:
    """What is divided by a small negative number has its other sign, however small that is, and zero has a sign too."""
    for dtype in DTYPES:
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        divisor = torch.tensor([tiny, -tiny, 0.0, -0.0], dtype=dtype)
        one = torch.ones(1, dtype=dtype)
        for inverse in (numerics.div(one, divisor), numerics.reciprocal(divisor), numerics.pow(divisor, -1)):
            assert inverse.sign().tolist() == [1, -1, 1, -1]
        assert numerics.pow(divisor, -2).sign().tolist() == [1, 1, 1, 1]
        assert [numerics.div(one, d).sign().item() for d in (0.0, -0.0, -1e-40)] == [1, -1, -1]


@each_dtype
def test_values_that_a_person_would_expect(dtype: torch.dtype) -> None:
    """Out of the domain it is the border's, at a pole it is the value at eps, and what overflows is the largest."""

    def of(operation: Operation, *numbers: float) -> list[float]:
        return [operation(torch.tensor([x], dtype=dtype)).item() for x in numbers]

    eps, largest = numerics.eps(dtype), torch.finfo(dtype).max
    assert of(numerics.sqrt, 0.0, -4.0) == [0, 0]
    assert of(numerics.acos, 1.0, 1.5) == [0, 0]
    assert of(numerics.asin, -1.5) == of(torch.asin, -1.0)
    assert of(numerics.log, 0.0, -3.0) == of(torch.log, eps, eps)
    assert of(numerics.log1p, -1.0) == of(torch.log1p, eps - 1)
    assert of(numerics.atanh, 2.0, -1.0) == of(torch.atanh, 1 - eps, eps - 1)
    assert of(numerics.rsqrt, 0.0) == of(torch.rsqrt, eps)
    assert of(lambda x: numerics.pow(x, -0.5), 0.0, -3.0) == of(lambda x: torch.pow(x, -0.5), eps, eps)
    assert of(numerics.exp, 1e4) == pytest.approx([largest], rel=0.25)
    assert of(lambda x: numerics.pow(x, 3), -(largest**0.5)) == [-largest]
    assert of(lambda x: numerics.norm(x.expand(4)), largest) == [largest]
    assert of(lambda x: numerics.std(x), 3.0) == of(lambda x: numerics.std(x.expand(4)), 3.0) == [0]
    assert (
        of(lambda x: numerics.cosine_similarity(x, x, 0), 0.0) == of(lambda x: numerics.normalize(x, dim=0), 0.0) == [0]
    )


@pytest.mark.parametrize("dim", [0, 1])
@each_dtype
def test_a_slice_that_is_masked_altogether(dtype: torch.dtype, dim: int) -> None:
    """Nothing is chosen, no slope comes back, and no other slice notices."""
    x = torch.tensor([[1.0, 2.0, -math.inf], [-math.inf] * 3, [0.0, -math.inf, -math.inf]], dtype=dtype)
    x = x.T.contiguous() if dim == 0 else x
    fine = [0, 2]
    for bare, safe, nothing in (
        (torch.softmax, numerics.softmax, 0.0),
        (torch.log_softmax, numerics.log_softmax, math.log(numerics.eps(dtype))),
    ):
        (value, (slope,)), (own, (own_slope,)) = (answer(lambda x, f=f: f(x, dim), (x,)) for f in (safe, bare))
        assert torch.equal(value.select(1 - dim, 1), torch.full((3,), nothing, dtype=dtype))
        assert not slope.select(1 - dim, 1).any()
        index = torch.tensor(fine)
        mine, theirs = value.index_select(1 - dim, index), own.index_select(1 - dim, index)
        assert torch.equal(mine, theirs.clamp(min=torch.finfo(dtype).min))
        assert slope.isfinite().all()
        if safe is numerics.softmax:
            assert torch.equal(slope.index_select(1 - dim, index), own_slope.index_select(1 - dim, index))


@pytest.mark.parametrize("name", [*ALONE, *ALONG])
def test_a_nan_is_not_hidden(name: str) -> None:
    """It was born elsewhere, and has to be seen. Only its own element or slice is one."""
    if name == "pow 0":
        return  # which is 1 of anything, for torch as well
    _, safe = ALONE[name] if name in ALONE else ALONG[name]
    value = safe(torch.tensor([[0.5, math.nan], [0.5, 0.25]]))
    assert value[0].isnan().any()
    assert value[1].isfinite().all()


def test_a_nan_is_not_hidden_among_two() -> None:
    """Whichever of two numbers it is."""
    x, nan = torch.tensor([0.5, 0.0]), torch.tensor([math.nan, math.nan])
    for safe in (numerics.div, numerics.atan2, numerics.pow):
        assert safe(nan, x + 1).isnan().all()
        assert safe(x, nan).isnan().all()
    assert numerics.cosine_similarity(nan, x, 0).isnan()
    assert numerics.binary_cross_entropy(nan, x).isnan()
    one = numerics.binary_cross_entropy(torch.tensor([math.nan, 0.5]), x, reduction="none")
    assert one.isnan().tolist() == [True, False]
    assert numerics.std(torch.tensor([math.nan])).isnan()


def test_slopes_are_the_derivative() -> None:
    """Near a singularity, on its other side, beside a bad element or slice and in it; and of the slope itself."""

    def matrix(*rows: list[float]) -> Tensor:
        return torch.tensor(rows, dtype=DOUBLE, requires_grad=True)

    for safe in (numerics.log, numerics.sqrt, numerics.exp, numerics.rsqrt, numerics.acos, numerics.atanh):
        x = matrix([0.3, 0.9, 0.01], [0.999, 0.9999, -2.0], [-2.0, -5.0 if safe is not numerics.exp else -2.0, 0.5])
        assert torch.autograd.gradcheck(safe, x)
        assert torch.autograd.gradgradcheck(safe, x)
    x, y = matrix([1.0, -2.0, 0.5], [0.3, 0.2, 0.9]), matrix([0.1, -0.4, 1e-3], [2.0, 3.0, 4.0])
    for of_two in (numerics.div, numerics.atan2, numerics.cosine_similarity):
        assert torch.autograd.gradcheck(of_two, (x, y))
    assert torch.autograd.gradcheck(numerics.pow, (matrix([0.5, 2.0, 1e-2]), matrix([-0.5, 3.0, 0.5])))
    for name in ("norm 2", "normalize 2.0", "std", "softmax", "log_softmax"):
        assert torch.autograd.gradcheck(ALONG[name][1], (x,))


@pytest.mark.parametrize("grad", [0.0, 1.0])
@each_dtype
def test_nothing_on_the_way_back_is_a_nan(dtype: torch.dtype, grad: float) -> None:
    """Anomaly mode, which looks at every gradient on the way, has nothing to say."""
    x = torch.tensor([[0.0, 1.0, 2.0, -3.0], [0.0] * 4, [1e-30, -1e-30, 0.0, 1e30]]).clamp(-6e4, 6e4).to(dtype)
    operations: list[Any] = [safe for _, safe in (*ALONE.values(), *ALONG.values())]
    operations += [lambda x, safe=safe: safe(x, x.flip(1)) for _, safe in IN_PAIRS.values()]
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        for operation in operations:
            _, (slope,) = answer(operation, (x,), torch.tensor(grad))
            assert slope.isfinite().all()
