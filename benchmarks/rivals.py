"""What others ask for watching a run: Lightning with `detect_anomaly`, and ARC, beside the plain loop and ours.

Same model, data, optimizer and clipping, timed as `step_cost.py` does. Neither is a dependency of ours: `--venv` makes
an environment for them in a folder of your choice, which sees what is installed here and installs the two there.

    python benchmarks/rivals.py --venv /tmp/rivals
    python benchmarks/rivals.py --venv /tmp/rivals --workload mlp --blocks 12 --json figures.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import sysconfig
import venv
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import plain_loop
from interleaved import Job, Loop, OnStep, begin, compared, table, time_blocks
from loops import OVERRIDES, ours, plain, work
from step_cost import STEPS_PER_BLOCK, WARM_UP

PACKAGES = {"lightning": "lightning", "arc": "arc-training"}  # what to import, what to install


def lightning(job: Job, on_step: OnStep, tell: Callable[[Any], None], *, detect_anomaly: bool) -> None:
    """Train with Lightning's trainer, nothing shown and nothing saved."""
    pl: Any = importlib.import_module("lightning")

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # advice about workers and logging
    workload = plain_loop.WORKLOADS[job.workload]
    prepared = plain_loop.prepare(workload, job.steps)
    tell(work(prepared.model, [prepared.optimizer], workload.batch_size))
    model, optimizer = prepared.model, prepared.optimizer.optimizer  # type: ignore[attr-defined]

    class Module(pl.LightningModule):  # type: ignore[misc]  # not installed where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.step = 0

        def training_step(self, batch: Any, number: int) -> Any:
            return workload.objective(self.model, batch)[0]

        def configure_optimizers(self) -> Any:
            scheduler = {"scheduler": prepared.scheduler.scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            self.step += 1
            if self.step % job.log_every == 0:
                print(f"step {self.step}/{job.steps}  loss {outputs['loss'].item():.4f}", flush=True)
            on_step(self.step)

    shown = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator=prepared.accelerator.device.type.replace("cuda", "gpu"),
        devices=1,
        max_epochs=-1,
        max_steps=job.steps,
        gradient_clip_val=1.0,
        detect_anomaly=detect_anomaly,
        enable_model_summary=False,
        **shown,
    )
    trainer.fit(Module(), plain_loop.loader(workload))


def arc(job: Job, on_step: OnStep, tell: Callable[[Any], None]) -> None:
    """Train with the plain loop and ARC's controller, where its own instructions put it."""
    logging.getLogger("arc").setLevel(logging.WARNING)
    workload = plain_loop.WORKLOADS[job.workload]
    prepared = plain_loop.prepare(workload, job.steps)
    tell(work(prepared.model, [prepared.optimizer], workload.batch_size))
    controller = importlib.import_module("arc").Controller(prepared.model, prepared.optimizer.optimizer)  # type: ignore[attr-defined]

    def is_bad(loss: Any) -> bool:
        return bool(controller.step(loss).should_skip)

    plain_loop.train(workload, prepared, steps=job.steps, log_every=job.log_every, on_step=on_step, is_bad=is_bad)


RIVALS: dict[str, tuple[str, Loop]] = {  # the module it needs, and the loop
    "lightning": ("lightning", partial(lightning, detect_anomaly=False)),
    "lightning detect_anomaly": ("lightning", partial(lightning, detect_anomaly=True)),
    "arc": ("arc", arc),
}


def present() -> dict[str, Loop]:
    """The rivals that can be run here; says why the others cannot."""
    found: dict[str, Loop] = {}
    for name, (module, loop) in RIVALS.items():
        try:
            importlib.import_module(module)
            found[name] = loop
        except Exception as error:  # whatever keeps it from being imported is the answer
            print(f"{name}: not run: {error}; --venv DIR installs {PACKAGES[module]} into an environment of its own")
    return found


def in_venv(folder: Path, packages: Iterable[str] = PACKAGES.values()) -> None:
    """Make an environment that sees what is installed here, install the rivals in it, and begin again there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        here = sysconfig.get_path("purelib")
        there = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (there / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    for package in packages:  # one by one: where one cannot be had, the other may
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{package} could not be installed: {done.stderr.strip().splitlines()[-1]}", flush=True)
    rest = [word for place, word in enumerate(sys.argv) if "--venv" not in (word, sys.argv[place - 1])]
    os.execv(python, [str(python), *[word for word in rest if not word.startswith("--venv=")]])


def main() -> None:
    """Measure, print, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description="Compare the cost of a step: Lightning and ARC, the plain loop, ours.")
    parser.add_argument("--venv", type=Path, metavar="DIR", help="environment for the rivals; made if it is not there")
    parser.add_argument("--workload", action="append", choices=sorted(OVERRIDES), help="default: gpt and mlp")
    parser.add_argument("--blocks", type=int, metavar="N", default=30, help="of each loop (default: %(default)s)")
    parser.add_argument("--steps-per-block", type=int, metavar="N", help="default: 25 or 200")
    parser.add_argument("--warm-up", type=int, metavar="N", help="steps before the first block (default: 125 or 600)")
    fresh = "fresh sets of processes (default: %(default)s)"
    parser.add_argument("--rounds", type=int, metavar="N", default=3, help=fresh)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    if given.venv is not None:
        in_venv(given.venv)
    figures: dict[str, Any] = {"machine": begin()}
    loops = {"plain": plain, "ours": ours, **present()}
    for workload in given.workload or ("gpt", "mlp"):
        warm_up = WARM_UP[workload] if given.warm_up is None else given.warm_up
        steps_per_block = given.steps_per_block or STEPS_PER_BLOCK["none"][workload]
        job = Job(workload, warm_up, warm_up, log_every=10)
        timing = time_blocks(loops, job, blocks=given.blocks, steps_per_block=steps_per_block, rounds=given.rounds)
        print(f"\n{workload}: {timing.work['weights'] / 1e6:.2f} M weights, {timing.blocks} blocks of", end=" ")
        print(f"{timing.steps_per_block} steps, load now {os.getloadavg()[0]:.1f}")
        print(table(*compared(timing, ["plain"])))
        figures[workload] = timing.as_dict()
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
