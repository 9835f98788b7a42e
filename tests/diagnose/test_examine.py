"""One batch under the microscope outside of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import resilient_train
from resilient_train.command import examine as command
from resilient_train.command.build import model_of
from resilient_train.command.config.compose import load
from resilient_train.durable.manifest import WEIGHTS
from resilient_train.ground.types import Cause


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def plain(model: Any, batch: Any) -> Any:
    return model(batch["inputs"]).square().mean(), {"some": 1.0}


def entropy(model: Any, batch: Any) -> Any:
    shares = torch.softmax(model(batch["inputs"]) * 1e5, -1)
    return -(shares * shares.log()).sum(-1).mean()  # 0 * log 0


def test_a_healthy_batch_shows_every_layer_and_changes_nothing() -> None:
    """Ranges of outputs and gradients, layer by layer; buffers, gradients and random numbers are what they were."""
    model, batch = network(), {"inputs": torch.randn(16, 4)}
    model[0].weight.grad = torch.ones(8, 4)
    before = [one.clone() for one in model.state_dict().values()]
    torch.manual_seed(5)
    found = resilient_train.examine(model, plain, batch)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(one, other) for one, other in zip(before, model.state_dict().values(), strict=True))
    assert model[0].weight.grad is not None
    assert torch.equal(model[0].weight.grad, torch.ones(8, 4))
    assert found.is_healthy
    assert found.diagnosis is None
    kinds = ["0 (Linear)", "1 (BatchNorm1d)", "2 (Dropout)", "3 (Linear)", "the model (Sequential)"]
    assert [one.name for one in found.layers] == ["batch", *kinds]
    assert found.layers[1].output["shape"] == [16, 8]
    assert all(one.gradient is not None for one in found.layers[1:])
    assert "BatchNorm1d" in str(found)
    json.dumps(asdict(found))


def test_what_breaks_is_named_with_advice() -> None:
    found = resilient_train.examine(network(), entropy, {"inputs": torch.randn(16, 4)})
    assert not found.is_healthy
    assert found.diagnosis is not None
    assert found.diagnosis.culprit is not None
    assert (found.diagnosis.cause, found.diagnosis.culprit.op) == (Cause.OPERATION, "log")
    assert found.diagnosis.culprit.file == __file__
    assert "cause operation\nadvice: `log` at " in str(found)


OVERRIDES = [
    *("model=mlp", "data=digits", "objective=custom", "objective._target_=test_examine.of_zero"),
    *("accelerate.mixed_precision=bf16", "run.name=examined"),
]


def of_zero(model: Any, batch: Any) -> Tensor:
    scores: Tensor = model(batch[0])
    return scores.square().mean() + torch.log(scores * 0).mean()


def test_the_command_examines_a_batch_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the weights of the run. Another configuration is refused."""

    def examined(*more: str) -> int:
        return command.main([str(tmp_path), *OVERRIDES, *more])

    made = load(OVERRIDES)
    (tmp_path / "config.yaml").write_text(made.yaml(tmp_path))
    assert examined() == 2
    assert "no weights" in capsys.readouterr().err
    assert not (tmp_path / "checkpoints").exists()
    save_file({name: one * 0 for name, one in model_of(made.config).state_dict().items()}, tmp_path / WEIGHTS)
    assert examined() == 1
    assert examined("model.hidden=[3]") == 2
    assert "give the overrides of its command" in capsys.readouterr().err
