"""Which early signs see an explosion before the loss does, and how often they warn for nothing.

    python benchmarks/early_signs.py [--seeds 4] [--steps 2500]

Small programs really explode: a rate that climbs or leaps, inputs that grow, a second moment that forgets slowly,
attention without a bound on its logits. The same programs run healthy too. The candidates are measured at every step,
as a check would: ratios of numbers on the device. A sign warns where it rises above its threshold, which is set on
half of the healthy runs (their largest value, and 5 % more) and judged on the other half. Each sign is tried as it is,
and as a multiple of its own recent median. The loss counts as exploded where it is not finite, or where three in a row
are above twice the usual.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIGNS = ("gradient over second moment", "update over weight", "attention logits", "share of clipped updates")
AHEAD = 5  # updates before the loss
MARGIN = 1.05  # above the largest value of the healthy runs that set a threshold
WARM_UP = 20  # updates without warnings
RECENT, LEVEL = 64, 8


class Attention(nn.Module):
    """One layer of attention over 16 places, and a head; it keeps its largest logit."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.place = nn.Parameter(torch.randn(16, width) * 0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 24)
        self.logit = torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.place
        query, key, value = self.qkv(hidden).chunk(3, -1)
        logits = query @ key.mT / math.sqrt(query.shape[-1])
        self.logit = logits.detach().abs().amax()
        mask = torch.ones(16, 16, dtype=torch.bool).tril()
        made: Tensor = self.out(hidden + logits.masked_fill(~mask, -math.inf).softmax(-1) @ value)
        return made


@dataclass(frozen=True)
class Recipe:
    """A program: how its model, batches and rates are made, and whether it explodes."""

    name: str
    model: Callable[[], nn.Module]
    task: str  # words, numbers
    rate: Callable[[int], float]
    beta2: float = 0.999
    shift: int = 0  # the update from which on the inputs are larger, 0: never
    optimizer: str = "adam"


@dataclass
class Course:
    """What a run measured, update by update."""

    losses: list[float] = field(default_factory=list)
    signs: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SIGNS})

    def exploded_at(self) -> int | None:
        """The update at which the loss shows it: not finite, or three in a row above twice what was usual."""
        for step, loss in enumerate(self.losses):
            if not math.isfinite(loss):
                return step
            if step < WARM_UP:
                continue
            before = sorted(self.losses[max(0, step - RECENT) : step - 2])
            usual = before[len(before) // 2]
            largest = max(before)
            if all(one > max(2 * usual, 1.2 * largest) for one in self.losses[step - 2 : step + 1]):
                return step - 2
        return None


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 16, 3), nn.GELU(), nn.BatchNorm1d(16)),
        *(nn.Conv1d(16, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(192, 1)),
    )


def leap(low: float, times: float, at: int) -> Callable[[int], float]:
    return lambda step: low * (times if step >= at else 1.0)


def climb(low: float, doubling: int, after: int) -> Callable[[int], float]:
    return lambda step: low * 2.0 ** (max(0, step - after) / doubling)


def constant(rate: float) -> Callable[[int], float]:
    return lambda step: rate * min(1.0, (step + 1) / 20)


HEALTHY = [
    Recipe("mlp, adam", mlp, "numbers", constant(1e-3)),
    Recipe("mlp, sgd", mlp, "numbers", constant(1e-2), optimizer="sgd"),
    Recipe("convolutions, adam", convolutions, "numbers", constant(1e-3)),
    Recipe("attention, adam", Attention, "words", constant(3e-3)),
    Recipe("attention, adam, beta2 0.95", Attention, "words", constant(1e-3), beta2=0.95),
]
EXPLODING = [
    Recipe("mlp, rate climbs", mlp, "numbers", climb(1e-3, 15, 100)),
    Recipe("mlp, rate leaps", mlp, "numbers", leap(1e-3, 300, 150)),
    Recipe("mlp, sgd, rate climbs", mlp, "numbers", climb(1e-2, 20, 100), optimizer="sgd"),
    Recipe("mlp, inputs grow", mlp, "numbers", constant(3e-3), shift=150),
    Recipe("convolutions, rate climbs", convolutions, "numbers", climb(1e-3, 15, 100)),
    Recipe("attention, rate climbs", Attention, "words", climb(3e-3, 20, 100)),
    Recipe("attention, rate leaps", Attention, "words", leap(1e-3, 100, 150)),
    Recipe("attention, beta2 0.9999, inputs change", Attention, "words", climb(3e-3, 40, 60), beta2=0.9999),
]


def batches(recipe: Recipe, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    made, step = torch.Generator().manual_seed(seed + 10_000), 0
    plan = torch.randn(16, generator=made)
    while True:
        if recipe.task == "words":
            start = torch.randint(0, 24, (16, 1), generator=made)
            tokens = (start + torch.arange(17) * torch.randint(1, 4, (16, 1), generator=made)) % 24
            yield tokens[:, :-1], tokens[:, 1:]
        else:
            inputs = torch.randn(32, 16, generator=made)
            noise = 0.1 * torch.randn(32, generator=made)
            if recipe.shift and step >= recipe.shift:
                inputs = inputs * 1.3 ** min(60, step - recipe.shift)
            yield inputs, (inputs @ plan).sin() + noise
        step += 1


def course(recipe: Recipe, seed: int, steps: int) -> Course:
    """Run a recipe and measure the signs: all of them from numbers that a device has after the update."""
    torch.manual_seed(seed)
    model, seen = recipe.model(), Course()
    weights = [*model.parameters()]
    if recipe.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, recipe.beta2))
    else:
        optimizer = torch.optim.SGD(weights, lr=1e-2, momentum=0.9)
    clipped = 0.0
    for step, (inputs, targets) in zip(range(steps), batches(recipe, seed), strict=False):
        made = model(inputs)
        loss = (
            F.cross_entropy(made.flatten(0, 1), targets.flatten())
            if recipe.task == "words"
            else ((made.squeeze(-1) - targets).square().mean())
        )
        optimizer.zero_grad()
        loss.backward()
        seen.losses.append(float(loss.detach()))
        if not math.isfinite(seen.losses[-1]):
            break
        grads = [weight.grad for weight in weights if weight.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        clipped = 0.95 * clipped + 0.05 * float(norm > 1.0)
        ratio = 0.0
        for weight, grad in zip(weights, grads, strict=True):
            moment = optimizer.state[weight].get("exp_avg_sq") if weight in optimizer.state else None
            if moment is not None:
                corrected = moment.mean() / (1 - recipe.beta2**step)
                ratio = max(ratio, float(grad.square().mean() / (corrected + 1e-20)))
        before = [weight.detach().clone() for weight in weights]
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        optimizer.step()
        sizes = [
            float((weight.detach() - old).square().mean().sqrt() / (old.square().mean().sqrt() + 1e-3))
            for weight, old in zip(weights, before, strict=True)
        ]
        logit = float(model.logit) if isinstance(model, Attention) else 0.0
        for name, value in zip(SIGNS, (ratio, max(sizes), logit, clipped), strict=True):
            seen.signs[name].append(value)
        if step > WARM_UP and seen.losses[-1] > 1e6:
            break
    return seen


def relative(values: list[float]) -> list[float]:
    """A sign in multiples of its own recent median: what is usual differs between programs by orders of magnitude."""
    found = []
    for step, value in enumerate(values):
        before = sorted(values[max(0, step - RECENT) : max(0, step - LEVEL)])
        usual = before[len(before) // 2] if len(before) >= LEVEL else None
        found.append(value / usual if usual else (value > 0) * 1.0)
    return found


def warnings_of(values: list[float], limit: float) -> list[int]:
    """The steps at which a sign rises above its limit."""
    above = [step for step, value in enumerate(values) if step >= WARM_UP and not value <= limit]
    return [step for step in above if step - 1 not in above]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="of every recipe")
    parser.add_argument("--steps", type=int, default=2500, help="of a healthy run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    healthy = {(one.name, seed): course(one, seed, given.steps) for one in HEALTHY for seed in range(given.seeds)}
    bad = {(one.name, seed): course(one, seed, 600) for one in EXPLODING for seed in range(given.seeds)}
    ends = {key: one.exploded_at() for key, one in bad.items()}
    exploded = {key: end for key, end in ends.items() if end is not None and end > WARM_UP + RECENT}
    odd = [key for key, one in healthy.items() if one.exploded_at() is not None]
    held_out = sum(len(one.losses) for (_, seed), one in healthy.items() if seed % 2)
    print(
        f"{len(exploded)} of {len(bad)} runs exploded; {held_out:,} healthy steps held out; exploded but healthy: {odd}"
    )
    print("| sign | threshold | false alarms in 100,000 | seen 5 updates or more before | median lead | by recipe |")
    print("|---|---|---|---|---|---|")
    for name in SIGNS:
        for form, change in (("", list), (", times its median", relative)):
            known = {key: change(one.signs[name]) for key, one in {**healthy, **bad}.items()}
            calm = [value for key in healthy if key[1] % 2 == 0 for value in known[key][WARM_UP:]]
            limit = MARGIN * max(calm)
            false = sum(len(warnings_of(known[key], limit)) for key in healthy if key[1] % 2)
            leads: dict[str, list[int]] = {}
            for key, end in exploded.items():
                before = [step for step in warnings_of(known[key], limit) if step <= end]
                leads.setdefault(key[0], []).append(end - before[0] if before else -1)
            every = sorted(lead for some in leads.values() for lead in some)
            seen = sum(lead >= AHEAD for lead in every)
            middle = every[len(every) // 2] if every else -1
            each = ", ".join(
                f"{recipe} {sum(one >= AHEAD for one in some)}/{len(some)}" for recipe, some in leads.items()
            )
            rate = false / held_out * 1e5 if held_out else math.nan
            print(
                f"| {name}{form} | {limit:.3g} | {rate:.1f} | {seen} of {len(every)} | {middle} | {each} |", flush=True
            )


if __name__ == "__main__":
    main()
