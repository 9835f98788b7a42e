"""The program that `hot_stretch.py` trains: a small character transformer on source text of the standard library.

The stretch itself is here as well, and what both programs keep of how a run ended.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from resilient_train import GaveUp, Guard

AFTER = 150  # steps behind the stretch
ENDLESS = 10  # attempts per wanted update
CLIP = 1.0

WIDTH, HEADS, LAYERS, CONTEXT, BATCH_SIZE, VOCABULARY = 48, 2, 2, 32, 16, 128
RATES = {"adamw": 3e-3, "sgd": 0.1}  # found with clean runs
TRAINED_ON = ("argparse.py", "ast.py", "inspect.py", "tarfile.py", "typing.py", "subprocess.py", "pathlib.py")
HELD_OUT = ("zipfile.py", "zipfile/__init__.py", "shutil.py", "dataclasses.py")
HELD_OUT_ROWS = 256


@dataclass(frozen=True)
class Draw:
    """One stretch, and what it is in."""

    number: int
    factor: int
    length: int
    start: int
    form: str
    optimizer: str
    seed: int

    @property
    def steps(self) -> int:
        return self.start + self.length + AFTER

    def rate(self, step: int) -> float:
        """Say by how much the learning rate of a step, counted from 0, is multiplied."""
        return float(self.factor) if self.start <= step < self.start + self.length else 1.0

    def __str__(self) -> str:
        return f"#{self.number} F={self.factor} D={self.length} S={self.start} {self.optimizer}, {self.form}"


@dataclass
class Ended:
    """How one run ended."""

    held_out: float  # infinite where it is not finite
    losses: list[float]  # of training, the newest last
    skipped: int = 0
    said: str = ""
    incidents: int = 0
    why: str = ""


class Rows(Dataset[Tensor]):
    """Source text of the standard library, in rows of CONTEXT + 1 characters that do not overlap."""

    def __init__(self, files: Sequence[str]) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in (library / name for name in files) if path.exists())
        letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)
        self.rows = letters[: len(letters) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Tensor:
        return self.rows[row]


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind its normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        mlp: Tensor = self.mlp(self.before_mlp(x))
        return x + mlp


class Letters(nn.Module):
    """A small transformer that tells the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.letters(x) + self.places.weight[: x.shape[1]]))
        return logits


def objective(model: nn.Module, batch: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of the next characters."""
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@functools.cache
def rows(files: Sequence[str]) -> Rows:
    return Rows(files)


def build(optimizer: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build what all arms train with."""
    torch.manual_seed(seed)
    model = Letters()
    if optimizer == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=RATES["sgd"], momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=RATES["adamw"])


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """Evaluate on text that nothing was trained on. The model is left as it was."""
    was_training = model.training
    model.eval()
    every = rows(HELD_OUT)
    chosen = every.rows[:: len(every) // HELD_OUT_ROWS][:HELD_OUT_ROWS]
    loss = objective(model, chosen).item()
    model.train(was_training)
    return finite(loss)


def finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def batches(seed: int) -> Iterator[Tensor]:
    """Yield shuffled batches without end."""
    data, numbers = rows(TRAINED_ON), torch.Generator().manual_seed(seed)
    while True:
        shuffled = torch.randperm(len(data), generator=numbers)
        for first in range(0, len(data) - BATCH_SIZE + 1, BATCH_SIZE):
            yield data.rows[shuffled[first : first + BATCH_SIZE]]


def by_hand(
    optimizer: str, seed: int, rate: Callable[[int], float], *, skips: bool, stops: Sequence[int]
) -> dict[int, Ended]:
    """Train with a loop as one writes it by hand; say how it would have ended at each of the stops."""
    model, made = build(optimizer, seed)
    schedule, wanted = LambdaLR(made, rate), set(stops)
    losses: list[float] = []
    ends: dict[int, Ended] = {}
    skipped = 0
    for step, batch in enumerate(itertools.islice(batches(seed), max(stops)), start=1):
        loss = objective(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        losses.append(loss.item())
        if skips and not (math.isfinite(losses[-1]) and math.isfinite(norm.item())):
            skipped += 1
        else:
            made.step()
        schedule.step()
        made.zero_grad()
        if step in wanted:
            ends[step] = Ended(held_out(model), list(losses), skipped)
    return ends


def guarded(draw: Draw, run_dir: Path) -> Ended:
    """Train with a guard around the loop."""
    accelerator = Accelerator(cpu=True)
    plain_model, plain_optimizer = build(draw.optimizer, draw.seed)
    plain_schedule = LambdaLR(plain_optimizer, lambda step: draw.rate(step))
    model, optimizer, schedule = accelerator.prepare(plain_model, plain_optimizer, plain_schedule)
    losses: list[float] = []
    seen: list[Tensor] = []

    def watched(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(loss := objective(model, batch))
        return loss

    guard = Guard(
        accelerator, model, optimizer, data=rows(TRAINED_ON), batch_size=BATCH_SIZE, steps=draw.steps,
        schedule=schedule,
        objective=watched if draw.form == "objective" else None, recovery="balanced", checks="default",
        run_dir=run_dir, clip=CLIP, seed=draw.seed, tracking=False,
    )  # fmt: skip
    model.train()
    error: Exception | None = None
    try:
        for batch in guard.batches():
            if len(losses) > ENDLESS * draw.steps:
                raise TimeoutError("the run does not come to an end")
            if draw.form == "objective":
                seen.clear()
                guard.step(batch)
                losses.append(seen[0].item())  # those behind it are of replays
            else:
                loss = objective(model, batch)
                accelerator.backward(loss)
                guard.update(loss)
                losses.append(loss.item())
    except Exception as caught:
        error = caught
    return judged_by_itself(guard, run_dir, error, held_out(model), losses)


def judged_by_itself(guard: Guard, run_dir: Path, error: Exception | None, loss: float, losses: list[float]) -> Ended:
    """Close the guard, and say in a word what it told its user about the run."""
    with contextlib.suppress(Exception):
        guard.close()
    summary: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    outcomes = [str(getattr(one.outcome, "value", one.outcome)) for one in guard.incidents]
    if isinstance(error, GaveUp) or summary.get("status") == "gave_up":
        said = "gave up"
    elif error is not None:
        said = "failed"
    elif "unrecovered" in outcomes or summary.get("verdict", "well") not in ("well", "recovered"):
        said = "not recovered"
    else:
        said = "well"
    why = f"{type(error).__name__}: {error}" if error is not None else ""
    return Ended(loss, losses, said=said, incidents=len(outcomes), why=why)


def clean_runs(optimizer: str, seed: int, stops: Sequence[int]) -> dict[int, Ended]:
    """Train without a stretch: the learning rate is constant then, so the longest run holds all shorter ones."""
    return by_hand(optimizer, seed, lambda step: 1.0, skips=False, stops=stops)


def arm(arm: str, draw: Draw, seed: int) -> Ended:
    """Train one arm of a draw."""
    if arm == "guarded":
        with tempfile.TemporaryDirectory(prefix="hot_stretch-") as folder:
            return guarded(draw, Path(folder, "run"))
    return by_hand(draw.optimizer, seed, draw.rate, skips=arm == "skip only", stops=[draw.steps])[draw.steps]
