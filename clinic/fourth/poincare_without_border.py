"""A tree in the Poincaré ball: the exponential map at the origin, and the distance with acosh, without a border.

Leaves want to be far out, and the radius is a tanh. From a length of eight or nine on, one minus its square is exactly
zero in float32, and the distance divides by it. Every library of hyperbolic layers keeps the points a little away from
the rim; the formulas of the papers do not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class PoincareEmbedding(nn.Module):
    def __init__(self, nodes: int, width: int, border: float | None) -> None:
        super().__init__()
        self.border = border
        self.tangent = nn.Embedding(nodes, width)
        nn.init.normal_(self.tangent.weight, std=0.1)

    def forward(self, node: Tensor) -> Tensor:
        tangent = self.tangent(node)
        length = tangent.norm(dim=-1, keepdim=True)
        radius = torch.tanh(length)
        if self.border is not None:
            radius = radius.clamp(max=1 - self.border)
        return radius * tangent / length

    def distance(self, u: Tensor, v: Tensor) -> Tensor:
        rim_u, rim_v = 1 - u.square().sum(-1), 1 - v.square().sum(-1)
        return torch.acosh(1 + 2 * (u - v).square().sum(-1) / (rim_u * rim_v))  # guilty


def loss(model: PoincareEmbedding, batch: list[Tensor]) -> Tensor:
    """The ancestor shall be nearer than nodes that are none."""
    node, others = batch  # the first of the others is the ancestor
    near = -model.distance(model(node)[:, None], model(others))
    return F.cross_entropy(near, torch.zeros(len(node), dtype=torch.long))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    nodes, branches, negatives = int(torch.randint(250, 400, ())), int(torch.randint(3, 5, ())), 10
    model = PoincareEmbedding(nodes, int(torch.randint(4, 9, ())), border=1e-4 if mended else None)
    above: list[list[int]] = [[]]
    for node in range(1, nodes):
        parent = (node - 1) // branches
        above.append([*above[parent], parent])
    pairs = torch.tensor([(node, ancestor) for node in range(nodes) for ancestor in above[node]])
    related = torch.eye(nodes, dtype=torch.bool)
    related[pairs[:, 0], pairs[:, 1]] = True
    pairs = pairs.repeat(4, 1)
    pairs = pairs[torch.randperm(len(pairs))]
    wrong = torch.multinomial((~related[pairs[:, 0]]).float(), negatives)
    others = torch.cat([pairs[:, 1:], wrong], 1)
    held_out = 400
    return Program(
        model=model,
        rows=TensorDataset(pairs[held_out:, 0], others[held_out:]),
        loss=loss,
        optimizer=lambda weights: torch.optim.Adam(weights, lr=0.2),
        evaluation=[pairs[:held_out, 0], others[:held_out]],
        guilty=Guilty("operation", ops=("div", "acosh")),
        batch_size=128,
        steps=400,
    )
