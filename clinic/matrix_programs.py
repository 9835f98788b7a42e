"""Small training programs for `matrix.py`: four classics, seven others, and three that look ill while they are well.

Everything is made from formulas, from the digits of scikit-learn, or from Python's own source text. A program is some
columns of data, a model, and a criterion of what the model puts out; `python -m clinic matrix --recipes` trains all
of them without a fault.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import Dataset

Columns = tuple[Tensor, ...]
Batch = Sequence[Tensor]
Optimizers = list[torch.optim.Optimizer]


class Rows(Dataset[tuple[Tensor, ...]]):
    """A data set of some columns; row by row, as a data set of a user's own would give them."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        return tuple(column[row] for column in self.columns)


@dataclass(frozen=True)
class Recipe:
    """What is trained, and which faults make sense for it."""

    about: str
    data: Callable[[], tuple[Columns, Columns]]  # to train on, and held out
    model: Callable[[], nn.Module]
    criterion: Callable[[Any, Batch], Tensor]  # of what the model puts out, and the batch
    rates: Mapping[str, float]  # the learning rate with each optimizer that fits
    steps: int
    batch_size: int = 32
    is_classic: bool = False
    has_floats: bool = True  # its inputs, the first column
    targets: str = ""  # "class" or "value": the last column
    has_norm: bool = False  # BatchNorm
    has_tensor: bool = True  # the model puts out one tensor, a row for each row


def optimizers(name: str, rate: float, model: nn.Module) -> Optimizers:
    """Build the optimizer of that name; a GAN has one for each half."""
    weights = list(model.parameters())
    if name == "two adams":
        halves = (model.get_submodule("generator"), model.get_submodule("critic"))
        return [torch.optim.Adam(half.parameters(), lr=rate, betas=(0.5, 0.99)) for half in halves]
    if name == "sgd":
        return [torch.optim.SGD(weights, lr=rate, momentum=0.9)]
    if name == "adam":
        return [torch.optim.Adam(weights, lr=rate)]
    return [torch.optim.AdamW(weights, lr=rate, weight_decay=0.01, fused=name == "adamw fused")]


# ---------------------------------------------------------------------------------------------------------------- data


def _cut(columns: Columns, held: int) -> tuple[Columns, Columns]:
    return tuple(column[held:] for column in columns), tuple(column[:held] for column in columns)


@functools.cache
def digits() -> tuple[Columns, Columns]:
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32)[order] / 16
    return _cut((images, torch.tensor(found.target)[order]), held=397)


@functools.cache
def waves() -> tuple[Columns, Columns]:
    """Sines, squares and saws with noise."""
    numbers = torch.Generator().manual_seed(1)
    rows, length = 2000, 14
    phase = torch.rand(rows, 1, generator=numbers) + torch.arange(length) * 0.11
    kind = torch.randint(3, (rows,), generator=numbers)
    shapes = torch.stack([(2 * math.pi * phase).sin(), (2 * math.pi * phase).sin().sign(), 2 * (phase % 1) - 1])
    shown = shapes[kind, torch.arange(rows)] + 0.15 * torch.randn(rows, length, generator=numbers)
    return _cut((shown[..., None], kind), held=400)


@functools.cache
def text() -> tuple[Columns, Columns]:
    """Pieces of a module of the standard library, and the characters that come next."""
    length, written = 32, inspect.getsource(argparse).encode("ascii", "replace")[:64_000]
    codes = torch.tensor([max(0, code - 31) for code in written])
    pieces = torch.stack([codes[at : at + length + 1] for at in range(0, len(codes) - length - 1, length)])
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(2))
    return _cut((pieces[order, :-1], pieces[order, 1:]), held=300)


@functools.cache
def sums() -> tuple[Columns, Columns]:
    """The adding problem: of a row of numbers, what is the sum of the two that are marked?"""
    numbers = torch.Generator().manual_seed(3)
    rows, length = 3000, 8
    values = torch.rand(rows, length, generator=numbers)
    marks = torch.zeros(rows, length)
    marks.scatter_(1, torch.rand(rows, length, generator=numbers).topk(2).indices, 1.0)
    return _cut((torch.stack([values, marks], -1), (values * marks).sum(1, keepdim=True)), held=400)


@functools.cache
def ratings() -> tuple[Columns, Columns]:
    numbers = torch.Generator().manual_seed(4)
    users, items, rank, rows = 50, 40, 3, 5000
    taste, kind = torch.randn(users, rank, generator=numbers), torch.randn(items, rank, generator=numbers)
    pairs = torch.stack([torch.randint(most, (rows,), generator=numbers) for most in (users, items)], 1)
    given = (taste[pairs[:, 0]] * kind[pairs[:, 1]]).sum(1) + 0.2 * torch.randn(rows, generator=numbers)
    return _cut((pairs, given), held=800)


@functools.cache
def surface() -> tuple[Columns, Columns]:
    numbers = torch.Generator().manual_seed(5)
    x = torch.randn(3000, 8, generator=numbers)
    y = (x[:, :4].sin().sum(1) + 0.5 * x[:, 4] * x[:, 5] + 0.1 * torch.randn(3000, generator=numbers))[:, None]
    return _cut((x, y), held=500)


@functools.cache
def inverse() -> tuple[Columns, Columns]:
    """A relation with several answers: x of y is a function, y of x is none."""
    numbers = torch.Generator().manual_seed(6)
    y = torch.rand(3000, 1, generator=numbers)
    x = y + 0.3 * (2 * math.pi * y).sin() + 0.1 * torch.randn(3000, 1, generator=numbers)
    return _cut((2 * (x - 0.5), y), held=500)


@functools.cache
def ring() -> tuple[Columns, Columns]:
    numbers = torch.Generator().manual_seed(7)
    angle = 2 * torch.pi * torch.rand(4000, generator=numbers)
    points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(4000, 2, generator=numbers)
    return _cut((points,), held=500)


@functools.cache
def contexts() -> tuple[Columns, Columns]:
    """What a bandit sees, and what each of eight arms would pay."""
    numbers = torch.Generator().manual_seed(8)
    x = torch.randn(3000, 8, generator=numbers)
    return _cut((x, (x @ torch.randn(8, 8, generator=numbers) / 3).tanh()), held=500)


# -------------------------------------------------------------------------------------------------------------- models


def mlp(wide: int = 48, outputs: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, outputs)
    )


def cnn() -> nn.Module:
    first, second = nn.BatchNorm2d(8), nn.BatchNorm2d(12)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), first, nn.ReLU()),
        *(nn.Conv2d(8, 12, 3, padding=1, stride=2, bias=False), second, nn.ReLU()),
        *(nn.Flatten(), nn.Linear(12 * 16, 10)),
    )


class Recurrent(nn.Module):
    """What a recurrent layer has in mind at the end, through a linear layer."""

    def __init__(self, layer: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0][:, -1])
        return out


class Characters(nn.Module):
    """A transformer of one block that guesses the next character."""

    def __init__(self, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(97, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 97)
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.block(self.tokens(x) + self.places, src_mask=self.mask)))
        return out


class Patches(nn.Module):
    """A transformer over the sixteen 2x2 patches of a digit."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(4, width), nn.Parameter(0.02 * torch.randn(16, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(x), 16, 4)
        out: Tensor = self.head(self.block(self.embed(patches) + self.places).mean(1))
        return out


class Variational(nn.Module):
    """A variational autoencoder of digits; when it evaluates it takes the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))
        self.decode = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64), nn.Unflatten(1, (8, 8)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp() if self.training else mean
        return self.decode(code), mean, spread


class Views(nn.Module):
    """Embeds two views of each digit: shifted by noise in training, its two halves of pixels else alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        even = torch.arange(64).view(8, 8) % 2 == 0
        return torch.stack([F.normalize(self.net(x * side), dim=1) for side in (even, ~even)], 1)


class Factors(nn.Module):
    """Matrix factorisation."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, rank), nn.Embedding(40, rank)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, pairs: Tensor) -> Tensor:
        out: Tensor = (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)
        return out


class Residual(nn.Module):
    """Two residual blocks with BatchNorm, for regression."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 1)
        layers = (nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width)) for _ in range(2))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        out: Tensor = self.last(hidden)
        return out


class Gan(nn.Module):
    """Both halves as one module, which puts out the loss of each, cut off from the weights of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
        self.critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2))
        self.critic.append(nn.Linear(48, 1))

    def forward(self, real: Tensor) -> Tensor:
        fake: Tensor = self.generator(torch.randn(len(real), 4))
        if not self.training:
            far: Tensor = (torch.linalg.vector_norm(fake, dim=1) - 1).abs().mean()
            return far
        of_critic = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        as_it_is = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        of_generator = F.softplus(-functional_call(self.critic, as_it_is, (fake,))).mean()
        both: Tensor = of_critic + of_generator
        return both


class Policy(nn.Module):
    """A policy for a bandit with eight arms."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits, or when it evaluates the probabilities, with a dimension more to tell them apart."""
        out: Tensor = self.net(x)
        return out if self.training else out.softmax(1)[None]


class Denoiser(nn.Module):
    """A curriculum: takes noise out of digits, ever more of it as training goes on."""

    def __init__(self, first: float, last: float, over: int) -> None:
        super().__init__()
        self.net = nn.Sequential(mlp(64, 64), nn.Unflatten(1, (8, 8)))
        self.first, self.last, self.over, self.step = first, last, over, 0  # the loop sets the step

    def forward(self, x: Tensor) -> Tensor:
        level = self.first + (self.last - self.first) * min(1.0, self.step / self.over) if self.training else self.first
        out: Tensor = self.net(x + level * torch.randn_like(x))
        return out


# ------------------------------------------------------------------------------------------------------------ criteria


def classify(out: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(out, batch[-1])


def next_character(out: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch[-1].flatten())


def regress(out: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(out, batch[-1])


def evidence(out: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
    shown, mean, spread = out
    far = 0.5 * (mean.square() + spread.exp() - spread - 1).sum(1).mean()
    return 10 * (shown - batch[0]).square().sum((1, 2)).mean() + 0.5 * far


def agree(out: Tensor, batch: Batch) -> Tensor:
    """Tell which two views are of the same digit, among 32."""
    left, right = out[:, 0], out[:, 1]
    parts = [
        F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))
        for a, b in zip(torch.split(left, 32), torch.split(right, 32), strict=True)
    ]
    return torch.stack(parts).mean()


def mixture(out: Tensor, batch: Batch) -> Tensor:
    weight, mean, spread = out.chunk(3, dim=1)
    each = -0.5 * ((batch[-1] - mean) / spread.exp()).square() - spread - 0.5 * math.log(2 * math.pi)
    return -(weight.log_softmax(1) + each).logsumexp(1).mean()


def as_it_is(out: Tensor, batch: Batch) -> Tensor:
    return out


def group_relative(out: Tensor, batch: Batch) -> Tensor:
    """Draw eight arms for each context and favour those that paid more than the others of their group."""
    if out.dim() == 3:
        return 1 - (out[0] * batch[-1]).sum(1).mean()
    policy = torch.distributions.Categorical(logits=out)
    arms = policy.sample((8,))  # type: ignore[no-untyped-call]
    paid = batch[-1].gather(1, arms.T).T
    advantage = (paid - paid.mean(0)) / (paid.std(0) + 1e-4)
    chances: Tensor = policy.log_prob(arms)  # type: ignore[no-untyped-call]
    return -(advantage * chances).mean()


def restore(out: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(out, batch[0])


# ------------------------------------------------------------------------------------------------------------- recipes


def _gru() -> nn.Module:
    return Recurrent(nn.GRU(1, 24, batch_first=True), 24, 3)


def _lstm() -> nn.Module:
    return Recurrent(nn.LSTM(2, 24, batch_first=True), 24, 1)


def _mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 12))


_CLASSIC: dict[str, Any] = {"is_classic": True, "targets": "class"}
RECIPES = {
    "mlp": Recipe("MLP, digits", digits, mlp, classify, {"adamw fused": 3e-3, "sgd": 0.05}, 300, **_CLASSIC),
    "cnn": Recipe("CNN, digits", digits, cnn, classify, {"sgd": 0.05, "adam": 5e-3}, 240, has_norm=True, **_CLASSIC),
    "gru": Recipe("GRU, waves", waves, _gru, classify, {"adam": 1e-2, "adamw fused": 1e-2}, 300, **_CLASSIC),
    "char": Recipe(
        *("transformer, text", text, Characters, next_character, {"adamw": 5e-3, "adam": 3e-3}, 300, 16),
        **(_CLASSIC | {"has_floats": False}),
    ),
    "vae": Recipe("VAE, digits", digits, Variational, evidence, {"adam": 4e-3}, 300, has_tensor=False),
    "adding": Recipe("LSTM, adding problem", sums, _lstm, regress, {"adam": 1e-2}, 400, targets="value"),
    "patches": Recipe("ViT, digits", digits, Patches, classify, {"adamw": 6e-3}, 340, targets="class"),
    "views": Recipe("contrastive, digits", digits, Views, agree, {"adam": 2e-3, "sgd": 0.05}, 300),
    "factors": Recipe(
        *("matrix factorisation", ratings, Factors, regress, {"adamw fused": 3e-2, "adam": 3e-2}, 300, 64),
        has_floats=False,
        targets="value",
    ),
    "residual": Recipe(
        *("ResNet, regression", surface, Residual, regress, {"adamw fused": 5e-3, "sgd": 0.02}, 300),
        targets="value",
        has_norm=True,
    ),
    "mixture": Recipe("mixture density", inverse, _mixed, mixture, {"adam": 5e-3, "adamw": 5e-3}, 360, targets="value"),
}

# Runs that are well, though not as others are; held-out losses of theirs say little and are not judged.
ODD = {
    "gan": Recipe("GAN", ring, Gan, as_it_is, {"two adams": 1e-3}, 400, 64),
    "bandit": Recipe("policy gradient", contexts, Policy, group_relative, {"adam": 5e-3}, 300),
    "curriculum": Recipe(
        "curriculum, slowly", digits, lambda: Denoiser(0.3, 0.5, 300), restore, {"adamw fused": 3e-3}, 300
    ),
    "steep": Recipe("curriculum, steep", digits, lambda: Denoiser(0.2, 1.0, 300), restore, {"adam": 3e-3}, 300),
}
