"""Broken elements get a gradient that leads them back: bounded, inward, and only they."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Beta

from resilient_train.extensions.armor import replacements


def slope(value: Tensor, x: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(value.sum(), x)
    return found.tolist()


def test_a_power_on_its_pole_leaves_it() -> None:
    """(x ** p - 1) / p at p = 0 is 0 / 0 in every element of every batch."""
    x, p = torch.tensor([0.5, 2.0, 4.0]), torch.zeros((), requires_grad=True)
    value = replacements.operate("truediv", x**p - 1, p)
    (found,) = torch.autograd.grad(value.sum(), p)
    assert value.tolist() == [0.0, 0.0, 0.0]
    assert found.item() == pytest.approx(x.log().sum().item(), rel=1e-2)


def test_at_the_border_of_a_domain_a_slope_leads_inside_and_beyond_it_there_is_none() -> None:
    x = torch.tensor([-0.5, 0.0, 2.0], requires_grad=True)
    assert slope(-replacements.method("log", x), x) == [0.0, -1.0, -0.5]  # a descent leads inside
    assert slope(replacements.method("log", x), x) == [0.0, 0.0, 0.5]  # and none beyond


def test_torchs_own_code_is_armored_where_a_users_line_calls_it() -> None:
    """The density of a Beta at 0 is a logarithm of 0 in torch's Python code."""
    shape = torch.tensor(2.0, requires_grad=True)
    rates = torch.tensor([0.0, 0.25, 0.5])
    density = replacements.method("log_prob", Beta(shape, 3.0), rates)
    assert density.isfinite().all()
    assert torch.equal(density[1:], Beta(shape, 3.0).log_prob(rates)[1:])  # type: ignore[no-untyped-call]
    assert math.isfinite(torch.autograd.grad(density.sum(), shape)[0].item())


def test_a_constant_that_is_nan_is_0_and_other_nans_stay() -> None:
    x, seen = torch.tensor([1.0, 2.0, math.nan], requires_grad=True), torch.tensor([True, False, True])
    for nothing in (math.nan, torch.tensor(math.nan)):
        assert replacements.call(torch.where, seen, x, nothing).isnan().tolist() == [False, False, True]
    assert replacements.method("masked_fill", x.detach(), ~seen, math.nan).tolist()[:2] == [1.0, 0.0]
    assert replacements.call(torch.full_like, x, math.nan).tolist() == [0.0, 0.0, 0.0]
    assert replacements.method("masked_fill", x.detach(), ~seen, -math.inf).tolist()[1] == -math.inf
