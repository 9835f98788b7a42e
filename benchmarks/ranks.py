"""The same faults on 1, 2 and 4 processes: are they cured in the same way, and do they end at the same loss?

A fault strikes one rank only, the last one, or its rows lie on whichever rank meets them. An update is made of the same
samples however many processes share them, and no dropout is on, so two such runs differ by nothing but the order in
which numbers are added up. What has to agree: remedies in their order, causes, culprits and rows, and the final loss
within `TOLERANCE`, which is far above what rounding makes of it (the row without a fault shows that) and far below what
a single update more or less, or another remedy, would leave. All ranks have to end with the same weights, bit by bit.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --what hot_lr total_variation_of_void_tiles --processes 1 2

Real runs, each started by torchrun; the clinic's cases in a loop as a user would write it. Ends with 1 if any differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-3  # of the final loss
LIMIT_S = 420  # for one run
STEPS, SAMPLES = 300, 64  # of an update
SLICES = 4  # of an update of the clinic's cases, shared by the processes

MLP = ["model=mlp", "data=digits", "objective=classification", "optimizer.lr=3e-3"]
MLP += ["accelerate.cpu=true", "tracking=none", f"run.steps={STEPS}", "run.dir=run", "run.log_every=100"]
DRILLS: dict[str, Sequence[str]] = {
    "none": [],
    "nan_batch": ["drill.rank={last}"],
    "nan_grad": ["drill.rank={last}"],
    "inf_loss": ["drill.rank={last}"],
    "loss_spike": ["drill.rank={last}"],
    "bit_flip": ["drill.rank={last}"],
    "bad_moments": ["drill.rank={last}"],
    "bad_row": ["drill.rows=[17,230]"],  # each on one rank by nature
    "hot_lr": [],  # a schedule is wrong everywhere; of one rank alone its replica would run away
    "gauntlet": [],  # the same on one rank, see _gauntlet
}
CASES = {  # of the clinic, with what is to blame
    "nan_inputs": "first",  # rows
    "total_variation_of_void_tiles": "second",  # an operation
    "repeated_squaring": "first",  # an overflow, and rows that lead there
    "recurrent_explosion": "first",  # an explosion
}


@dataclass(frozen=True)
class Ended:
    """How one run ended."""

    processes: int
    incidents: list[dict[str, Any]]
    loss: float
    weights: list[str]  # of each rank
    seconds: float

    @property
    def cures(self) -> list[tuple[Any, ...]]:
        """What has to be the same on any number of processes: nothing that names a rank, or a measured number."""
        return [
            (one["cause"], tuple(action["remedy"] for action in one["actions"]), _place(one["culprit"]), one["rows"])
            for one in self.incidents
        ]

    def told(self) -> str:
        """In a cell of a table."""
        agrees = "weights equal" if len(set(self.weights)) == 1 else "WEIGHTS DIFFER"
        many = f", {agrees} on {len(self.weights)}" if self.processes > 1 else ""
        lines = [f"loss {self.loss:.5g}{many}"]
        for one in self.incidents:
            remedies = " + ".join(action["remedy"] for action in one["actions"]) or "-"
            rank = "" if one["rank"] is None else f", rank {','.join(map(str, one['ranks']))}"
            rows = f", rows {one['rows']}" if one["rows"] else ""
            where = one["culprit"]
            line = f", `{where['op']}` at {Path(where['file']).name}:{where['line']}" if where else ""
            lines.append(f"{one['step']}: {one['signal']}, {one['cause']}{line}{rows}{rank}: {remedies}")
        return "<br>".join(lines)


def _place(culprit: dict[str, Any] | None) -> tuple[Any, ...] | None:
    if culprit is None:
        return None
    return culprit["phase"], culprit["op"], Path(culprit["file"]).name, culprit["line"]


def differences(one: Ended, other: Ended) -> Iterator[str]:
    """Say in what a run on several processes is not what it is on one."""
    names = f"{other.processes} processes"
    if one.cures != other.cures:
        yield f"{names}: {other.cures} instead of {one.cures}"
    if not abs(one.loss - other.loss) <= TOLERANCE * abs(one.loss):
        yield f"{names}: final loss {other.loss:.6g} instead of {one.loss:.6g}"
    if len(other.weights) != other.processes or len(set(other.weights)) != 1:
        yield f"{names}: the weights of the ranks are {[sha[:8] for sha in other.weights]}"


# ------------------------------------------------------------------------------------------------------------- the runs


def run(what: str, processes: int, folder: Path, more: Sequence[str] = ()) -> Ended:
    """Train on so many processes in an empty folder."""
    folder.mkdir(parents=True)
    begun = time.monotonic()
    if what in CASES:
        told = _launched([str(Path(__file__).resolve()), "--loop", what], processes, folder)
        learned = [json.loads(line) for line in re.findall(r"^LEARNED (.*)$", told, re.MULTILINE)]
        incidents = _lines(folder / "run" / "incidents.jsonl")
        weights, loss = [one["weights"] for one in learned], learned[0]["loss"]
    else:
        drill = [f"drill={what}", *(one.format(last=processes - 1) for one in DRILLS[what])]
        if what == "gauntlet":
            drill = [f"drill.faults={_gauntlet(processes - 1)}"]
        size = [f"data.batch_size={SAMPLES // processes}"]
        _launched(["-m", "resilient_train", *MLP, *size, *drill, *more], processes, folder)
        incidents = _lines(folder / "run" / "incidents.jsonl")
        loss = json.loads((folder / "run" / "summary.json").read_text())["final_loss"]
        logs = [folder / "run" / ("train.log" if rank == 0 else f"train.rank{rank}.log") for rank in range(processes)]
        weights = [sha for log in logs for sha in re.findall(r"weights_sha256 ([0-9a-f]{64})", log.read_text())]
    incidents.sort(key=lambda one: one["id"])
    return Ended(processes, incidents, loss, weights, time.monotonic() - begun)


def _gauntlet(rank: int) -> str:
    """One of each on one rank, at the places of the drill of that name."""
    at = {"nan_batch": 0.15, "nan_grad": 0.25, "inf_loss": 0.35, "loss_spike": 0.45, "bit_flip": 0.55}
    at |= {"bad_moments": 0.65}
    struck = ",".join(f"{{{name}:{{at:[{when}],rank:{rank}}}}}" for name, when in at.items())
    return f"[{{bad_row:{{share:0.002}}}},{struck},{{hot_lr:{{at:[0.75]}}}}]"


def _launched(command: Sequence[str], processes: int, folder: Path) -> str:
    """Start it by torchrun, and return what it says. One process goes the same way as several."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launcher, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} on {processes}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def loop(case: str) -> None:
    """A case of the clinic in a user's own loop, on one of the processes: prints what this rank ends with."""
    import torch
    from accelerate import Accelerator

    from resilient_train.adapters.guard import Guard

    # In the same micro-batches everywhere: what armor makes up is measured by what else is in the call.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=SLICES // int(os.environ["WORLD_SIZE"]))
    program = importlib.import_module(f"clinic.{CASES[case]}.{case}").program(0)
    torch.manual_seed(0)
    model = accelerator.prepare(program.model.train())
    guard = Guard(
        accelerator,
        model,
        program.optimizer(model.parameters()),
        data=program.rows,
        batch_size=program.batch_size // SLICES,
        steps=program.steps,
        objective=program.loss,
        collate=program.collate,
        clip=program.clip,
        run_dir="run",
    )
    for batch in guard.batches():
        guard.step(batch)
    learned = {"weights": guard.state.weights_sha256(), "loss": guard.recent_loss}
    guard.close()
    sys.stdout.write(f"LEARNED {json.dumps(learned)}\n")  # in one piece: all ranks write there
    sys.stdout.flush()
    guard.world.leave()


# ------------------------------------------------------------------------------------------------------------ the table


def main() -> None:
    """Run everything, print a table, and name what differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--what", nargs="+", default=[*DRILLS, *CASES], choices=[*DRILLS, *CASES])
    parser.add_argument(
        "--processes", nargs="+", type=int, default=[1, 2, 4], help="the first is what others are held to"
    )
    parser.add_argument("--keep", type=Path, default=None, help="leave the run directories there")
    parser.add_argument("--loop", choices=[*CASES], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.loop:
        loop(given.loop)
        return
    wrong: list[str] = []
    print("| | " + " | ".join(f"{number} process{'es' * (number > 1)}" for number in given.processes) + " |")
    print("|---" * (len(given.processes) + 1) + "|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        for what in given.what:
            ended = [run(what, number, (given.keep or Path(place)) / what / str(number)) for number in given.processes]
            print(f"| {what} | " + " | ".join(one.told() for one in ended) + " |", flush=True)
            wrong += [f"{what}, {why}" for other in ended[1:] for why in differences(ended[0], other)]
            print(f"{what}: {', '.join(f'{one.seconds:.0f} s' for one in ended)}", file=sys.stderr, flush=True)
    print("\n" + ("\n".join(f"DIFFERS {line}" for line in wrong) or "nothing differs"))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
