"""What faults do to the trainers of others: as they are, with steps skipped that are not finite, and guarded.

Each cell is the loss on healthy rows at the end, as a multiple of that of a run without the fault: bold where it is at
most a tenth more. The last column says what the guard named. The programs are small ones of transformers and
Lightning; the faults strike once, but for bad rows, a broken operation of the user's loss, and a learning rate that is
100 times as high for ten steps.

    python benchmarks/trainers.py
    python benchmarks/trainers.py --programs vit lightning --faults nan_grad bad_rows
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import hf_programs
import lightning_programs as lightning
from lightning import Trainer as LightningTrainer
from lightning.pytorch import Callback as LightningCallback
from transformers import TrainerCallback

import resilient_train

ARMS = ("plain", "skip only", "guarded")
NEAR = 1.1
STEPS = 120
FAULTS = hf_programs.FAULTS
OF_LIGHTNING = {"nan_grad": "nan_gradient", "hot_lr": "rate", "bad_rows": ""}


def skips_bad_steps(optimizer: Any) -> None:
    """Let an optimizer skip the steps whose gradients are not finite, as many loops do."""
    plain = optimizer.step

    def step(closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        grads = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        if all(bool(grad.isfinite().all()) for grad in grads if grad is not None):
            plain()
        return loss

    optimizer.step = step


class Skips(TrainerCallback):  # type: ignore[misc]  # mypy runs without transformers
    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        skips_bad_steps(more["optimizer"].optimizer)


class LightningSkips(LightningCallback):  # type: ignore[misc]
    def on_train_start(self, trainer: Any, module: Any) -> None:
        skips_bad_steps(trainer.optimizers[0])


def of_transformers(program: str, fault: str, arm: str, place: Path) -> float:
    """Train once with a Trainer; return the loss on healthy rows."""
    more = {"learning_rate": 3e-3} if fault in ("operation", "mended") else {}
    trainer = hf_programs.trainer(program, place, fault, steps=STEPS, **more)
    if arm == "skip only":
        trainer.add_callback(Skips)
    if arm == "guarded":
        resilient_train.hf.guard(trainer)
    trainer.train()
    return hf_programs.evaluation_loss(trainer)


def of_lightning(fault: str, arm: str, place: Path) -> float:
    """Train once with Lightning; return the loss on healthy rows."""
    callbacks = {"skip only": [LightningSkips()], "guarded": [resilient_train.lightning.Guarded()]}.get(arm, [])
    module = lightning.Net(OF_LIGHTNING.get(fault, fault))
    more = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = LightningTrainer(
        default_root_dir=place, accelerator="cpu", max_epochs=3, enable_model_summary=False, callbacks=callbacks, **more
    )
    rows = lightning.Rows(bad=hf_programs.BAD_ROWS if fault == "bad_rows" else ())
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(rows, batch_size=lightning.BATCH, shuffle=True))
    healthy = lightning.Rows()
    module.eval()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(module.net(healthy.x), healthy.y))


def ended(program: str, fault: str, arm: str) -> tuple[float, str]:
    """Train once; return the loss on healthy rows, and what the guard named."""
    with tempfile.TemporaryDirectory() as folder:
        place, why = Path(folder), ""
        try:
            train = of_lightning if program == "lightning" else lambda *given: of_transformers(program, *given)
            loss = train(fault, arm, place)
        except Exception as error:
            loss, why = math.nan, f"{type(error).__name__}: {error}"[:60]
        lines = place / "resilient_train" / "incidents.jsonl"
        found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        return loss, why or "; ".join(dict.fromkeys(map(named, found)))


def named(incident: dict[str, Any]) -> str:
    """Return the cause of an incident, and its rows or its line."""
    rows, culprit = incident["rows"], incident["culprit"]
    what = f" rows {rows}" if rows else ""
    if culprit is not None:
        what = f" `{culprit['op']}` at {Path(culprit['file']).name}:{culprit['line']}"
    return f"{incident['cause']}{what}"


def main() -> None:
    programs = [*hf_programs.PROGRAMS, "lightning"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("resilient_train").setLevel(logging.CRITICAL)
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
    near, count = dict.fromkeys(ARMS, 0), 0
    rows = [f"| program | fault | {' | '.join(ARMS)} | named |", "|---|---|---|---|---|---|"]
    for program in given.programs:
        usual, _ = ended(program, "", "plain")
        for fault in given.faults:
            if (program, fault) == ("t5", "operation"):
                continue  # a Trainer with a loss of its own passes no labels, without which a T5 cannot run
            # The program that breaks in an operation has another loss: it is compared with one whose operation is safe.
            has_own_loss = fault == "operation" and program != "lightning"
            healthy = ended(program, "mended", "plain")[0] if has_own_loss else usual
            cells, what, count = [], "", count + 1
            for arm in ARMS:
                loss, what = ended(program, fault, arm)
                near[arm] += (is_near := loss <= NEAR * healthy)
                cells.append(f"**{loss / healthy:.2f}**" if is_near else f"{loss / healthy:.3g}")
            rows.append(f"| {program} | {fault} | {' | '.join(cells)} | {what} |")
            print(rows[-1], file=sys.stderr, flush=True)
    print("\n".join([*rows, "", ", ".join(f"{arm}: {number} of {count}" for arm, number in near.items())]))
    sys.exit(near["guarded"] < count)


if __name__ == "__main__":
    main()
