"""What distributions refuse is moved to where they accept it, however far away it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as d
from torch.nn import functional as F

from resilient_train.extensions.armor.repair import call, call_distribution, has_value

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]
MADE: dict[str, tuple[type[d.Distribution], Callable[[Tensor], dict[str, Any]]]] = {
    "Normal": (d.Normal, lambda x: {"loc": torch.zeros(2), "scale": x}),
    "Gamma": (d.Gamma, lambda x: {"concentration": x, "rate": 1.0}),
    "Bernoulli": (d.Bernoulli, lambda x: {"probs": x}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_a_parameter_outside_is_moved_inside(name: str, dtype: torch.dtype) -> None:
    """The others stay as they are, and the gradient arrives as it is, not 1e13 times as large."""
    made, given = MADE[name]
    for bad in (-0.5, -2.0, -100.0, -1e30, -math.inf, *([] if name == "Bernoulli" else [0.0])):
        parameter = torch.tensor([bad, 0.4], dtype=dtype, requires_grad=True)
        kwargs = given(parameter)
        key = next(key for key, one in kwargs.items() if one is parameter)
        moved = getattr(call_distribution(made, (), kwargs), key)
        assert moved.dtype == dtype
        assert moved[1] == parameter[1]
        assert 0.0 < moved[0] < 1.0
        moved.sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [float(math.isfinite(bad)), 1.0]
    probs: Any = call_distribution(d.Bernoulli, (torch.tensor([math.inf, 0.4, 0.0]),), {}).probs
    assert 0.9 < probs[0] < 1.0
    assert probs[2] == 0.0, "it is inside"


def test_what_is_added_to_a_matrix_is_as_much_as_it_takes() -> None:
    """The others of the batch stay as they are, also as covariances; a NaN stays one, and is refused."""
    zeros = torch.eye(3) * torch.tensor([2.0, 0.0, 2.0])[:, None, None]
    assert call(torch.linalg.inv, "linalg_inv", (zeros,), {}).isfinite().all()
    matrices = torch.diag_embed(torch.tensor([[2.0, 1.0, 0.5], [3.0, -1.0, 1.0]]))
    made = call(torch.linalg.cholesky, "linalg_cholesky", (matrices,), {})
    assert torch.equal(made[0], torch.linalg.cholesky(matrices[0]))
    assert made.isfinite().all()
    density: Any = call_distribution(d.MultivariateNormal, (torch.zeros(2, 3),), {"covariance_matrix": matrices})
    assert torch.equal(density.covariance_matrix[0], matrices[0])
    assert density.log_prob(torch.ones(2, 3)).isfinite().all()
    with pytest.raises(ValueError, match="constraint"):
        call_distribution(d.MultivariateNormal, (torch.zeros(3),), {"covariance_matrix": matrices[0] * math.nan})


def test_a_value_outside_of_the_support_is_moved() -> None:
    """However narrow the support is."""
    beta = d.Beta(torch.tensor([2.0, 2.0]), torch.tensor([2.0, 2.0]))
    uniform = d.Uniform(torch.tensor(1e-3), torch.tensor(2e-3))
    for bad in (1.2, 1e9, math.inf, -5.0):
        got = call_distribution(beta.log_prob, (torch.tensor([bad, 0.5]),), {})
        assert got.isfinite().all()
        assert got[1] == beta.log_prob(torch.tensor(0.5))[1]  # type: ignore[no-untyped-call]
        assert call_distribution(uniform.log_prob, (torch.tensor(bad),), {}).isfinite()


@pytest.mark.parametrize(
    ("given", "possible"),
    [
        ([0.0, 0.0, 0.0], {0, 1, 2}),
        ([-1.0, 0.0, 2.0], {2}),
        ([math.nan, 1.0, 0.0], {1}),
        ([math.nan, math.nan, -1.0], {0, 1, 2}),
    ],
)
def test_what_is_no_chance_is_never_drawn(given: list[float], possible: set[int]) -> None:
    """And all are alike where there is no chance at all. Rows that can be drawn from stay as they are."""
    torch.manual_seed(0)
    chances = torch.tensor([given, [0.0, 0.0, 1.0]])
    with pytest.raises(RuntimeError):
        torch.multinomial(chances, 64, replacement=True)
    for how in (torch.multinomial, Tensor.multinomial):
        drawn = call(how, "multinomial", (chances, 64), {"replacement": True})
        assert set(drawn[0].tolist()) == possible
        assert set(drawn[1].tolist()) == {2}
    with pytest.raises(RuntimeError, match="without replacement"):
        call(torch.multinomial, "multinomial", (chances, 9), {})


def test_a_chance_beyond_one_is_one_and_a_nan_is_refused() -> None:
    """The others keep their cost and slope."""
    chances, target = torch.tensor([1.5, 0.4, -0.1], requires_grad=True), torch.tensor([1.0, 1.0, 0.0])
    costs = call(F.binary_cross_entropy, "binary_cross_entropy", (chances, target), {"reduction": "none"})
    assert costs.tolist() == [0.0, pytest.approx(-math.log(0.4)), 0.0]
    (slope,) = torch.autograd.grad(costs.sum(), chances)
    assert slope.tolist() == [0.0, pytest.approx(-1 / 0.4), 0.0]
    lost = torch.tensor([0.5, math.nan, 0.5])
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        call(F.binary_cross_entropy, "binary_cross_entropy", (lost, target), {})


@pytest.mark.parametrize(
    ("kind", "text", "has"),
    [
        (LinAlgError, "linalg.cholesky: (Batch element 0): The factorization could not be completed", True),
        (LinAlgError, "torch.linalg.solve: The solver failed because the input matrix is singular.", True),
        (LinAlgError, "linalg.eigh: The algorithm failed to converge", False),
        (RuntimeError, "linalg.cholesky: A must be batches of square matrices", False),
        (RuntimeError, "invalid multinomial distribution (sum of probabilities <= 0)", True),
        (RuntimeError, "mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_for_which_errors_a_patch_has_a_value(kind: type[Exception], text: str, has: bool) -> None:
    assert has_value(kind(text)) is has


def test_what_stands_for_nothing_is_refused() -> None:
    """A NaN was made elsewhere, and no vector is the nearest by its elements."""
    for of, bad in (
        (d.Bernoulli, [math.nan, 1.0]),
        (d.Categorical, [-1.0, 2.0]),
        (d.Poisson(torch.tensor([1.0, 2.0])).log_prob, [-1.0, 1.0]),
        (d.Dirichlet(torch.ones(2)).log_prob, [0.9, 1.0]),
    ):
        with pytest.raises(ValueError, match=r"constraint|support"):
            call_distribution(of, (torch.tensor(bad),), {})
