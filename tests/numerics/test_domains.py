"""What raises outside of its domain has a value in a patched line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as d
from torch.nn import functional as F

from resilient_train.extensions.armor import replacements
from resilient_train.extensions.armor.repair import call, has_value

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def test_what_is_added_to_a_matrix_is_as_much_as_it_takes() -> None:
    """The others of the batch stay as they are."""
    zeros = torch.eye(3) * torch.tensor([2.0, 0.0, 2.0])[:, None, None]
    assert call(torch.linalg.inv, "linalg_inv", (zeros,), {}).isfinite().all()
    matrices = torch.diag_embed(torch.tensor([[2.0, 1.0, 0.5], [3.0, -1.0, 1.0]]))
    made = call(torch.linalg.cholesky, "linalg_cholesky", (matrices,), {})
    assert torch.equal(made[0], torch.linalg.cholesky(matrices[0]))
    assert made.isfinite().all()


def test_what_the_checks_of_a_distribution_refuse_is_computed_and_repaired() -> None:
    """Of a parameter outside, or of a value. What is inside keeps its density; checks are on again afterwards."""
    scale = torch.tensor([-0.5, 0.4], requires_grad=True)
    normal: Any = replacements.call(d.Normal, torch.zeros(2), scale)
    beta = d.Beta(torch.tensor([2.0, 2.0]), torch.tensor([2.0, 2.0]))
    with pytest.raises(ValueError, match="constraint"):
        d.Normal(torch.zeros(2), scale)
    for density, bad in ((normal, 0.5), (beta, 1.2), (beta, -5.0)):
        got = replacements.call(density.log_prob, torch.tensor([bad, 0.5]))
        assert got.isfinite().all()
        assert got[1] == density.log_prob(torch.tensor([0.5, 0.5]))[1]


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
