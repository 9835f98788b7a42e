"""Programs drawn at random whose learning rate is 5 to 200 times too high: how many end as well as with a good one?

python -m clinic rates --programs 40

Each number draws a model, an optimizer, a length and a factor. The best of a few rates in a plain loop is the
yardstick, and a program counts where that learns and the rate times the factor does not come near it in the same loop.
It is cured if it ends in the ordinary way, within a tenth of the way from the first loss to that of the yardstick.
"""

from __future__ import annotations

import argparse
import math
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import TensorDataset

from clinic import by_hand
from clinic.program import Guilty, Program
from resilient_train import Guard

NEAR, AWAY = 0.1, 0.15  # of the way: within the one it is cured, within the other a plain loop does as well
LEARNED = 0.7  # of the first loss
ROWS, TRAINED, BATCH, LETTERS, CLASSES = 1100, 960, 32, 24, 5

Loss = Callable[[nn.Module, Any], Tensor]
Made = tuple[Callable[[], nn.Module], Sequence[Tensor], Loss]


# ----------------------------------------------------------------------------------------------------------- the models


def classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def fitted(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def counted(model: nn.Module, batch: Any) -> Tensor:
    return F.poisson_nll_loss(model(batch[0]), batch[1])


def continued(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())


def encoded(model: nn.Module, batch: Any) -> Tensor:
    shown, mean, log_variance = model(batch[0])
    apart: Tensor = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
    return F.mse_loss(shown, batch[0]) + 0.01 * apart


class LanguageModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.letters, self.head = nn.Embedding(LETTERS, width), nn.Linear(width, LETTERS)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        inside = self.letters(text) + self.places[:, :length]
        return self.head(self.blocks(inside, mask=mask, is_causal=True))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(4, 24, batch_first=True), nn.Linear(24, 2)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.cell(series)[0][:, -1])  # type: ignore[no-any-return]


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.bias = nn.Embedding(60, 8), nn.Embedding(50, 8), nn.Embedding(60, 1)
        for table, spread in ((self.users, 0.3), (self.items, 0.3), (self.bias, 0.0)):
            nn.init.normal_(table.weight, std=spread)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        return (self.users(user) * self.items(item)).sum(1) + self.bias(user)[:, 0]  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 1)

        def block() -> nn.Sequential:
            return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, given: Tensor) -> Tensor:
        inside = self.first(given)
        for block in self.blocks:
            inside = inside + block(inside)
        return self.last(inside)[:, 0]  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 20))

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(given).chunk(2, 1)
        noise = torch.randn_like(mean) * (log_variance / 2).exp() if self.training else 0.0
        return self.decoder(mean + noise), mean, log_variance


def layers(*widths: int, last: int, act: type[nn.Module]) -> nn.Sequential:
    parts: list[nn.Module] = []
    for given, made in pairwise(widths):
        parts += [nn.Linear(given, made), act()]
    return nn.Sequential(*parts, nn.Linear(widths[-1], last))


def pictures(*, is_normed: bool) -> nn.Sequential:
    def convolved(given: int, made: int) -> list[nn.Module]:
        norm = nn.BatchNorm2d(made) if is_normed else nn.Identity()
        return [nn.Conv2d(given, made, 3, padding=1), norm, nn.ReLU()]

    pooled = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES)]
    return nn.Sequential(*convolved(1, 8), nn.MaxPool2d(2), *convolved(8, 16), *pooled)


def family(name: str, seed: int) -> Made:
    """A model of that kind, data for it and its loss."""
    dice = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice)

    match name:
        case "mlp":
            x, head = noise(ROWS, 12), noise(12, CLASSES)
            y = (torch.tanh(x @ noise(12, 12)) @ head + 0.3 * noise(ROWS, CLASSES)).argmax(1)
            return lambda: layers(12, 48, 48, last=CLASSES, act=nn.ReLU), (x, y), classified
        case "deep tanh":
            x = noise(ROWS, 10)
            y = torch.sin(x @ noise(10, 3) * 0.5) + 0.1 * noise(ROWS, 3)
            return lambda: layers(10, 32, 32, 32, last=3, act=nn.Tanh), (x, y), fitted
        case "linear":
            x = noise(ROWS, 20) * torch.logspace(-0.5, 0.7, 20)
            return lambda: nn.Linear(20, 1), (x, (x @ noise(20) + 0.2 * noise(ROWS))[:, None]), fitted
        case "cnn" | "cnn, norm":
            y, shapes = torch.randint(CLASSES, (ROWS,), generator=dice), noise(CLASSES, 1, 10, 10)
            x = shapes[y] + 1.2 * noise(ROWS, 1, 10, 10)
            return lambda: pictures(is_normed=name == "cnn, norm"), (x, y), classified
        case "transformer":
            follows = torch.softmax(2 * noise(LETTERS, LETTERS), 1)
            text = torch.randint(LETTERS, (ROWS, 1), generator=dice)
            for _ in range(12):
                text = torch.cat([text, torch.multinomial(follows[text[:, -1]], 1, generator=dice)], 1)
            return LanguageModel, (text,), continued
        case "gru":
            x = noise(ROWS, 12, 4)
            walked = x.cumsum(1)[:, -1]
            y = torch.stack([torch.sin(0.5 * walked[:, 0]), 0.05 * walked[:, 1] * walked[:, 2]], 1)
            return Recurrent, (x, y + 0.05 * noise(ROWS, 2)), fitted
        case "factors":
            x = torch.stack([torch.randint(count, (ROWS,), generator=dice) for count in (60, 50)], 1)
            y = (noise(60, 3)[x[:, 0]] * noise(50, 3)[x[:, 1]]).sum(1) + 0.1 * noise(ROWS)
            return Factors, (x, y), fitted
        case "residual":
            x = noise(ROWS, 8)
            return Residual, (x, torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * noise(ROWS)), fitted
        case "autoencoder":
            x = torch.tanh(noise(ROWS, 4) @ noise(4, 20)) + 0.1 * noise(ROWS, 20)
            return Autoencoder, (x,), encoded
        case "counts":
            x = noise(ROWS, 10)
            y = torch.poisson((0.3 * x @ noise(10)).clamp(max=3).exp(), generator=dice)[:, None]
            return lambda: layers(10, 24, last=1, act=nn.ReLU), (x, y), counted
    raise ValueError(name)


FAMILIES = ["mlp", "deep tanh", "linear", "cnn", "cnn, norm", "transformer", "gru", "factors", "residual"]
FAMILIES += ["autoencoder", "counts"]
Maker = Callable[[Iterable[nn.Parameter], float], Optimizer]
OPTIMIZERS: dict[str, tuple[Maker, Sequence[float]]] = {
    "SGD": (lambda weights, lr: SGD(weights, lr), (0.001, 0.01, 0.03, 0.1, 0.3)),
    "momentum": (lambda weights, lr: SGD(weights, lr, momentum=0.9), (3e-4, 0.001, 0.01, 0.03, 0.1)),
    "Adam": (lambda weights, lr: Adam(weights, lr), (0.001, 0.003, 0.01)),
    "AdamW": (lambda weights, lr: AdamW(weights, lr, weight_decay=0.05), (0.001, 0.003, 0.01)),
    "RMSprop": (lambda weights, lr: RMSprop(weights, lr), (3e-4, 0.001, 0.003, 0.01)),
    "Adagrad": (lambda weights, lr: Adagrad(weights, lr), (0.003, 0.01, 0.03, 0.1)),
}


# -------------------------------------------------------------------------------------------------------- the programs


@dataclass(frozen=True)
class Drawn:
    """One program, except for its rate."""

    seed: int
    family: str
    optimizer: str
    steps: int
    factor: float

    @classmethod
    def of(cls, seed: int) -> Drawn:
        dice = random.Random(seed)
        kind, optimizer, steps = dice.choice(FAMILIES), dice.choice([*OPTIMIZERS]), dice.choice([240, 300, 400])
        return cls(seed, kind, optimizer, steps, 10 ** dice.uniform(0.7, 2.3))

    def program(self, lr: float) -> Program:
        make, data, loss = family(self.family, self.seed)
        torch.manual_seed(self.seed)
        return Program(
            model=make(),
            rows=TensorDataset(*(one[:TRAINED] for one in data)),
            loss=loss,
            optimizer=lambda weights: OPTIMIZERS[self.optimizer][0](weights, lr),
            evaluation=[one[TRAINED:] for one in data],
            guilty=Guilty("explosion"),
            batch_size=BATCH,
            steps=self.steps,
        )

    def plain(self, lr: float) -> float:
        """The loss that a plain loop reaches."""
        program = self.program(lr)
        loss = program.evaluate(by_hand.train(program, self.seed))
        return loss if math.isfinite(loss) else math.inf

    def guarded(self, lr: float) -> tuple[float, list[Any]]:
        """The loss that the same loop reaches under a guard, and the incidents. Infinite if it gave up."""
        program = self.program(lr)
        model, optimizer = program.model, program.optimizer(program.model.parameters())
        planned = partial(Guard, data=program.rows, objective=program.loss, batch_size=BATCH, steps=self.steps)
        guard = planned(None, model, optimizer, seed=self.seed)
        try:
            for batch in guard.batches():
                guard.step(batch)
        except Exception:  # whatever ends a user's run
            return math.inf, guard.incidents
        loss = program.evaluate(model.state_dict())
        return loss if math.isfinite(loss) else math.inf, guard.incidents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=40, help="that count (default: %(default)s)")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first number that draws one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cured = counts = accused = 0
    seed = options.first
    while counts < options.programs:
        drawn, seed = Drawn.of(seed), seed + 1
        untrained = drawn.program(0.0)
        start = untrained.evaluate(untrained.model.state_dict())
        healthy, best = min((drawn.plain(lr), lr) for lr in OPTIMIZERS[drawn.optimizer][1])
        if not healthy < start - (1 - LEARNED) * abs(start):
            continue
        hot = best * drawn.factor
        if (plain := (drawn.plain(hot) - healthy) / (start - healthy)) <= AWAY:
            continue
        loss, incidents = drawn.guarded(hot)
        away, counts = (loss - healthy) / (start - healthy), counts + 1
        cured += away <= NEAR
        accused += (accuses := any(one.diagnosis.cause in ("operation", "overflow") for one in incidents))
        what = f"{drawn.family}, {drawn.optimizer}, x{drawn.factor:.0f}"
        told = f"{what:34} plain {plain:8.3g}, guarded {away:8.3g} of the way {'' if away <= NEAR else 'NOT CURED'}"
        print(f"{drawn.seed:4} {told}{' ACCUSES A LINE' * accuses}", flush=True)
    print(f"{cured} of {counts} cured; {accused} accuse a line of code, of which none is to blame")
