"""Which settings become parameters in MLflow: what a person compares runs by, and few enough to see past them."""

from __future__ import annotations

import pytest

from resilient_train.app.config.compose import load


@pytest.mark.parametrize(
    ("words", "there", "missing"),
    [
        (
            [],
            {"model": "gpt", "recovery": "balanced", "model.width": 128, "optimizer.lr": 1e-3, "run.steps": 1000},
            ["model._target_", "checks.jump.every", "tracking.uri", "run.name", "data.train._target_"],
        ),
        (
            ["model=resnet", "data=digits", "objective=classification", "checks.weights.every=50", "data.train.seed=3"],
            {"model": "resnet", "data": "digits", "checks.weights.every": 50, "data.train.seed": 3, "run.seed": 0},
            ["checks.optimizer.every", "data.eval.seed"],
        ),
        (
            ["run.name=mine", "tracking.uri=http://x:1", "+optimizer.amsgrad=true"],
            {"optimizer.amsgrad": True},
            ["run.name"],
        ),
        (
            ["model=custom", "model._target_=torch.nn.Linear", "+model.in_features=4"],
            {"model": "custom", "model._target_": "torch.nn.Linear", "model.in_features": 4},
            ["tracking.kind"],
        ),
    ],
)
def test_parameters_are_what_runs_are_compared_by(
    words: list[str], there: dict[str, object], missing: list[str]
) -> None:
    """The options chosen, whatever was given, and what always matters."""
    params = load(words).params
    assert there.items() <= params.items()
    assert not params.keys() & set(missing)
    assert len(params) <= 32


def test_a_password_that_was_given_is_none_of_them() -> None:
    assert "hunter2hunter2" not in str(load(["+data.train.password=hunter2hunter2"]).params)
