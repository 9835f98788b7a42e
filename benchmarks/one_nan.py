"""What one NaN in the training data does to a run, by the trainer that meets it.

All train the same program: a small network, AdamW, clipping at 1, five epochs of 4,096 rows in batches of 32. One value
of row 1,000 is NaN. Each trainer runs in its own process, with its defaults, once with the NaN and once without.
Lightning, ARC and transformers are not dependencies: `--venv DIR` makes an environment for them, and a trainer that
cannot be imported is skipped.

    python benchmarks/one_nan.py --venv /tmp/others
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from clinic.with_arc import begin_again_in

ROWS, BAD_ROW, BATCH, EPOCHS = 4096, 1000, 32, 5
STEPS = EPOCHS * ROWS // BATCH
PACKAGES = ("lightning", "arc-training", "transformers")
NEAR = 1.05  # held-out loss, as a ratio to the same trainer's run without the NaN


@dataclass
class Program:
    """What every trainer is given."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rows: TensorDataset

    def batches(self) -> Iterator[list[torch.Tensor]]:
        """Yield the batches of all epochs."""
        for _ in range(EPOCHS):
            yield from DataLoader(self.rows, BATCH, shuffle=True)


def make(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw inputs and targets."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sin().sum(1, keepdim=True)


def program(*, is_clean: bool) -> Program:
    """Build the program, with or without the NaN."""
    x, y = make(ROWS, seed=0)
    if not is_clean:
        x[BAD_ROW, 3] = math.nan
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    return Program(model, torch.optim.AdamW(model.parameters(), lr=3e-3), TensorDataset(x, y))


def plain(given: Program) -> str:
    """PyTorch, by hand."""
    for x, y in given.batches():
        loss = mse_loss(given.model(x), y)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(given.model.parameters(), 1.0)
        given.optimizer.step()
        given.optimizer.zero_grad()
    return ""


def accelerated(given: Program) -> str:
    """Accelerate, as its quick tour has it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(given.rows, BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(given.model, given.optimizer, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            accelerator.backward(mse_loss(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return ""


def hugging_face(given: Program, *, guarded: bool = False) -> str:
    """The Trainer of transformers."""
    transformers: Any = importlib.import_module("transformers")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = given.model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": mse_loss(self.net(x), labels)}

    rows = [{"x": x, "labels": y} for x, y in zip(*given.rows.tensors, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, learning_rate=3e-3, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(Wrapped(), settings, train_dataset=rows)
        if guarded:
            import resilient_train

            resilient_train.hf.guard(trainer)
        trainer.train()
        return rows_named(Path(folder, "resilient_train"))


def rows_named(run_dir: Path) -> str:
    """Return the rows that the incidents of a run name; none without the guard."""
    lines = (run_dir / "incidents.jsonl").read_text().splitlines() if run_dir.exists() else []
    return ", ".join(f"row {row:,}" for line in lines for row in json.loads(line)["rows"])


def lightning(given: Program, *, detect_anomaly: bool = False, guarded: bool = False) -> str:
    """Lightning's Trainer."""
    pl: Any = importlib.import_module("lightning")

    class Module(pl.LightningModule):  # type: ignore[misc]  # not installed where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.net = given.model

        def training_step(self, batch: Any, number: int) -> Any:
            return mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return given.optimizer

    shown = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callbacks = []
    if guarded:
        import resilient_train

        callbacks.append(resilient_train.lightning.Guarded())
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=EPOCHS, accelerator="cpu", gradient_clip_val=1.0, detect_anomaly=detect_anomaly,
            callbacks=callbacks, default_root_dir=folder, **shown,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(given.rows, BATCH, shuffle=True))
        return rows_named(Path(folder, "resilient_train"))


def arc(given: Program) -> str:
    """ARC's controller around the loop by hand, placed as its quick start does."""
    controller: Any = importlib.import_module("arc").Controller(given.model, given.optimizer)
    for x, y in given.batches():
        given.optimizer.zero_grad()
        loss = mse_loss(given.model(x), y)
        torch.autograd.backward(loss)
        if controller.step(loss).should_skip:
            continue
        nn.utils.clip_grad_norm_(given.model.parameters(), 1.0)
        given.optimizer.step()
    return ""


def ours(given: Program) -> str:
    """The loop by hand, guarded."""
    from accelerate import Accelerator

    from resilient_train import Guard

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(given.model, given.optimizer)
    guard = Guard(accelerator, model, optimizer, data=given.rows, batch_size=BATCH, steps=STEPS, clip=1.0)
    for x, y in guard.batches():
        loss = mse_loss(model(x), y)
        accelerator.backward(loss)
        guard.update(loss)
    guard.close()
    return ", ".join(f"row {row:,}" for one in guard.incidents for row in one.diagnosis.rows)


TRAINERS: dict[str, tuple[str, Callable[[Program], str]]] = {  # name: package, function
    "PyTorch": ("torch", plain),
    "Accelerate": ("accelerate", accelerated),
    "Hugging Face Trainer": ("transformers", hugging_face),
    "Lightning": ("lightning", lightning),
    "Lightning, `detect_anomaly=True`": ("lightning", lambda given: lightning(given, detect_anomaly=True)),
    "ARC": ("arc-training", arc),
    "resilient_train": ("torch", ours),
    "guarded Hugging Face Trainer": ("transformers", lambda given: hugging_face(given, guarded=True)),
    "guarded Lightning": ("lightning", lambda given: lightning(given, guarded=True)),
}


def one(name: str, *, is_clean: bool) -> dict[str, Any]:
    """Run a trainer; return how it ended, the held-out loss of the weights it leaves, and what it named."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    given, named, ended = program(is_clean=is_clean), "", "finished"
    try:
        named = TRAINERS[name][1](given)
    except Exception as error:
        ended = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    x, y = make(ROWS, seed=1)
    with torch.no_grad():
        loss = float(mse_loss(given.model.cpu()(x), y))
    return {"ended": ended, "loss": loss, "named": named}


def measured(name: str, *, is_clean: bool) -> dict[str, Any]:
    """Run a trainer in a process of its own."""
    words = [sys.executable, __file__, "--one", name, *(["--clean"] if is_clean else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def row_of(name: str, version: str, spoiled: dict[str, Any], clean: dict[str, Any]) -> str:
    """One line of the table."""
    loss = spoiled["loss"]
    weights = "as good" if loss <= NEAR * clean["loss"] else "**NaN**" if math.isnan(loss) else "worse"
    ended = spoiled["ended"] if len(spoiled["ended"]) < 60 else spoiled["ended"][:57] + "..."
    cells = (f"{name} {version}", ended, weights, f"{loss:.3f} ({clean['loss']:.3f})", spoiled["named"] or "no")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run all that can be imported, print the table, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="environment for the others; made if it is not there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--trainer", action="append", choices=list(TRAINERS), help="(default: all)")
    parser.add_argument("--one", choices=list(TRAINERS), help=argparse.SUPPRESS)
    parser.add_argument("--clean", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one, is_clean=given.clean)))
        return
    if given.venv is not None:
        begin_again_in(given.venv, PACKAGES, [__file__])
    figures = {}
    print("| trainer | how the run ended | weights | held-out loss (without the NaN) | names the row |")
    print("|---|---|---|---|---|")
    for name in given.trainer or TRAINERS:
        package = TRAINERS[name][0]
        try:
            version = importlib.metadata.version(package).split("+")[0] if name != "resilient_train" else ""
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not run, {package} is not installed; --venv DIR installs it", file=sys.stderr)
            continue
        spoiled, clean = measured(name, is_clean=False), measured(name, is_clean=True)
        figures[name] = {"version": version, "with the NaN": spoiled, "without": clean}
        print(row_of(name, version, spoiled, clean), flush=True)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
