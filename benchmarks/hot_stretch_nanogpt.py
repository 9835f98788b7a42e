"""The second program of `hot_stretch.py`: the train.py of a checkout of karpathy/nanoGPT, with a guard added to it.

A copy of its text is edited line by line, as a user would, and executed. Its model, its `get_batch`, its optimizer and
its rule for the learning rate stay its own. The guarded copy gets its batches from an iterable around `get_batch`, and
hands `get_lr` over as a LambdaLR, because rates that a loop sets by hand cannot be led back. A line that is looked for
and not found, or found twice, is an error: then the checkout is not one that this script knows.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hot_stretch_letters import (
    BATCH_SIZE,
    CLIP,
    CONTEXT,
    ENDLESS,
    HEADS,
    HELD_OUT,
    LAYERS,
    TRAINED_ON,
    VOCABULARY,
    WIDTH,
    Draw,
    Ended,
    finite,
    judged_by_itself,
    rows,
)  # fmt: skip

RATES = {"adamw": 2e-3, "sgd": 0.03}  # found with clean runs, which differ little between seeds there
SETTINGS: dict[str, object] = {
    "device": "cpu", "dtype": "float32", "compile": False, "dataset": "letters", "gradient_accumulation_steps": 1,
    "batch_size": BATCH_SIZE, "block_size": CONTEXT, "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH,
    "grad_clip": CLIP, "warmup_iters": 10, "lr_decay_iters": 2000, "eval_interval": 10**9, "eval_iters": 1,
    "always_save_checkpoint": False, "log_interval": 1,
}  # fmt: skip
HELD_OUT_BATCHES = 16

GUARD = """
from accelerate import Accelerator
from resilient_train import Guard
class Batches:
    def __iter__(self):
        while True:
            yield get_batch('train')
accelerator = Accelerator(cpu=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: get_lr(it) / learning_rate)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
guard = Guard(accelerator, model, optimizer, data=Batches(), steps=max_iters + 1, schedule=schedule,
              objective=OBJECTIVE, recovery='balanced', checks='default', run_dir='run', clip=grad_clip, seed=SEED,
              tracking=False)
for X, Y in guard.batches():
"""
OBJECTIVE = """
def objective(model, batch):
    losses.append(model(*batch)[1])
    return losses[-1]
"""
STRETCH = """
calm_lr = get_lr
def get_lr(it):
    return calm_lr(it) * (FACTOR if START <= it < START + LENGTH else 1.0)
"""
SKIPPING = """
if loss.isfinite() and norm.isfinite():
    scaler.step(optimizer)
else:
    print('skipped')
"""


class Text:
    """The text of a program, edited by whole lines that are known by how they begin."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()

    def find(self, anchor: str, below: str = "") -> int:
        first = self.find(below) if below else 0
        found = [n for n, line in enumerate(self.lines) if n >= first and line.strip().startswith(anchor)]
        if len(found) != 1:
            raise LookupError(f"train.py has {len(found)} lines that begin with {anchor!r} where 1 is expected")
        return found[0]

    def put(self, anchor: str, new: str = "", *, cut: int = 1, below: str = "") -> None:
        """Put new lines, indented alike, in the place of a line, and of as many behind it as are to be cut."""
        place = self.find(anchor, below)
        line = self.lines[place]
        indent = line[: len(line) - len(line.lstrip())]
        self.lines[place : place + cut] = [indent + one for one in new.strip("\n").splitlines()]


LOOP = "# training loop"


def edited(text: str, arm: str, draw: Draw | None, optimizer: str, seed: int) -> str:
    """Return the text of train.py as an arm executes it."""
    made = Text(text)
    made.put("torch.manual_seed(1337", f"torch.manual_seed({1337 + seed})")
    if optimizer == "sgd":
        sgd = "optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)"
        made.put("optimizer = model.configure_optimizers(", sgd)
    if draw is not None:
        stretch = STRETCH.replace("FACTOR", str(draw.factor)).replace("START", str(draw.start))
        made.put("# logging", stretch.replace("LENGTH", str(draw.length)))
    if arm == "skip only":
        norm = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)"
        made.put("torch.nn.utils.clip_grad_norm_(", norm)
        made.put("scaler.step(", SKIPPING)
    if arm == "guarded":
        assert draw is not None
        add_guard(made, draw.form, seed)
    return "\n".join(made.lines) + "\n"


def add_guard(made: Text, form: str, seed: int) -> None:
    """Let a guard lead the loop."""
    has_objective = form == "objective"
    made.put("X, Y = get_batch('train')", cut=1, below="# immediately async prefetch")
    made.put("if grad_clip != 0.0", cut=3)
    for line in ("scaler.step(", "scaler.update(", "optimizer.zero_grad("):
        made.put(line)
    made.put("for param_group in optimizer.param_groups", cut=2)
    made.put("if iter_num > max_iters", cut=2)  # `guard.batches` knows how many are made
    if has_objective:
        made.put("logits, loss = model(X, Y)", "losses = []\nguard.step((X, Y))", below=LOOP)
        made.put("loss = loss / gradient_accumulation_steps", "loss = losses[0]")
        made.put("scaler.scale(loss).backward()")
    else:
        made.put("scaler.scale(loss).backward()", "accelerator.backward(loss)\nguard.update(loss)")
    guard = GUARD.replace("OBJECTIVE", "objective" if has_objective else "None").replace("SEED", str(seed))
    made.put("while True:", (OBJECTIVE if has_objective else "") + guard.strip("\n"), below=LOOP)
    made.put("X, Y = get_batch('train') # fetch the very first")


class Heard(io.TextIOBase):
    """What the program prints: its losses are taken from there."""

    def __init__(self, steps: int) -> None:
        self.limit, self.losses, self.skipped = ENDLESS * steps, list[float](), 0

    def write(self, text: str) -> int:
        self.skipped += text == "skipped"
        loss = re.match(r"iter \d+: loss (\S+),", text)
        if loss is not None:
            self.losses.append(float(loss[1]))
            if len(self.losses) > self.limit:
                raise TimeoutError("the run does not come to an end")
        return len(text)


@dataclass(frozen=True)
class Checkout:
    """A checkout of nanoGPT."""

    home: Path

    def commit(self) -> str:
        """Name the commit."""
        asked = ["git", "-c", "safe.directory=*", "-C", str(self.home), "rev-parse", "HEAD"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
        return answer.stdout.strip() or "of an unknown commit"

    def clean_runs(self, optimizer: str, seed: int, stops: Sequence[int]) -> dict[int, Ended]:
        """Train without a stretch, once for each length."""
        return {steps: self.train("plain", None, optimizer, seed, steps) for steps in stops}

    def arm(self, arm: str, draw: Draw, seed: int) -> Ended:
        """Train one arm of a draw."""
        return self.train(arm, draw, draw.optimizer, seed, draw.steps)

    def train(self, arm: str, draw: Draw | None, optimizer: str, seed: int, steps: int) -> Ended:
        """Execute an edited copy of train.py in a directory of its own, and evaluate what it leaves behind."""
        text = edited((self.home / "train.py").read_text(encoding="utf-8"), arm, draw, optimizer, seed)
        settings = {
            **SETTINGS,
            "max_iters": steps - 1,
            "learning_rate": RATES[optimizer],
            "min_lr": RATES[optimizer] / 10,
        }
        heard, error = Heard(steps), None
        space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        with tempfile.TemporaryDirectory(prefix="hot_stretch-") as folder, self.inside(Path(folder), settings):
            program = Path(folder, f"train_{arm.replace(' ', '_')}.py")
            program.write_text(text, encoding="utf-8")
            try:
                with contextlib.redirect_stdout(heard), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    exec(compile(text, str(program), "exec"), space)
            except Exception as caught:
                if arm != "guarded" or "guard" not in space:
                    raise
                error = caught
            loss = held_out(space["raw_model"], Path("data", "letters", "val.bin"))
            if arm == "guarded":
                return judged_by_itself(space["guard"], Path("run"), error, loss, heard.losses)
        return Ended(loss, heard.losses, heard.skipped)

    @contextlib.contextmanager
    def inside(self, folder: Path, settings: dict[str, object]) -> Iterator[None]:
        """Prepare data in the format of `get_batch`, and be where the program expects to be started."""
        data = folder / "data" / "letters"
        data.mkdir(parents=True)
        for name, files in (("train.bin", TRAINED_ON), ("val.bin", HELD_OUT)):
            rows(files).rows.flatten().numpy().astype("uint16").tofile(data / name)
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCABULARY}))
        shutil.copy(self.home / "configurator.py", folder)
        before, given, paths = Path.cwd(), sys.argv, list(sys.path)
        os.chdir(folder)
        sys.argv = ["train.py", *(f"--{key}={value}" for key, value in settings.items())]
        sys.path.insert(0, str(self.home.resolve()))
        try:
            yield
        finally:
            os.chdir(before)
            sys.argv, sys.path[:] = given, paths


@torch.no_grad()
def held_out(model: torch.nn.Module, path: Path) -> float:
    """Evaluate on text that nothing was trained on, in the same places each time."""
    model.eval()
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint16).long()
    windows = data.unfold(0, CONTEXT + 1, len(data) // (HELD_OUT_BATCHES * BATCH_SIZE) - 1)
    losses = []
    for x in windows[: HELD_OUT_BATCHES * BATCH_SIZE].split(BATCH_SIZE):  # type: ignore[no-untyped-call]
        losses.append(model(x[:, :-1].contiguous(), x[:, 1:].contiguous())[1].item())
    return finite(sum(losses) / len(losses)) if losses else math.inf
