"""Healthy runs whose numbers are noisy by nature: 25 programs, 12 seeds each, with and without a guard.

    python -m clinic noisy [--seeds N] [--only NAME] [--jobs 2] [--out FILE.jsonl] [--tree DIR]

Small batches, skewed and heavy-tailed targets, wrong labels, rare classes, short schedules. Nothing is wrong with any
of them, so a guard should leave them alone. The measure is a loss on rows that are held out, the same for all seeds.
Where the data are synthetic, most of their noise is not in it, and the rows for training differ by the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from clinic import paired
from clinic.paired import Program

Objective = Callable[[nn.Module, Any], Tensor]


@dataclass
class Work:
    """Data, a model and its loss; what is measured is the loss on `held`, or `measure` of the model."""

    data: TensorDataset
    held: tuple[Tensor, ...]
    model: nn.Module
    objective: Objective
    measure: Callable[[nn.Module], float] | None = None

    @torch.no_grad()
    def level(self) -> float:
        """Measure the model on the rows that are held out."""
        self.model.eval()
        return self.measure(self.model) if self.measure else float(self.objective(self.model, self.held))


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: the conditions of a program."""

    batch_size: int
    optimizer: str
    lr: float
    schedule: str = "constant"
    steps: int = 400
    options: tuple[float, ...] = ()  # for the family: how skewed, how many wrong labels

    def build(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        """Make the optimizer and its schedule."""
        weights = model.parameters()
        optimizer: torch.optim.Optimizer
        if self.optimizer == "momentum":
            optimizer = torch.optim.SGD(weights, lr=self.lr, momentum=0.9)
        else:
            optimizer = getattr(torch.optim, self.optimizer)(weights, lr=self.lr)
        if self.schedule == "one cycle":
            return optimizer, OneCycleLR(optimizer, max_lr=self.lr, total_steps=self.steps)
        if self.schedule == "warm-up":
            return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
        return optimizer, None


def fit(work: Work, recipe: Recipe, guard: dict[str, Any] | None, hands_over: bool) -> float:
    """Train, and measure; with a guard either by its `step`, or by handing the loss over."""
    model = work.model
    optimizer, schedule = recipe.build(model)
    model.train()
    if guard is None:
        loader = DataLoader(work.data, batch_size=recipe.batch_size, shuffle=True)
        done = 0
        while done < recipe.steps:
            for batch in loader:
                optimizer.zero_grad()
                work.objective(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if schedule:
                    schedule.step()
                done += 1
                if done == recipe.steps:
                    break
        return work.level()

    from resilient_train import Guard

    kept = {"data": work.data, "batch_size": recipe.batch_size, "steps": recipe.steps, "schedule": schedule, **guard}
    try:
        if hands_over:
            watch = Guard(None, model, optimizer, **kept)
            for batch in watch.batches():
                loss = work.objective(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                watch.update(loss)
        else:
            watch = Guard(None, model, optimizer, objective=work.objective, **kept)
            for batch in watch.batches():
                watch.step(batch)
        watch.close()
    except Exception as error:
        error.__dict__["measure"] = work.level()
        raise
    return work.level()


# Losses.


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def huber(model: nn.Module, batch: Any) -> Tensor:
    return F.huber_loss(model(batch[0]).squeeze(-1), batch[1])


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def binary(model: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(-1), batch[1])


def poisson(model: nn.Module, batch: Any) -> Tensor:
    return F.poisson_nll_loss(model(batch[0]).squeeze(-1), batch[1])


def exponential(model: nn.Module, batch: Any) -> Tensor:
    """Negative log-likelihood of waiting times, of which the model gives the logarithm of the rate."""
    log_rate: Tensor = model(batch[0]).squeeze(-1)
    loss: Tensor = log_rate.exp() * batch[1] - log_rate
    return loss.mean()


def gaussian(model: nn.Module, batch: Any) -> Tensor:
    """Mean and variance are both learned."""
    mean, log_variance = model(batch[0]).chunk(2, dim=-1)
    return F.gaussian_nll_loss(mean.squeeze(-1), batch[1], log_variance.squeeze(-1).exp())


# Models and data.


def mlp(inputs: int, outputs: int = 1, hidden: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class Sequences(nn.Module):
    """A GRU with an output after each token, or after the last one."""

    def __init__(self, tokens: int, outputs: int, every: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, 16) if tokens else nn.Linear(2, 16)
        self.gru = nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, outputs)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        states = self.gru(self.embed(x))[0]
        return self.out(states).transpose(1, 2) if self.every else self.out(states[:, -1])  # type: ignore[no-any-return]


class Factors(nn.Module):
    """Users and films, each a vector and a bias."""

    def __init__(self, users: int, films: int) -> None:
        super().__init__()
        self.user, self.film = nn.Embedding(users, 8), nn.Embedding(films, 8)
        self.user_bias, self.film_bias = nn.Embedding(users, 1), nn.Embedding(films, 1)
        for table in (self.user, self.film):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pair: Tensor) -> Tensor:
        user, film = pair.unbind(-1)
        dot = (self.user(user) * self.film(film)).sum(-1, keepdim=True)
        return dot + self.user_bias(user) + self.film_bias(film)  # type: ignore[no-any-return]


def fresh(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(name: str) -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Load a table that comes with scikit-learn, standardized, and hold out a quarter of its rows."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    features = torch.tensor(x, dtype=torch.float32)
    if name == "digits":
        features = features / 16
    else:
        features = (features - features.mean(0)) / features.std(0)
    target = torch.tensor(y, dtype=torch.int64 if name in ("digits", "wine") else torch.float32)
    order = torch.randperm(len(features), generator=fresh(0))
    held, kept = order[: len(order) // 4], order[len(order) // 4 :]
    return TensorDataset(features[kept], target[kept]), (features[held], target[held])


def wrong_labels(data: TensorDataset, share: float, classes: int, seed: int) -> TensorDataset:
    """Replace the labels of a share of the rows by random ones."""
    x, y = data.tensors
    numbers = fresh(seed)
    chosen = torch.rand(len(y), generator=numbers) < share
    random = torch.randint(classes, y.shape, generator=numbers).to(y.dtype)
    return TensorDataset(x, torch.where(chosen, random, y))


def curve(x: Tensor) -> Tensor:
    """What the synthetic tables hide: a smooth function of six of eight columns."""
    return x[:, 0].sin() + 0.5 * x[:, 1] * x[:, 2].tanh() + 0.4 * x[:, 3] - 0.3 * x[:, 4].abs() + 0.2 * x[:, 5]


def synthetic(seed: int, draw: Callable[[Tensor, torch.Generator], Tensor]) -> tuple[TensorDataset, Tensor]:
    """Make 2,000 rows for training, and the inputs of 1,000 that are held out."""
    numbers = fresh(1000 + seed)
    x = torch.randn(2000, 8, generator=numbers)
    return TensorDataset(x, draw(x, numbers)), torch.randn(1000, 8, generator=fresh(1))


# Families: each makes data and a model from the seed and the options of the recipe.


def diabetes(seed: int, scale: float, objective: Objective = squared) -> Work:
    data, held = table("diabetes")
    x, y = data.tensors  # as it is, from 25 to 346, or standardized
    shift, width = (0.0, 1.0) if scale else (float(y.mean()), float(y.std()))
    data, held = TensorDataset(x, (y - shift) / width), (held[0], (held[1] - shift) / width)
    return Work(data, held, mlp(10), objective)


def diabetes_huber(seed: int) -> Work:
    return diabetes(seed, 0, huber)


def lognormal(seed: int, sigma: float) -> Work:
    data, x = synthetic(seed, lambda x, g: (curve(x) + sigma * torch.randn(len(x), generator=g)).exp())
    return Work(data, (x, (curve(x) + sigma**2 / 2).exp()), mlp(8), squared)


def heavy_tails(seed: int, freedom: float) -> Work:
    def draw(x: Tensor, numbers: torch.Generator) -> Tensor:
        normal = torch.randn(len(x), 1 + int(freedom), generator=numbers)  # Student's t
        return curve(x) + normal[:, 0] / normal[:, 1:].square().mean(1).sqrt()

    data, x = synthetic(seed, draw)
    return Work(data, (x, curve(x)), mlp(8), squared)


def counts(seed: int) -> Work:
    data, x = synthetic(seed, lambda x, g: torch.poisson((curve(x) + 0.5).exp(), generator=g))
    return Work(data, (x, (curve(x) + 0.5).exp()), mlp(8), poisson)


def shop_counts(seed: int) -> Work:
    """Sales a day by shop: counts whose mean is known by an embedding only."""
    level = torch.randn(40, generator=fresh(2)) * 1.2 + 1
    numbers = fresh(1000 + seed)
    shop = torch.randint(40, (2000,), generator=numbers)
    data = TensorDataset(shop, torch.poisson(level[shop].exp(), generator=numbers))
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 1))
    return Work(data, (torch.arange(40), level.exp()), model, poisson)


def waiting(seed: int) -> Work:
    def draw(x: Tensor, numbers: torch.Generator) -> Tensor:
        return torch.empty(len(x)).exponential_(generator=numbers) * (-curve(x)).exp()

    data, x = synthetic(seed, draw)
    return Work(data, (x, (-curve(x)).exp()), mlp(8), exponential)


def uneven(seed: int) -> Work:
    """Noise that depends on the inputs."""

    def draw(x: Tensor, numbers: torch.Generator) -> Tensor:
        return curve(x) + (0.7 * x[:, 6] - 1).exp() * torch.randn(len(x), generator=numbers)

    data, x = synthetic(seed, draw)
    return Work(data, (x, draw(x, fresh(3))), mlp(8, 2), gaussian)


def cancer(seed: int, share: float) -> Work:
    data, held = table("breast_cancer")
    return Work(wrong_labels(data, share, 2, seed), held, mlp(30), binary)


def wine(seed: int) -> Work:
    data, held = table("wine")
    return Work(data, held, mlp(13, 3), cross_entropy)


def digits(seed: int, share: float, convolves: float) -> Work:
    data, held = table("digits")
    model = mlp(64, 10, 64)
    if convolves:
        model = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )
    return Work(wrong_labels(data, share, 10, seed), held, model, cross_entropy)


def rare(seed: int) -> Work:
    """Three of a hundred rows are positive, and weigh thirty times as much."""
    data, x = synthetic(seed, lambda x, g: (curve(x) + 0.5 * torch.randn(len(x), generator=g) > 2.2).float())

    def weighted(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0]).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, batch[1], pos_weight=torch.tensor(30.0))

    return Work(data, (x, (curve(x) > 2.2).float()), mlp(8), weighted)


def long_tail(seed: int) -> Work:
    """Ten classes, of which the first has half of the rows, the second a quarter, and so on."""
    centers = 1.2 * torch.randn(10, 8, generator=fresh(4))

    def draw(number: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        label = torch.multinomial(0.5 ** torch.arange(10.0), number, replacement=True, generator=numbers)
        return centers[label] + torch.randn(number, 8, generator=numbers), label

    return Work(TensorDataset(*draw(2000, fresh(1000 + seed))), draw(1000, fresh(1)), mlp(8, 10), cross_entropy)


def adding(seed: int) -> Work:
    """The sum of two marked numbers of a sequence of ten."""

    def draw(number: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        values = torch.rand(number, 10, generator=numbers)
        marks = F.one_hot(torch.randint(5, (number,), generator=numbers), 10)
        marks = marks + F.one_hot(5 + torch.randint(5, (number,), generator=numbers), 10)
        return torch.stack((values, marks.float()), -1), (values * marks).sum(1)

    model = Sequences(0, 1, every=False)
    return Work(TensorDataset(*draw(2000, fresh(1000 + seed))), draw(500, fresh(1)), model, squared)


def letters(seed: int) -> Work:
    """The next of 20 letters, where each depends on the one before."""
    after = torch.softmax(2 * torch.randn(20, 20, generator=fresh(5)), -1)

    def draw(number: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        text = [torch.randint(20, (number,), generator=numbers)]
        for _ in range(10):
            text.append(torch.multinomial(after[text[-1]], 1, generator=numbers).squeeze(1))
        rows = torch.stack(text, 1)
        return rows[:, :-1], rows[:, 1:]

    model = Sequences(20, 20, every=True)
    return Work(TensorDataset(*draw(1000, fresh(1000 + seed))), draw(300, fresh(1)), model, cross_entropy)


def ratings(seed: int) -> Work:
    """One to five stars, with more taste than reason in them."""
    truth = fresh(6)
    users, films = torch.randn(60, 3, generator=truth), torch.randn(80, 3, generator=truth)

    def draw(number: int, numbers: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
        user, film = (torch.randint(size, (number,), generator=numbers) for size in (60, 80))
        score = 3 + 0.6 * (users[user] * films[film]).sum(1) + 0.5 * films[film, 0]
        score = score + noise * torch.randn(number, generator=numbers)
        return torch.stack((user, film), 1), score.round().clamp(1, 5)

    return Work(TensorDataset(*draw(4000, fresh(1000 + seed), 0.8)), draw(1000, fresh(1), 0), Factors(60, 80), squared)


def topics(seed: int) -> Work:
    """Bags of 12 words, of which few tell the topic."""
    words = torch.softmax(1.2 * torch.randn(4, 200, generator=fresh(7)), -1)

    def draw(number: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        topic = torch.randint(4, (number,), generator=numbers)
        return torch.multinomial(words[topic], 12, replacement=True, generator=numbers), topic

    model = nn.Sequential(nn.EmbeddingBag(200, 32), nn.Linear(32, 4))
    return Work(TensorDataset(*draw(1500, fresh(1000 + seed))), draw(1000, fresh(1)), model, cross_entropy)


def alike(seed: int) -> Work:
    """Pairs that belong together or not, embedded and compared by their angle."""
    centers = torch.randn(12, 10, generator=fresh(8))

    def draw(number: int, numbers: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.randint(12, (number,), generator=numbers)
        same = torch.rand(number, generator=numbers) < 0.5
        second = torch.where(same, first, torch.randint(12, (number,), generator=numbers))
        noise = torch.randn(2, number, 10, generator=numbers)
        return centers[first] + noise[0], centers[second] + noise[1], (first == second).float() * 2 - 1

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return F.cosine_embedding_loss(model(batch[0]), model(batch[1]), batch[2], margin=0.2)

    return Work(TensorDataset(*draw(2000, fresh(1000 + seed))), draw(1000, fresh(1)), mlp(10, 8), objective)


def bandit(seed: int) -> Work:
    """Logged clicks: five actions at uneven odds, and rewards weighed by how likely the action was then."""
    truth = torch.randn(8, 5, generator=fresh(9))

    def chance(x: Tensor) -> Tensor:
        return torch.sigmoid(1.5 * x @ truth - 1)

    numbers = fresh(1000 + seed)
    x = torch.randn(3000, 8, generator=numbers)
    odds = torch.softmax(torch.randn(3000, 5, generator=numbers), -1)
    action = torch.multinomial(odds, 1, generator=numbers)
    reward = torch.bernoulli(chance(x).gather(1, action), generator=numbers)
    held = torch.randn(1000, 8, generator=fresh(1))

    def objective(model: nn.Module, batch: Any) -> Tensor:
        x, action, weight = batch
        gain: Tensor = weight * model(x).softmax(-1).gather(1, action)
        return -gain.mean()

    def regret(model: nn.Module) -> float:
        best = chance(held).max(-1).values
        return float((best - (model(held).softmax(-1) * chance(held)).sum(-1)).mean())

    data = TensorDataset(x, action, reward / odds.gather(1, action))
    return Work(data, (held,), mlp(8, 5), objective, regret)


RECIPES: dict[str, tuple[Callable[..., Work], Recipe]] = {
    "diabetes_b4": (diabetes, Recipe(4, "AdamW", 1e-3, options=(0,))),
    "diabetes_raw_b16": (diabetes, Recipe(16, "Adam", 1e-2, options=(1,))),
    "diabetes_huber_b1": (diabetes_huber, Recipe(1, "SGD", 1e-2, steps=500)),
    "lognormal_b16": (lognormal, Recipe(16, "Adam", 3e-3, options=(1.0,))),
    "lognormal_b1": (lognormal, Recipe(1, "SGD", 1e-3, "warm-up", steps=500, options=(1.2,))),
    "student_b4": (heavy_tails, Recipe(4, "AdamW", 3e-3, options=(2,))),
    "student_b16": (heavy_tails, Recipe(16, "momentum", 2e-2, "one cycle", options=(3,))),
    "poisson_b4": (counts, Recipe(4, "Adam", 1e-3)),
    "poisson_shops_b16": (shop_counts, Recipe(16, "SGD", 5e-2, "warm-up", steps=500)),
    "exponential_b2": (waiting, Recipe(2, "Adam", 1e-3)),
    "gaussian_b16": (uneven, Recipe(16, "AdamW", 3e-3, "warm-up")),
    "cancer_b1": (cancer, Recipe(1, "AdamW", 1e-3, options=(0,))),
    "cancer_labels_b16": (cancer, Recipe(16, "RMSprop", 1e-3, steps=300, options=(0.4,))),
    "wine_b2": (wine, Recipe(2, "AdamW", 1e-2, "one cycle", steps=300)),
    "digits_b1": (digits, Recipe(1, "SGD", 2e-2, steps=500, options=(0, 0))),
    "digits_conv_b4": (digits, Recipe(4, "Adam", 1e-3, options=(0, 1))),
    "digits_labels_b16": (digits, Recipe(16, "momentum", 5e-2, "one cycle", options=(0.3, 1))),
    "rare_b16": (rare, Recipe(16, "Adam", 1e-3)),
    "long_tail_b4": (long_tail, Recipe(4, "AdamW", 3e-3, "warm-up")),
    "adding_b16": (adding, Recipe(16, "Adam", 5e-3, "warm-up", steps=300)),
    "letters_b2": (letters, Recipe(2, "AdamW", 1e-2, "one cycle", steps=300)),
    "ratings_b16": (ratings, Recipe(16, "Adam", 2e-2, steps=500)),
    "topics_b2": (topics, Recipe(2, "Adam", 1e-2)),
    "alike_b16": (alike, Recipe(16, "Adam", 3e-3)),
    "bandit_b16": (bandit, Recipe(16, "AdamW", 3e-3, "one cycle")),
}


def programs() -> list[Program]:
    """List the programs; every second one hands its loss over."""

    def program(name: str, hands_over: bool) -> Program:
        family, recipe = RECIPES[name]

        def train(seed: int, guard: dict[str, Any] | None = None) -> float:
            torch.manual_seed(seed)
            return fit(family(seed, *recipe.options), recipe, guard, hands_over)

        return Program(name, train)

    return [program(name, place % 2 == 1) for place, name in enumerate(RECIPES)]


def main() -> None:
    """Run what the command line asks for."""
    files = dict.fromkeys(RECIPES, Path(__file__))
    paired.main("Healthy runs that are noisy.", files, paired.pairs, seeds=12, preload=["sklearn.datasets"])
