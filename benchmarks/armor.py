"""What armor costs: an armored step of a small GPT next to the bare one, and a compiled model next to eager ones.

The GPT is this file's own, of 4M weights, with its norms, its attention and its loss written by hand, as they are
where they break. Every variant trains a copy of it, loaded from a copy of this file, since armor is put around lines
of a file. All take turns in one process, a block of steps at a time, so that whatever else the machine does hits all.

    python benchmarks/armor.py
    python benchmarks/armor.py --blocks 10 --json figures.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import begin, median_with_interval, table, with_interval
from torch import Tensor, nn
from torch.nn import functional

from resilient_train.numerics.armor import Armor

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 256, 4, 5, 128, 2
STEPS_PER_BLOCK, WARM_UP = 5, 10
# What is patched in a copy: the operation at the lines that are marked so, and how often a step comes there.
VARIANTS = {
    "bare": (),
    "loss (log, 1)": ("log",),
    "attention (softmax, 5)": ("softmax",),
    "norms (div, 11)": ("div",),
    "norms (mul, 11)": ("mul",),  # no table knows it
    "loss, attention and norms": ("log", "softmax", "div"),
}
COMPILED = {"compiled, bare": (), "compiled, loss, attention and norms": ("log", "softmax", "div")}
LIMIT = 1.3


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.square().mean(-1, keepdim=True).sqrt()  # div
        return self.weight * x  # mul


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = Norm(), Norm()

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).view(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
        weights = torch.softmax(scores, dim=-1)  # softmax
        x = x + self.out((weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        wide = functional.gelu(self.up(self.second(x)))
        out: Tensor = x + self.down(wide)
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, self.future)
        probabilities = torch.softmax(self.head(self.norm(x)), dim=-1)
        logarithms = torch.log(probabilities)  # log
        return -logarithms.gather(-1, following[..., None]).mean()


def steps_of(folder: Path, name: str, ops: tuple[str, ...], *, compiles: bool) -> Callable[[], float]:
    """Return what trains a copy for a block of steps and returns the milliseconds that each took."""
    path = folder / f"{name.replace(',', '').replace(' ', '_')}.py"
    shutil.copy(__file__, path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        for op in ops:
            if line.endswith(f"  # {op}"):
                Armor().add(str(path), number, op)
    torch.manual_seed(0)
    model = module.GPT()
    run: Any = torch.compile(model, fullgraph=True) if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    random = torch.Generator().manual_seed(0)

    def block() -> float:
        started = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=random)
            optimizer.zero_grad()
            run(tokens[:, :-1], tokens[:, 1:]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return 1e3 * (time.perf_counter() - started) / STEPS_PER_BLOCK

    return block


def measure(blocks: int) -> dict[str, np.ndarray]:
    """Time all variants; armor is added before anything is compiled, since it has all code compiled again."""
    with tempfile.TemporaryDirectory() as folder:
        loops = {name: steps_of(Path(folder), name, ops, compiles=False) for name, ops in VARIANTS.items()}
        loops |= {name: steps_of(Path(folder), name, ops, compiles=True) for name, ops in COMPILED.items()}
        for loop in loops.values():
            for _ in range(WARM_UP // STEPS_PER_BLOCK):
                loop()
        taken: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(blocks):
            for name in list(loops)[:: 1 if number % 2 == 0 else -1]:  # a drift favours none
                taken[name].append(loops[name]())
    return {name: np.array(ms) for name, ms in taken.items()}


def main() -> None:
    """Measure, print, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description="Compare the cost of a step with and without armor.")
    parser.add_argument("--blocks", type=int, metavar="N", default=40, help="of each variant (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    figures: dict[str, Any] = {"machine": begin()}
    ms = measure(given.blocks)
    ratios = {name: median_with_interval([taken / ms["bare"]]) for name, taken in ms.items()}
    weights = sum(weight.numel() for weight in GPT().parameters())
    print(f"\n{weights / 1e6:.2f} M weights, {given.blocks} blocks of {STEPS_PER_BLOCK} steps")
    rows = [[name, f"{np.median(taken):.1f}", with_interval(ratios[name])] for name, taken in ms.items()]
    print(table(["armor around", "step ms", "beside bare"], rows))
    for names, limit in ((list(VARIANTS), LIMIT), (list(COMPILED), 1.0)):
        worst = max(ratios[name][2] for name in names)
        verdict = "met" if worst <= limit else "missed"
        print(f"  target: at most {limit:.2f} beside bare, upper bound: {verdict} with {worst:.3f}")
    if given.json:
        given.json.write_text(json.dumps({**figures, "ms": {name: list(map(float, one)) for name, one in ms.items()}}))


if __name__ == "__main__":
    main()
