"""What is lost when a run is killed, again and again, and the same command goes on with it.

One run is killed at random moments (on the way into it, in updates, in saves), another one within 30 ms of the start
of saves; both keep an average of their weights. After each kill the files are judged by no code of ours, then the
command is started again, unchanged. At the end each has to be the run that nobody killed, bit for bit. The policy is
told to forgive all kills (recovery.crashes=null): that the very same update is met twice in a row is chance here.

    python benchmarks/killed.py                              300 and 200 kills: a quarter of an hour
    python benchmarks/killed.py --random 10 --saves 10
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from kills import Moment, Nursery, Struck, after, at_save, at_tick, command, killed, left_overs, summary

EVERY, MEMORY, PROOF = 20, 10, 12
RUN = ["model=mlp", "data=digits", "objective=classification", "tracking=none", "run.log_every=1000"]
RUN += [f"checkpoint.disk.every={EVERY}", f"checkpoint.memory.every={MEMORY}", f"checkpoint.verify_after={PROOF}"]
RUN += ["recovery.crashes=null"]
STEPS_A_KILL = 60  # that a run is long, so that it does not end before the last kill

Moments = Sequence[tuple[str, Callable[[int], Moment]]]


def keeping(*arguments: str) -> None:
    """The command, whose run keeps an average of its weights, as a loop of a user's does."""
    from torch.optim.swa_utils import AveragedModel

    from resilient_train.loop.guard import Guard

    class Keeping(Guard):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.average = AveragedModel(self.state.model, use_buffers=True)
            self.keep(average=self.average)

        def step(self, batch: Any) -> Any:
            if result := super().step(batch):
                self.average.update_parameters(self.state.model)
            return result

    from resilient_train.command import build

    vars(build)["Guard"] = Keeping
    command(*arguments)


def at_random(run_dir: Path, number: int, numbers: random.Random) -> Moments:
    """One in ten on the way into the run, the others somewhere in the loop."""

    def moment() -> tuple[str, Callable[[int], Moment]]:
        if numbers.random() < 0.1:
            seconds = numbers.uniform(0.0, 0.6)
            return "start", lambda begun: after(seconds)
        ticks, delay_s = numbers.randint(1, 110), numbers.uniform(0.0, 0.005)
        return "update", lambda begun: at_tick(run_dir, begun + ticks, delay_s)

    return [moment() for _ in range(number)]


def in_saves(run_dir: Path, number: int, numbers: random.Random) -> Moments:
    """Within 30 ms of the start of the first, second or third save behind a start."""

    def moment() -> tuple[str, Callable[[int], Moment]]:
        nth, delay_s = numbers.randint(1, 3), numbers.uniform(0.0, 0.03)
        return "save", lambda begun: at_save(run_dir, begun, nth, delay_s)

    return [moment() for _ in range(number)]


def judged(struck: Sequence[Struck]) -> dict[str, Any]:
    """What the table says of kills."""
    beyond = [one.lost - (EVERY + MEMORY + PROOF + 1 + one.writing) for one in struck]
    return {
        "kills": len(struck),
        "resumed": len(struck),  # else there would be no table
        "not from the newest": sum(one.resumed != one.newest for one in struck),
        "unsound checkpoints": sum(len(one.unsound) for one in struck),
        "most lost": max(one.lost for one in struck),
        "of them while writing": max(struck, key=lambda one: one.lost).writing,
        "beyond the bound": sum(one > 0 for one in beyond),
        "nearest to the bound": -max(beyond),
        "most left over": max(len(one.left_overs) for one in struck),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=300, help="kills at random moments")
    parser.add_argument("--saves", type=int, default=200, help="kills within 30 ms of the start of a save")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the raw figures here")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="kills-"))
    rows: dict[str, dict[str, Any]] = {}
    raw: dict[str, Any] = {}
    with Nursery(place, keeping) as nursery:
        for name, make, number in (("random", at_random, options.random), ("saves", in_saves, options.saves)):
            if not number:
                continue
            began, run_dir = time.monotonic(), place / name
            steps = f"run.steps={STEPS_A_KILL * number + 400}"
            unharmed = nursery.run(*RUN, steps, f"run.dir={name}-unharmed")
            assert unharmed.code == 0, unharmed.output
            struck = []
            moments = make(run_dir, number, random.Random(options.seed))
            for one in killed(nursery, [*RUN, steps, f"run.dir={name}"], run_dir, moments, STEPS_A_KILL * number + 380):
                struck.append(one)
                if len(struck) % 20 == 0:
                    print(f"{name}: {len(struck)} kills, at step {one.resumed}", file=sys.stderr, flush=True)
            done, plain = summary(run_dir), summary(place / f"{name}-unharmed")
            rows[name] = judged(struck) | {
                "left over at the end": len(left_overs(run_dir)),
                "same weights": done["weights_sha256"] == plain["weights_sha256"],
                "same state": done["state_sha256"] == plain["state_sha256"],
                "updates": done["steps"],
                "made again": done["ticks"] - done["steps"],
                "minutes": round((time.monotonic() - began) / 60, 1),
            }
            raw[name] = [as_node(one) for one in struck]
    for key in next(iter(rows.values())):
        print(f"| {key} | " + " | ".join(str(row[key]) for row in rows.values()) + " |")
    if options.json:
        options.json.write_text(json.dumps({"table": rows, "kills": raw}, indent=1))
    shutil.rmtree(place)
    is_well = all(
        row["same weights"] and row["same state"] and not row["beyond the bound"] and not row["unsound checkpoints"]
        for row in rows.values()
    )
    sys.exit(0 if is_well else 1)


def as_node(struck: Struck) -> dict[str, Any]:
    """One kill, for a file."""
    return {name: getattr(struck, name) for name in Struck.__dataclass_fields__} | {"lost": struck.lost}


if __name__ == "__main__":
    main()
