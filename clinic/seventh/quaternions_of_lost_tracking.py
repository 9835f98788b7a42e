"""A motion capture writes (0, 0, 0, 0) for the pose where it lost the markers, and the policy normalises quaternions.

0 / 0 is NaN for that row, and then so is every weight. Met with logs of OptiTrack and of ROS, where tf says "quaternion
malformed, magnitude: 0.0": a recorded flight has a handful of such samples, and they are no poses at all.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Flight(Dataset[dict[str, Tensor]]):
    """Samples of a flight: the pose, the angular velocity, and the torque that the pilot asked for."""

    def __init__(self, poses: Tensor, rates: Tensor, torques: Tensor) -> None:
        self.poses, self.rates, self.torques = poses, rates, torques

    def __len__(self) -> int:
        return len(self.poses)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"pose": self.poses[row], "rate": self.rates[row], "torque": self.torques[row]}


class Policy(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, width), nn.ELU(), nn.Linear(width, width), nn.ELU(), nn.Linear(width, 3)
        )

    def forward(self, poses: Tensor, rates: Tensor) -> Tensor:
        return self.layers(torch.cat([rotation(poses).flatten(1), rates], dim=-1))


def rotation(quaternions: Tensor) -> Tensor:
    w, x, y, z = (quaternions / quaternions.norm(dim=-1, keepdim=True)).unbind(dim=-1)
    return torch.stack(
        [
            torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], dim=-1),
            torch.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], dim=-1),
            torch.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], dim=-1),
        ],
        dim=1,
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["pose"], batch["rate"]), batch["torque"])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, held_out = 2000, 128
    poses = torch.tensor([1.5, 0.0, 0.0, 0.0]) + 0.6 * torch.randn(count + held_out, 4)
    rates = 0.7 * torch.randn(count + held_out, 3)
    turned = rotation(poses)
    tilt = torch.stack([turned[:, 2, 1], turned[:, 0, 2], turned[:, 1, 0]], dim=-1)
    torques = -1.5 * tilt - torch.linalg.cross(rates, rates @ torch.randn(3, 3)) - 0.5 * rates
    torques = torques + 0.05 * torch.randn_like(torques)
    lost = int(torch.randint(count - 10, ()))
    rows = range(lost, lost + 2 + seed % 4)
    poses[list(rows)] = 0.0
    kept = torch.ones(count, dtype=torch.bool)
    if mended:
        kept[list(rows)] = False
    return Program(
        model=Policy(int(torch.randint(40, 64, ()))),
        rows=Flight(poses[:count][kept], rates[:count][kept], torques[:count][kept]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=1e-3),
        evaluation={"pose": poses[count:], "rate": rates[count:], "torque": torques[count:]},
        guilty=Guilty("data", rows=tuple(rows)),
        steps=500,
        clip=1.0,
    )
