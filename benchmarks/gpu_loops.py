"""What `gpu.py` trains: the GPT-2 of the zoo, with plain PyTorch and with a guard, on one device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from interleaved import median_with_interval
from torch import Tensor, nn
from torch.nn import functional

from resilient_train import Guard
from resilient_train.ground.reader import MemoryConfig
from resilient_train.zoo.models import GPT

CLIP = 1.0


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1_024
    vocabulary: int = 50_304
    batch: int = 16
    rows: int = 4_096

    def smaller(self) -> Size:
        """The same in the time of a test on a CPU."""
        return replace(self, layers=2, width=32, heads=2, length=16, vocabulary=64, batch=4, rows=256)


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of tokens."""

    def __init__(self, size: Size) -> None:
        numbers = np.random.default_rng(0)
        steps = numbers.integers(1, 7, (size.rows, 1))
        tokens = (np.arange(size.length + 1) * steps + numbers.integers(0, 7, (size.rows, 1))) % size.vocabulary
        self.tokens = torch.from_numpy(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of a batch, in mixed precision."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda weights: torch.optim.AdamW(weights, lr=3e-4, fused=True),
    "foreach": lambda weights: torch.optim.AdamW(weights, lr=3e-4, foreach=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9),
}


def model_on(device: torch.device, size: Size, *, compiles: bool = False) -> Any:
    """Build the model, the same one for the same size."""
    torch.manual_seed(0)
    model = GPT(size.vocabulary, size.length, size.layers, size.heads, size.width).to(device)
    return torch.compile(model) if compiles else model


class Plain:
    """The loop by hand: forward, backward, clipping, step; a line every 10 steps reads the loss."""

    def __init__(self, device: torch.device, size: Size, how: str, *, compiles: bool, accumulation: int) -> None:
        self.device, self.accumulation = device, accumulation
        self.model = model_on(device, size, compiles=compiles)
        self.optimizer = OPTIMIZERS[how](self.model.parameters())
        loader = torch.utils.data.DataLoader(Rows(size), size.batch, shuffle=True, pin_memory=device.type == "cuda")
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))
        self.steps = 0

    def run(self, steps: int) -> None:
        """Train for so many steps."""
        for _ in range(steps):
            for _ in range(self.accumulation):
                tokens = next(self.batches).to(self.device, non_blocking=True)
                loss = loss_of(self.model, tokens) / self.accumulation
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            if self.steps % 10 == 0:
                float(loss.detach())


class Guarded:
    """The same under a guard with its defaults, whose objective is the loss."""

    def __init__(
        self,
        device: torch.device,
        size: Size,
        how: str = "fused",
        *,
        compiles: bool = False,
        accumulation: int = 1,
        **options: Any,
    ) -> None:
        AcceleratorState._reset_state()  # one process has one precision otherwise
        self.accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=device.type == "cpu")
        model = model_on(device, size, compiles=compiles)
        self.model, optimizer = self.accelerator.prepare(model, OPTIMIZERS[how](model.parameters()))
        self.guard = Guard(
            self.accelerator,
            self.model,
            optimizer,
            data=Rows(size),
            batch_size=size.batch,
            steps=10**9,
            objective=loss_of,
            clip=CLIP,
            **options,
        )
        self.updates: Iterator[Any] = iter(self.guard.batches())

    def run(self, steps: int) -> None:
        """Attempt so many updates, and do not wait for the verdict on the last one."""
        until = self.guard.clock.tick + steps
        while self.guard.clock.tick < until:
            self.guard.step(next(self.updates))
            if self.guard.clock.tick % 10 == 0 and self.guard.newest is not None:
                float(self.guard.newest.loss)

    def close(self) -> None:
        """End the loop."""
        self.updates.close()  # type: ignore[attr-defined]


def paired(one: Any, other: Any, device: torch.device, *, blocks: int, steps: int) -> dict[str, Any]:
    """Time both in blocks, in turns; return the medians in milliseconds and their paired ratio with its interval."""
    times: dict[int, list[float]] = {0: [], 1: []}
    for loop in (one, other):
        loop.run(6 * steps)  # with the defaults each of five snapshots is then in memory that was pinned before
    for block in range(blocks):
        for place in (0, 1) if block % 2 == 0 else (1, 0):
            with timed(device, times[place]):
                (one, other)[place].run(steps)
    first, second = (1e3 * np.array(times[place]) / steps for place in (0, 1))
    return {"ms": [float(np.median(first)), float(np.median(second))], "ratio": median_with_interval([second / first])}


@contextmanager
def timed(device: torch.device, seconds: list[float]) -> Iterator[None]:
    """Append the seconds that a block takes on the device."""
    settle(device)
    began = time.perf_counter()
    yield
    settle(device)
    seconds.append(time.perf_counter() - began)


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def with_snapshots(every: int) -> MemoryConfig:
    """Snapshots so often, as many as by default."""
    return MemoryConfig(every=every, keep=4, max_gib=None)
