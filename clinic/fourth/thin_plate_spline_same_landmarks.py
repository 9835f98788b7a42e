"""A thin-plate spline fitted inside of a network, for faces of which some are seen from the side.

The spline through the landmarks is the solution of a linear system. In a profile the annotators put what is hidden
(the far corner of the eye, the far nostril) exactly onto its visible counterpart, as the guidelines tell them to. Two
rows of the system are then the same, and torch.linalg.solve stops: the input matrix is singular. The usual mend is
the one from the textbook, a smoothing spline: a little is added to the diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Faces(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Landmarks of a face, how it moves (pose), some points of its skin and where these have gone."""

    def __init__(self, faces: int, landmarks: int, points: int, profiles: int) -> None:
        grid = torch.cartesian_prod(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4))[:landmarks]
        self.landmarks = grid + 0.12 * torch.rand(faces, landmarks, 2)
        for face in torch.randperm(faces)[:profiles].tolist():
            self.landmarks[face, 1] = self.landmarks[face, 0]
        self.pose = torch.randn(faces, 4)
        self.skin = torch.rand(faces, points, 2) * 1.6 - 0.8
        self.moved = self.skin + self.shift(self.skin) + 0.02 * torch.randn(faces, points, 2)

    def shift(self, points: Tensor) -> Tensor:
        x, y = points.unbind(-1)
        turn, stretch, bend, lift = self.pose[:, None].unbind(-1)
        return 0.3 * torch.stack([turn * y + bend * x * x, stretch * x - turn * x * y + lift], -1)

    def __len__(self) -> int:
        return len(self.pose)

    def __getitem__(self, face: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.landmarks[face], self.pose[face], self.skin[face], self.moved[face]


def radial(points: Tensor, centres: Tensor) -> Tensor:
    squared = (points[:, :, None] - centres[:, None]).square().sum(-1)
    return squared * torch.log(squared + 1e-9)


def with_affine(points: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(points[..., :1]), points], -1)


class Warp(nn.Module):
    """Where each landmark goes is learned; the skin in between follows the spline."""

    def __init__(self, width: int, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.net = nn.Sequential(
            nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def forward(self, landmarks: Tensor, pose: Tensor, skin: Tensor) -> Tensor:
        count = landmarks.shape[1]
        goes = landmarks + self.net(torch.cat([landmarks, pose[:, None].expand(-1, count, -1)], -1))
        kernel = radial(landmarks, landmarks) + self.smoothing * torch.eye(count)
        affine = with_affine(landmarks)
        top = torch.cat([kernel, affine], 2)
        bottom = torch.cat([affine.transpose(1, 2), torch.zeros(len(pose), 3, 3)], 2)
        right = torch.cat([goes, torch.zeros(len(pose), 3, 2)], 1)
        spline = torch.linalg.solve(torch.cat([top, bottom], 1), right)  # guilty
        return torch.cat([radial(skin, landmarks), with_affine(skin)], 2) @ spline


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    landmarks, pose, skin, moved = batch
    return F.mse_loss(model(landmarks, pose, skin), moved)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    landmarks, points = int(torch.randint(10, 15, ())), int(torch.randint(20, 40, ()))
    profiles = int(torch.randint(3, 9, ()))
    model = Warp(int(torch.randint(48, 80, ())), smoothing=1e-3 if mended else 0.0)
    rows = Faces(int(torch.randint(400, 600, ())), landmarks, points, profiles)
    held_out = Faces(128, landmarks, points, 0)
    return Program(
        model=model,
        rows=rows,
        loss=loss,
        optimizer=lambda weights: torch.optim.Adam(weights, lr=2e-3),
        evaluation=[held_out.landmarks, held_out.pose, held_out.skin, held_out.moved],
        guilty=Guilty("operation", ops=("linalg_solve", "solve")),
        batch_size=16,
        steps=300,
    )
