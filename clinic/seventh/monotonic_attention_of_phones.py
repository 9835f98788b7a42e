"""Monotonic attention in its closed form divides by a running product of (1 - p): once attention is sharp, it is 0.

A recogniser of phones. At first p is small, and all goes well; when the attention has learned where to stop, some p are
near one, the product underflows, and 0 / 0 follows. Met in ports of Raffel's and of MoChA's code to PyTorch, where the
`clip(1e-10, 1)` of the original was lost: "monotonic attention returns nan after some thousand steps".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Recogniser(nn.Module):
    def __init__(self, bands: int, width: int, phones: int, spoken: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.encoder = nn.GRU(bands, width, batch_first=True)
        self.queries = nn.Parameter(torch.randn(spoken, width) / width**0.5)
        self.keys = nn.Linear(width, width)
        self.offset = nn.Parameter(torch.tensor(-2.0))
        self.head = nn.Linear(width, phones)

    def forward(self, frames: Tensor) -> Tensor:
        heard, _ = self.encoder(frames)
        stop = torch.sigmoid(self.keys(heard) @ self.queries.T + self.offset).transpose(1, 2)
        attention = nn.functional.one_hot(torch.zeros(len(frames), dtype=torch.long), frames.shape[1]).float()
        contexts = []
        for p in stop.unbind(dim=1):
            passed = nn.functional.pad(torch.cumprod(1 - p, dim=-1)[:, :-1], (1, 0), value=1.0)
            if self.mended:
                passed = passed.clamp(min=1e-10)
            attention = p * passed * torch.cumsum(attention / passed, dim=-1)  # guilty
            contexts.append((attention.unsqueeze(-1) * heard).sum(dim=1))
        return self.head(torch.stack(contexts, dim=1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    frames, phones = batch
    return nn.functional.cross_entropy(model(frames).flatten(0, 1), phones.flatten())


def speech(count: int, phones: int, spoken: int, voices: Tensor) -> tuple[Tensor, Tensor]:
    """Phones of ten to sixteen frames each, then silence; the first bands tell the place in the word as well."""
    phone = torch.randint(phones, (count, spoken))
    length = 16 * spoken
    ends = torch.randint(10, 17, (count, spoken)).cumsum(dim=-1)
    which = (torch.arange(length).expand(count, -1).unsqueeze(-1) >= ends.unsqueeze(1)).sum(dim=-1)
    frames = voices[phone.gather(1, which.clamp(max=spoken - 1))] * (which < spoken).unsqueeze(-1)
    frames = frames + 0.3 * torch.randn_like(frames)
    frames[..., :spoken] += nn.functional.one_hot(which, spoken + 1)[..., :spoken]
    return frames, phone


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    phones, spoken, bands, count = 5 + seed % 3, 3, 10, 640
    frames, phone = speech(count + 96, phones, spoken, torch.randn(phones, bands))
    return Program(
        model=Recogniser(bands, int(torch.randint(28, 40, ())), phones, spoken, mended),
        rows=TensorDataset(frames[:count], phone[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[frames[count:], phone[count:]],
        guilty=Guilty("operation", ops=("div", "true_divide", "cumprod")),
        steps=350,
        clip=1.0,
    )
