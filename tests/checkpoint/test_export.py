"""Weights for other programs: exported to the bit as they were trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import MINE, command
from safetensors.torch import load_file
from torch import nn

from resilient_train.command import checkpoints

Said = pytest.CaptureFixture[str]


class Complex(nn.Module):
    """A complex weight, and a buffer of 16 bits without a sign."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.phase = nn.Linear(6, 1), nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(6, dtype=torch.uint16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((x * self.phase).real)
        return out


OWN = [*MINE, "model._target_=test_export.Complex", "run.dir=run", "run.steps=30", "run.eval_every=10"]
OWN += ["optimizer=custom", "optimizer._target_=torch.optim.SGD", "+optimizer.lr=0.01"]
OWN += ["data.eval._target_=user_programs.Fixed"]


@pytest.mark.usefixtures("here")
def test_weights_are_exported_as_they_were_trained(run_command: command, capsys: Said) -> None:
    """Also when the run is started again. What cannot be exported is told in one line: a checkpoint that is not sound,
    a file that is taken.
    """
    done = run_command(OWN)
    assert done.code == 0, done.stdout + done.stderr
    assert "is complete" in run_command(OWN).stdout
    (checkpoint,) = Path("run/checkpoints").iterdir()

    def export(*arguments: str) -> tuple[int, str]:
        code = checkpoints.main(["run", *arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert export("--weights", "new") == (0, "step 30 is in new\n")
    exported, trained = load_file("new"), load_file("run/weights.safetensors")
    assert exported.keys() == trained.keys() == {"head.weight", "head.bias", "phase", "mask"}
    assert all(torch.equal(one, trained[name]) for name, one in exported.items())
    assert export("--weights", "new") == (1, "new is there already: --weights makes a new file\n")
    (checkpoint / "weights.safetensors").write_bytes(b"")
    code, said = export("--weights", "other")
    assert code == 1
    assert f"{checkpoint.name}: weights.safetensors is not what was written" in said
    assert not Path("other").exists()
