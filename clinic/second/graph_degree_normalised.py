"""Messages on a directed graph are scaled by the in-degree to the power of -1/2, which is infinite where it is zero.

The normalisation of graph convolutional networks, written for undirected graphs and then used on threads of "who
answers whom": a person whom nobody answers sends messages with an infinite weight. One thread in eight has such a
person, and so has almost every batch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clinic.program import Guilty, Program


class Convolution(nn.Module):
    """Passes messages along the edges, normalised by degree."""

    def __init__(self, inputs: int, outputs: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.neighbours = nn.Linear(inputs, outputs, bias=False)
        self.own = nn.Linear(inputs, outputs)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = nodes.new_zeros(len(nodes)).index_add(0, target, nodes.new_ones(len(target)))
        if self.mended:
            degree = degree.clamp(min=1)
        scale = degree.pow(-0.5)  # guilty
        messages = nodes[source] * (scale[source] * scale[target]).unsqueeze(-1)
        received = torch.zeros_like(nodes).index_add(0, target, messages)
        return self.own(nodes) + self.neighbours(received)


class ThreadNet(nn.Module):
    """Two convolutions and the mean over the people of each thread."""

    def __init__(self, features: int, width: int, mended: bool) -> None:
        super().__init__()
        self.first = Convolution(features, width, mended)
        self.second = Convolution(width, width, mended)
        self.head = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor, thread: Tensor, threads: int) -> Tensor:
        hidden = F.relu(self.first(nodes, edges))
        hidden = F.relu(self.second(hidden, edges))
        sums = hidden.new_zeros(threads, hidden.shape[-1]).index_add(0, thread, hidden)
        return self.head(sums / torch.bincount(thread, minlength=threads).unsqueeze(-1)).squeeze(-1)


def collate(graphs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put the graphs side by side into a large one."""
    sizes = torch.tensor([len(graph["nodes"]) for graph in graphs])
    starts = sizes.cumsum(0) - sizes
    return {
        "nodes": torch.cat([graph["nodes"] for graph in graphs]),
        "edges": torch.cat([graph["edges"] + start for graph, start in zip(graphs, starts, strict=True)], dim=1),
        "thread": torch.repeat_interleave(torch.arange(len(graphs)), sizes),
        "label": torch.stack([graph["label"] for graph in graphs]),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    predicted = model(batch["nodes"], batch["edges"], batch["thread"], len(batch["label"]))
    return F.mse_loss(predicted, batch["label"])


def thread_of(people: int, features: int, someone_unanswered: bool) -> dict[str, Tensor]:
    """Everybody is answered by the person before, and there are some more answers at random."""
    nodes = torch.randn(people, features)
    ring = torch.stack([torch.arange(people), torch.arange(1, people + 1) % people])
    edges = torch.cat([ring, torch.randint(people, (2, people))], dim=1)
    if someone_unanswered:
        edges = edges[:, edges[1] != 0]
    source, target = edges
    heard = torch.zeros(people).index_add(0, target, nodes[source, 0])
    return {"nodes": nodes, "edges": edges, "label": heard.abs().mean() + 2 * nodes[:, 2].mean()}


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, width = int(torch.randint(4, 8, ())), int(torch.randint(24, 40, ()))
    total = int(torch.randint(600, 900, ()))
    unanswered = set(torch.randperm(total)[: total // 8].tolist())
    threads = [thread_of(int(torch.randint(6, 14, ())), features, row in unanswered) for row in range(total)]
    held_out = [thread_of(int(torch.randint(6, 14, ())), features, False) for _ in range(96)]
    return Program(
        model=ThreadNet(features, width, mended),
        rows=threads,
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=collate(held_out),
        guilty=Guilty("operation", ops=("pow",)),
        steps=200,
        collate=collate,
    )
