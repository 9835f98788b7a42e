"""Cross-entropy by hand: softmax rounds to zero beside a logit of 1000, its log is -inf, and 0 * -inf is NaN.

allenai/allennlp#2797, "Softmax giving absolute 0 resulting in 'nan' loss value": log(softmax(...)) times the labels.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def by_hand(logits: Tensor, one_hot: Tensor) -> Tensor:
    log_probabilities = torch.log(torch.softmax(logits, dim=-1))  # guilty
    return -(one_hot * log_probabilities).sum(dim=-1).mean()


def built_in(logits: Tensor, one_hot: Tensor) -> Tensor:
    return -(one_hot * torch.log_softmax(logits, dim=-1)).sum(dim=-1).mean()


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    images, one_hot = batch
    logits = model(images)
    return built_in(logits, one_hot) if mended else by_hand(logits, one_hot)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    pixels, classes, count = 36 + seed % 13, 4 + seed % 3, 900
    prototypes = torch.rand(classes, pixels) * 255
    labels = torch.randint(classes, (count + 96,))
    # grey values as they come from the file, 0 to 255
    images = (prototypes[labels] + 60 * torch.randn(count + 96, pixels)).clamp(0, 255)
    one_hot = nn.functional.one_hot(labels, classes).float()
    width = int(torch.randint(48, 80, ()))
    model = nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, classes))
    with torch.no_grad():
        model[0].weight.normal_(0, 0.5)
        model[2].weight.normal_(0, 0.2)  # logits in the hundreds, and beyond
    return Program(
        model=model,
        rows=TensorDataset(images[:count], one_hot[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[images[count:], one_hot[count:]],
        guilty=Guilty("operation", ops=("log",)),
    )
