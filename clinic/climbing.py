"""Runs that learn first and are ruined slowly, by their recipe or their data: ten programs, with and without a guard.

    python -m clinic climbing [--seeds N] [--only NAME] [--jobs 2] [--out FILE.jsonl] [--tree DIR]

The loss falls first, and climbs afterwards. The column `cure` says what would help: `rate` where a lower rate does,
`none` where nothing that is done to the run from outside can, so that the honest end is "not recovered", and `recipe`
in between. The measure is a held-out loss, compared with the one of the same run without the cause.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LambdaLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from clinic import paired
from clinic.paired import Program, Record


@dataclass
class Work:
    """A run that has not begun."""

    data: TensorDataset
    held: tuple[Tensor, Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    schedule: LRScheduler | None = None
    batch_size: int = 32
    shuffle: bool = True
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    penalty: Callable[[nn.Module, int], Tensor] | None = None  # a part of the loss that depends on the step
    turn: Callable[[int], None] | None = None  # what the loop itself does before each update
    step: int = 0
    losses: list[float] = field(default_factory=list)

    def objective(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the loss."""
        loss = self.criterion(model(batch[0]), batch[1])
        return loss if self.penalty is None else loss + self.penalty(model, self.step)

    def begin(self, step: int) -> None:
        """Do what comes before an update."""
        self.step = step
        if self.turn:
            self.turn(step)

    @torch.no_grad()
    def level(self) -> float:
        """Measure the model on the rows that are held out, without the penalty."""
        self.model.eval()
        return float(self.criterion(self.model(self.held[0]), self.held[1]))


def fit(work: Work, guard: dict[str, Any] | None, hands_over: bool) -> float:
    """Train, and measure; with a guard either by its `step`, or by handing the loss over."""
    model, optimizer, schedule = work.model, work.optimizer, work.schedule
    model.train()
    loader = DataLoader(work.data, batch_size=work.batch_size, shuffle=work.shuffle)
    if guard is None:
        while work.step < work.steps:
            for batch in loader:
                work.begin(work.step)
                loss = work.objective(model, batch)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if schedule:
                    schedule.step()
                work.losses.append(loss.item())
                work.step += 1
                if work.step == work.steps:
                    break
        return work.level()

    from resilient_train import Guard

    kept: dict[str, Any] = {"steps": work.steps, "schedule": schedule, **guard}
    if work.shuffle:
        kept |= {"data": work.data, "batch_size": work.batch_size}
    else:
        kept["data"] = loader
    try:
        if hands_over:
            watch = Guard(None, model, optimizer, **kept)
            for batch in watch.batches():
                work.begin(watch.attempted_step)
                loss = work.objective(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                watch.update(loss)
        else:
            watch = Guard(None, model, optimizer, objective=work.objective, **kept)
            for batch in watch.batches():
                work.begin(watch.attempted_step)
                watch.step(batch)
        watch.close()
    except Exception as error:
        error.__dict__["measure"] = work.level()
        raise
    return work.level()


# Models and data.


def fresh(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Load the digits of scikit-learn, and hold out a quarter of them."""
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    features, label = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    order = torch.randperm(len(label), generator=fresh(0))
    held, kept = order[:450], order[450:]
    return TensorDataset(features[kept], label[kept]), (features[held], label[held])


def blobs(seed: int, rows: int, spread: float = 1.0) -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Make eight classes that overlap a little."""
    centers = 1.5 * torch.randn(8, 12, generator=fresh(4))

    def draw(number: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        label = torch.randint(8, (number,), generator=numbers)
        return centers[label] + spread * torch.randn(number, 12, generator=numbers), label

    return TensorDataset(*draw(rows, fresh(1000 + seed))), draw(1000, fresh(1))


def waves(seed: int) -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Make a regression of eight columns, with a little noise."""

    def draw(number: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(number, 8, generator=numbers)
        y = x.sin().sum(1, keepdim=True) + x[:, :1] * x[:, 1:2]
        return x, y + 0.1 * torch.randn(number, 1, generator=numbers)

    return TensorDataset(*draw(2000, fresh(1000 + seed))), draw(1000, fresh(1))


def mlp(inputs: int, outputs: int, hidden: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 10),
    )


# Programs: each gives the run with its cause, or without.


def warmup(seed: int, sick: bool) -> Work:
    """A warm-up by powers, over 250 updates from 0.001 to 0.3, where 0.003 was meant; Adam on digits."""
    data, held = digits()
    model = conv()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = LambdaLR(optimizer, lambda step: (300.0 if sick else 3.0) ** min(1.0, step / 250))
    return Work(data, held, model, optimizer, 600, schedule)


def growing_rate(seed: int, sick: bool) -> Work:
    """A rate that grows by 1 % an update, where it should fall."""
    data, held = waves(seed)
    model = mlp(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = ExponentialLR(optimizer, gamma=1.01 if sick else 0.997)
    return Work(data, held, model, optimizer, 700, schedule, criterion=F.mse_loss)


def growing_decay(seed: int, sick: bool) -> Work:
    """A weight decay that the loop raises by 1.3 % an update, from 0.01 on."""
    data, held = blobs(seed, 3000)
    model = mlp(12, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def turn(step: int) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * 1.013**step

    return Work(data, held, model, optimizer, 700, turn=turn if sick else None)


def wrong_unit(seed: int, sick: bool) -> Work:
    """A rate that grows with the epochs, as large batches would allow, but counts updates."""
    data, held = digits()
    model = mlp(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda step: 1 + 0.04 * (step if sick else step // 42))
    return Work(data, held, model, optimizer, 800, schedule)


def momentum(seed: int, sick: bool) -> Work:
    """A momentum of 0.999, where 0.9 was meant."""
    data, held = waves(seed)
    model = mlp(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3 if sick else 2e-2, momentum=0.999 if sick else 0.9)
    return Work(data, held, model, optimizer, 600, criterion=F.mse_loss)


def cyclic(seed: int, sick: bool) -> Work:
    """A cyclic rate with a peak of 0.6, where 0.1 was meant; the first climb takes 400 updates."""
    data, held = blobs(seed, 3000)
    model = mlp(12, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule = CyclicLR(optimizer, 1e-2, 0.6 if sick else 0.1, step_size_up=400, cycle_momentum=False)
    return Work(data, held, model, optimizer, 500, schedule)


def growing_penalty(seed: int, sick: bool) -> Work:
    """A penalty on the weights, of which each update makes 1.5 % more by a bug."""
    data, held = waves(seed)
    model = mlp(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def penalty(model: nn.Module, step: int) -> Tensor:
        total = torch.stack([weight.abs().sum() for weight in model.parameters()]).sum()
        return total * 1e-5 * (1.015**step if sick else 1.0)

    return Work(data, held, model, optimizer, 700, criterion=F.mse_loss, penalty=penalty)


class Angles(nn.Module):
    """Compares with a prototype of each class by the angle, divided by a temperature."""

    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(12, 16)
        self.prototypes = nn.Parameter(torch.randn(8, 16))
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        likeness = F.normalize(self.body(x), dim=-1) @ F.normalize(self.prototypes, dim=-1).T
        return likeness / self.temperature


def temperature(seed: int, sick: bool) -> Work:
    """A temperature that the loop anneals to 0.001, where 0.1 was meant."""
    data, held = blobs(seed, 3000, spread=2.0)
    model = Angles()

    def turn(step: int) -> None:
        model.temperature.fill_(max(0.985**step, 0.001 if sick else 0.1))

    return Work(data, held, model, torch.optim.Adam(model.parameters(), lr=5e-3), 600, turn=turn)


def rotten_rows(seed: int, sick: bool) -> Work:
    """A file read in its order, of which the second half was joined with the wrong column: more and more labels."""
    data, held = blobs(seed, 20000)
    x, y = data.tensors
    if sick:
        numbers = fresh(2000 + seed)
        share = ((torch.arange(len(y)) - 6000) / 6000).clamp(0, 1)
        wrong = torch.rand(len(y), generator=numbers) < share
        y = torch.where(wrong, torch.randint(8, y.shape, generator=numbers), y)
    model = mlp(12, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Work(TensorDataset(x, y), held, model, optimizer, 600, shuffle=False)


class Centered(nn.Module):
    """Subtracts a running mean; the drifting one adds to it where it should average."""

    running: Tensor

    def __init__(self, features: int, drifts: bool) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(features))
        self.drifts = drifts

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().mean(0)
            self.running = self.running + 0.02 * (mean if self.drifts else mean - self.running)
        return x - self.running


def drifting_norm(seed: int, sick: bool) -> Work:
    """A running mean that is a sum: it drifts away from what it should center."""
    data, held = digits()
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Softplus(), Centered(64, sick), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    return Work(data, held, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 700)


FAMILIES: dict[str, tuple[Callable[[int, bool], Work], str]] = {
    "warmup": (warmup, "rate"),
    "growing_rate": (growing_rate, "rate"),
    "growing_decay": (growing_decay, "recipe"),
    "wrong_unit": (wrong_unit, "recipe"),
    "momentum": (momentum, "recipe"),
    "growing_penalty": (growing_penalty, "none"),
    "cyclic": (cyclic, "recipe"),
    "rotten_rows": (rotten_rows, "none"),
    "temperature": (temperature, "recipe"),
    "drifting_norm": (drifting_norm, "none"),
}


def healthy(name: str, seed: int) -> float:
    """Measure the same run without its cause."""
    torch.manual_seed(seed)
    return fit(FAMILIES[name][0](seed, False), None, False)


def programs() -> list[Program]:
    """List the programs; every second one hands its loss over."""

    def program(name: str, hands_over: bool) -> Program:
        def train(seed: int, guard: dict[str, Any] | None = None) -> tuple[float, float]:
            torch.manual_seed(seed)
            return fit(FAMILIES[name][0](seed, True), guard, hands_over), healthy(name, seed)

        return Program(name, train)

    # Those that depend on the step hand their loss over: an objective has to give the same when it is called again.
    return [program(name, place % 2 == 0 or name == "growing_penalty") for place, name in enumerate(FAMILIES)]


# The table.


def claims(record: Record) -> bool:
    """Tell whether a run claims to be sound: all is well, or recovered."""
    return not record["error"] and (record["summary"] or {}).get("verdict") in ("well", "recovered")


def said(record: Record) -> str:
    """Write what a run said about itself: its verdict, and how many incidents it met."""
    return f"{(record['summary'] or {}).get('verdict')} ({len(record['incidents'])})"


def table(records: list[Record]) -> str:
    """Write a row for each program."""
    lines = [
        "| program | cure | healthy | plain | guarded | ended | said | within 10 % of healthy | false claims |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    totals = [0, 0, 0]
    for name in dict.fromkeys(record["program"] for record in records):
        plain = {r["seed"]: r for r in records if r["program"] == name and r["arm"] == "plain"}
        guarded = [r for r in records if r["program"] == name and r["arm"] == "guarded"]
        best = {seed: r["best"] for seed, r in plain.items() if r["best"] is not None}
        best |= {r["seed"]: r["best"] for r in guarded if r["best"] is not None}
        near = false = 0
        for record in guarded:
            goal, ruined = best.get(record["seed"]), plain.get(record["seed"])
            if goal is None:
                continue
            near += paired.level(record) <= goal + 0.1 * abs(goal)
            # Where the plain run is not finite, twice the healthy level counts as ruined.
            end = ruined["measure"] if ruined and ruined["measure"] is not None else goal + 2 * abs(goal)
            false += claims(record) and paired.level(record) > (goal + end) / 2
        totals = [total + more for total, more in zip(totals, (len(guarded), near, false), strict=True)]
        level = f"{statistics.median(best.values()):.3g}" if best else ""
        said_by = paired.counted([said(record) for record in guarded])
        cells = [name, FAMILIES[name][1], level, paired.span(list(plain.values())), paired.span(guarded)]
        cells += [paired.counted(paired.ended(guarded)), said_by, f"{near} of {len(guarded)}", str(false)]
        lines.append("| " + " | ".join(cells) + " |")
    total = ["all", "", "", "", f"{totals[0]} runs", "", "", str(totals[1]), str(totals[2])]
    return "\n".join([*lines, "| " + " | ".join(total) + " |"])


def main() -> None:
    """Run what the command line asks for."""
    files = dict.fromkeys(FAMILIES, Path(__file__))
    paired.main("Runs that are ruined slowly.", files, table, seeds=6, preload=["sklearn.datasets"])
