"""Which damage to weights and moments the scans find, how soon, and how often they cry wolf.

Small real recipes are trained as the guard trains them: a scan is launched between backward and update, and judged an
update later. Each fault is drawn by seed (what, in which recipe, tensor, place, after which update), put into the
live run, and counted as found if the scans alone report something before it has cost more than 20 updates. The losses
are not watched here: in a run a NaN is found by them at once.

    python -m clinic state
    python -m clinic state --faults 400 --seed 7 --healthy-steps 2000
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from resilient_train.core.loss import Every
from resilient_train.extensions.scans.layout import Layout
from resilient_train.extensions.scans.scans import Scans
from resilient_train.extensions.scans.weights import NormsConfig, ScanConfig
from resilient_train.ground.types import Anomaly
from resilient_train.ground.wording import say
from resilient_train.zoo.data import digits
from resilient_train.zoo.models import GPT

ALLOWED = 20  # updates that a fault may cost
FIRST, LAST = 60, 360  # the updates between which faults happen
SNAPSHOT_EVERY = 50

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


# ------------------------------------------------------------------------------------------------------------- recipes


@dataclass
class Recipe:
    """Something to train: how it is made, and how fast it learns after each update."""

    name: str
    build: Callable[[], tuple[nn.Module, list[Optimizer]]]
    batch: Callable[[torch.Generator], Batch]
    loss: Loss
    rate: Callable[[int], float] = lambda step: min(1.0, (step + 1) / 20)


_DIGITS = digits("train")
_X, _Y = (torch.stack([row[column] for row in _DIGITS]) for column in (0, 1))  # type: ignore[attr-defined]
_CHAIN = torch.softmax(4 * torch.randn(32, 32, generator=torch.Generator().manual_seed(1)), dim=1)


def digit_batch(rng: torch.Generator) -> Batch:
    rows = torch.randint(len(_X), (32,), generator=rng)
    return _X[rows], _Y[rows]


def token_batch(rng: torch.Generator) -> Batch:
    """Text of a random language with 32 letters, in which each depends on the one before."""
    text = torch.randint(32, (8, 1), generator=rng)
    for _ in range(32):
        text = torch.cat([text, torch.multinomial(_CHAIN[text[:, -1]], 1, generator=rng)], dim=1)
    return text[:, :-1], text[:, 1:]


def series_batch(rng: torch.Generator) -> Batch:
    """Noisy waves, of which the next value is wanted."""
    pace, start = torch.rand(16, 1, generator=rng) + 0.2, 6 * torch.rand(16, 1, generator=rng)
    wave = torch.sin(start + pace * torch.arange(25)) + 0.1 * torch.randn(16, 25, generator=rng)
    return wave[:, :-1, None], wave[:, 1:, None]


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def predict_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def regress(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 48, 2, batch_first=True), nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0])
        return y


def play(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch[0])
    return loss


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48), nn.GELU(), nn.Linear(48, 10))


def cnn() -> nn.Module:
    blocks: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for wide, wider in ((1, 12), (12, 24)):
        blocks += [nn.Conv2d(wide, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(nn.Flatten(), *blocks, nn.Flatten(), nn.Linear(96, 10))


def gpt() -> nn.Module:
    return GPT(vocab_size=32, context=32, layers=2, heads=2, width=48)


def one(make: Callable[[], nn.Module], optimizer: Callable[..., Optimizer], **settings: Any) -> Any:
    def build() -> tuple[nn.Module, list[Optimizer]]:
        model = make()
        return model, [optimizer(model.parameters(), **settings)]

    return build


def muon_and_adamw() -> tuple[nn.Module, list[Optimizer]]:
    model = gpt()
    flat = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "block" in name]
    rest = [weight for weight in model.parameters() if all(weight is not other for other in flat)]
    return model, [torch.optim.Muon(flat, lr=5e-3), torch.optim.AdamW(rest, lr=2e-3, fused=True)]


class Gan(nn.Module):
    """Two players whose losses are added up: the gradients of each reach only its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(8, 48), nn.LeakyReLU(0.2), nn.Linear(48, 64))
        self.judge = nn.Sequential(nn.Linear(64, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(len(x), 8)
        made, frozen = self.maker(noise), deepcopy(self.judge).requires_grad_(False)
        real, fake = self.judge(x.flatten(1)), self.judge(made.detach())
        return F.softplus(-real).mean() + F.softplus(fake).mean() + F.softplus(-frozen(made)).mean()


class Lion(Optimizer):
    """Somebody's own optimizer."""

    def __init__(self, params: Any, lr: float = 1e-3, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                mean = self.state[weight].setdefault("sum", torch.zeros_like(weight))  # torch's own are never negative
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.sub_(group["lr"] * (0.9 * mean + 0.1 * weight.grad).sign())
                mean.lerp_(weight.grad, 0.01)


def restarts(step: int) -> float:
    return float(0.5 ** (step % 100 / 15))


RECIPES = [
    Recipe(
        "GPT, AdamW fused",
        one(gpt, torch.optim.AdamW, lr=2e-3, weight_decay=0.1, fused=True),
        token_batch,
        predict_tokens,
    ),
    Recipe("MLP, Adam", one(mlp, torch.optim.Adam, lr=3e-3), digit_batch, classify),
    Recipe(
        "CNN with BatchNorm, SGD",
        one(cnn, torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True),
        digit_batch,
        classify,
    ),
    Recipe("LSTM, RMSprop", one(Waves, torch.optim.RMSprop, lr=1e-3), series_batch, regress),
    Recipe("GPT, Muon and AdamW", muon_and_adamw, token_batch, predict_tokens),
    Recipe("MLP, Lion of one's own", one(mlp, Lion, lr=5e-4), digit_batch, classify),
]

# These only have to stay silent.
QUIET = [
    Recipe("GAN, Adam", one(Gan, torch.optim.Adam, lr=2e-3, betas=(0.5, 0.9)), digit_batch, play),
    Recipe("MLP, SGD with restarts", one(mlp, torch.optim.SGD, lr=0.3), digit_batch, classify, restarts),
    Recipe(
        "GPT, AdamW with restarts",
        one(gpt, torch.optim.AdamW, lr=5e-3, betas=(0.9, 0.95)),
        token_batch,
        predict_tokens,
        restarts,
    ),
    Recipe(
        "LSTM, amsgrad",
        one(Waves, torch.optim.Adam, lr=5e-3, amsgrad=True, weight_decay=1e-4),
        series_batch,
        regress,
    ),
    Recipe("CNN, Adafactor", one(cnn, torch.optim.Adafactor, lr=0.02), digit_batch, classify),
    Recipe("CNN, Adagrad", one(cnn, torch.optim.Adagrad, lr=0.02), digit_batch, classify),
    Recipe("MLP, NAdam", one(mlp, torch.optim.NAdam, lr=3e-3), digit_batch, classify),
    Recipe("LSTM, AdamW at a huge rate", one(Waves, torch.optim.AdamW, lr=0.05), series_batch, regress),
]


# ---------------------------------------------------------------------------------------------------------- a live run


class Run:
    """A recipe in training, scanned as the guard scans it."""

    def __init__(self, recipe: Recipe, config: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.recipe, self.seed = recipe, seed
        self.model, self.optimizers = recipe.build()
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.weights = [
            one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"]
        ]
        self.scans = Scans(config, Layout(self.model, self.optimizers))
        self.step = 0
        self._flight: tuple[Any, float] | None = None

    def update(self) -> Anomaly | None:
        """Train one update, and return what a scan found in an earlier one."""
        torch.manual_seed(1_000_003 * self.seed + self.step)
        rng = torch.Generator().manual_seed(1_000_003 * self.seed + self.step)
        torch.autograd.backward(self.recipe.loss(self.model, self.recipe.batch(rng)))
        anomaly = self._hear()
        if self.scans.is_due():
            self.scans.measure(self.step)
        norm = min(float(nn.utils.clip_grad_norm_(self.weights, 1.0)), 1.0)
        settings = self._set_rates()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self._flight = settings, norm
        return anomaly

    def _hear(self) -> Anomaly | None:
        anomaly = self.scans.judge()
        if self._flight is not None:
            self.scans.landed(self.step, *self._flight)
        return anomaly

    def _set_rates(self) -> list[dict[str, float]]:
        rate = self.recipe.rate(self.step)
        settings = [[{"lr": lr * rate} for lr in rates] for rates in self.rates]
        for optimizer, mine in zip(self.optimizers, settings, strict=True):
            for group, setting in zip(optimizer.param_groups, mine, strict=True):
                group.update(setting)
        return [setting for mine in settings for setting in mine]


# -------------------------------------------------------------------------------------------------------------- faults

Fault = Callable[[Run, random.Random], str]


def one_weight(value: float) -> Fault:
    def strike(run: Run, rng: random.Random) -> str:
        weight = rng.choice(run.weights)
        place = rng.randrange(weight.numel())
        weight.data.view(-1)[place] = value
        return f"{list(weight.shape)} at {place}"

    return strike


def layer_times(factor: float) -> Fault:
    """All weights that a module has itself; a layer that is zero as yet has nothing to lose."""

    def strike(run: Run, rng: random.Random) -> str:
        modules = run.model.named_modules()
        layers = [(name, list(module.parameters(recurse=False))) for name, module in modules]
        layers = [(name, own) for name, own in layers if any(bool(weight.any()) for weight in own)]
        name, own = rng.choice(layers)
        for weight in own:
            weight.data.mul_(factor)
        return str(name)

    return strike


def squares_times(factor: float) -> Fault:
    """The second moments of one tensor, or of all."""

    def strike(run: Run, rng: random.Random) -> str:
        states = [held for optimizer in run.optimizers for held in optimizer.state.values()]
        squares = [held[key] for held in states for key in ("exp_avg_sq", "square_avg") if key in held]
        squares = [one for one in squares if bool(one.any())]
        hit = squares if rng.random() < 0.5 else [rng.choice(squares)]
        for square in hit:
            square.mul_(factor)
        return f"{len(hit)} of {len(squares)} tensors"

    return strike


FAULTS: dict[str, Fault] = {
    "one weight to 1e3": one_weight(1e3),
    "one weight to 1e10": one_weight(1e10),
    "one weight to NaN": one_weight(float("nan")),
    "a layer times 10": layer_times(10.0),
    "a layer zeroed": layer_times(0.0),
    "second moments zeroed": squares_times(0.0),
    "second moments negated": squares_times(-1.0),
    "second moments times 1e-4": squares_times(1e-4),
}


@dataclass
class Trial:
    """What became of one fault."""

    fault: str
    recipe: str
    delay: int | None  # updates that landed after it until it was reported
    told: str


def has_squares(recipe: Recipe) -> bool:
    return any(isinstance(optimizer, torch.optim.Adam | torch.optim.RMSprop) for optimizer in recipe.build()[1])


def strike(snapshots: Sequence[Run], name: str, rng: random.Random) -> Trial:
    step = rng.randint(FIRST, LAST)
    run = deepcopy(max((one for one in snapshots if one.step <= step), key=lambda one: one.step))
    while run.step < step:
        if (anomaly := run.update()) is not None:
            raise AssertionError(f"{run.recipe.name}: a false alarm before the fault: {say(anomaly.evidence, '; ')}")
    place = FAULTS[name](run, rng)
    for _ in range(2 * ALLOWED):
        if (anomaly := run.update()) is not None:
            # it is told in the middle of an update, which has not landed then
            return Trial(name, run.recipe.name, run.step - 1 - step, f"{anomaly.signal}: {say(anomaly.evidence, '; ')}")
    return Trial(name, run.recipe.name, None, f"after update {step}, {place}")


# --------------------------------------------------------------------------------------------------------------- report


def healthy(recipe: Recipe, config: Any, seed: int, steps: int) -> tuple[list[Run], list[str]]:
    """Train without a fault; keep copies to put faults in."""
    run, snapshots, alarms = Run(recipe, config, seed), [], []
    while run.step < steps:
        if run.step % SNAPSHOT_EVERY == 0 and run.step <= LAST:
            snapshots.append(deepcopy(run))
        if (anomaly := run.update()) is not None:
            alarms.append(f"{recipe.name}, step {anomaly.step}: {say(anomaly.evidence, '; ')}")
    return snapshots, alarms


def table(trials: Sequence[Trial]) -> str:
    lines = ["| fault | found | median delay, updates | worst |", "|---|---|---|---|"]
    for name in [*FAULTS, "all"]:
        mine = [trial for trial in trials if name in (trial.fault, "all")]
        delays = [trial.delay for trial in mine if trial.delay is not None]
        found = sum(delay <= ALLOWED for delay in delays)
        median, worst = (f"{statistics.median(delays):.0f}", f"{max(delays)}") if delays else ("", "")
        lines.append(f"| {name} | {found} of {len(mine)} | {median} | {worst} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=10, help="updates between two scans")
    parser.add_argument("--healthy-steps", type=int, default=600, help="of each recipe")
    parser.add_argument("--verbose", action="store_true", help="tell what became of each fault")
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = SimpleNamespace(
        weights=ScanConfig(given.every, margin=1.05),
        optimizer=ScanConfig(given.every, margin=1.05),
        replicas=Every(0),
        norms=NormsConfig(0, factor=1000.0),
        expect=(),
    )
    ready: dict[str, list[Run]] = {}
    alarms: list[str] = []
    for recipe in [*RECIPES, *QUIET]:
        ready[recipe.name], false = healthy(recipe, config, given.seed, given.healthy_steps)
        alarms += false
    trials = []
    for number in range(given.faults):
        rng = random.Random(1_000_003 * given.seed + number)
        name = list(FAULTS)[number % len(FAULTS)]
        fit = [one for one in RECIPES if "moments" not in name or has_squares(one)]
        trials.append(strike(ready[rng.choice(fit).name], name, rng))
        if given.verbose or trials[-1].delay is None:
            print(f"{trials[-1].fault}, {trials[-1].recipe}: {trials[-1].delay}: {trials[-1].told}")
    recipes = len(RECIPES) + len(QUIET)
    print(table(trials))
    print(f"\nfalse alarms: {len(alarms)} in {given.healthy_steps * recipes} healthy steps of {recipes} recipes")
    for alarm in alarms:
        print(f"- {alarm}")
