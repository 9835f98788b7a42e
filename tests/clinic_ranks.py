"""A loop of somebody's own on two ranks, with a fault that one of them meets, and what each rank has learned."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from guarded import trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

from resilient_train.data.trees import weights_sha256
from resilient_train.loop.guard import Guard

BAD_ROW, RAISING, ZERO, SLOPE, THROWN = 37, 21, 50, 71, 80


class Rows(Dataset[Any]):
    """Each row is met by one rank in an epoch."""

    def __init__(self, fault: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(96, 5, generator=generator)
        self.labels = self.inputs.sum(-1)
        self.fault = fault
        if fault == "bad_row":
            self.inputs[BAD_ROW, 2] = math.nan
        if fault == "operation":
            self.inputs[ZERO] = 0.0
        if fault == "slope":
            self.labels[SLOPE] = 3e38  # for which the loss below is finite, and its slope is none
        if fault == "thrown":
            self.labels[THROWN] = 777.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Any:
        if self.fault == "raising" and row == RAISING:
            raise OSError("the disk has a hole")
        return self.inputs[row], self.labels[row]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        length = inputs.pow(2).sum(-1, keepdim=True).sqrt()
        hidden = torch.tanh(self.body(inputs / length))  # operation
        result: torch.Tensor = self.head(hidden).squeeze(-1)
        return result


class Bounded(torch.autograd.Function):
    """A loss that is cut off, and whose slope is not."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value.clamp(max=1e4)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> torch.Tensor:
        (value,) = ctx.saved_tensors
        slope: torch.Tensor = slopes[0] * (value / value)
        return slope


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if (batch[1] == 777.0).any():  # before the forward, in whose collectives the other rank waits
        raise ValueError("no such label")
    bounded: Any = Bounded.apply
    found: torch.Tensor = bounded((model(batch[0]) - batch[1]).pow(2)).mean()
    return found


def learned(fault: str, strategy: str) -> dict[str, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = Net()
    if strategy == "spread":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    prepared = model if strategy == "spread" else accelerator.prepare(model)
    guard = Guard(accelerator, prepared, optimizer, data=Rows(fault), batch_size=4, objective=loss, clip=1.0)
    trained(guard, 30)
    told = [
        {
            "signal": one.anomaly.signal,
            "cause": one.diagnosis.cause,
            "rows": one.diagnosis.rows,
            "line": one.diagnosis.culprit and one.diagnosis.culprit.line,
            "op": one.diagnosis.culprit and one.diagnosis.culprit.op,
            "ranks": one.anomaly.ranks,
            "remedies": [action.remedy for action in one.decision.actions],
        }
        for one in guard.incidents
    ]
    found = {"told": told, "weights": weights_sha256(guard.state), "tick": guard.clock.tick}
    guard.close()
    guard.world.leave()
    return found
