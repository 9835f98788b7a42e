"""Random ranks of a run, killed again and again under an elastic agent, which starts the processes again each time.

Each run is one command, `torchrun --max-restarts=N -m resilient_train ...`, and nobody helps it. A SIGKILL hits a
random rank at a random moment: nine in ten in the loop, behind a random update, the others within four seconds of the
start that another kill has made necessary. The time is taken from each kill to the next update that is accepted, as the
file `progress` in the run directory shows it. At the end the run has to be what it is if nobody kills, bit for bit.
The policy is told to forgive all kills (recovery.crashes=null): that the very same update is met twice in a row is
chance here.

    python benchmarks/ranks_killed.py                        50 kills of 2 processes and 50 of 3: half an hour
    python benchmarks/ranks_killed.py --kills 5 --processes 2
    python benchmarks/ranks_killed.py --cold --kills 5       each process imports what it needs, as it does elsewhere
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from kills import in_journal, incidents, left_overs, stand, summary
from launched import Launched

RUN = ["model=mlp", "data=digits", "objective=classification", "accelerate.cpu=true", "tracking=none"]
RUN += ["checkpoint.disk.every=20", "checkpoint.memory.every=10", "checkpoint.verify_after=12", "run.log_every=1000"]
RUN += ["recovery.crashes=null"]
# DDP deals gradients out to buckets anew behind the first update of a process, and with them the order in which three
# and more processes add up. Only without that is the first update after a restart the same to the last bit.
RUN += ["+accelerate.ddp.find_unused_parameters=true"]
STEPS_A_KILL = 80
WITHIN_S = 60.0
HUNG_S = 300.0
_UPDATING = 1  # in the file `progress`


@dataclass(frozen=True)
class Kill:
    """A process that was killed, and what became of it."""

    moment: str
    rank: int
    step: int  # accepted before it
    seconds: float  # to the next accepted update


def strike(launched: Launched, run_dir: Path, processes: int, numbers: random.Random) -> Kill:
    """Kill one rank at a random moment, and wait until the run has got on."""
    moment = "start" if numbers.random() < 0.1 else "update"
    if moment == "start":  # that is one more kill, of a start that another kill has made necessary
        ranks = launched.ranks()
        os.kill(ranks[numbers.randrange(processes)], signal.SIGKILL)
        launched.until(lambda: not set(launched.ranks().values()) & set(ranks.values()), HUNG_S)
        launched.until(lambda: len(launched.ranks()) == processes, HUNG_S)
        time.sleep(numbers.uniform(0.0, 4.0))
    else:
        begun, after = stand(run_dir).tick, numbers.randint(1, 2 * STEPS_A_KILL - 30)
        launched.until(lambda: stand(run_dir).tick >= begun + after, HUNG_S)
        time.sleep(numbers.uniform(0.0, 0.01))
    ranks, rank = launched.ranks(), numbers.randrange(processes)
    os.kill(ranks[rank], signal.SIGKILL)
    began = time.monotonic()
    launched.until(lambda: not set(launched.ranks().values()) & set(ranks.values()), HUNG_S)
    before = stand(run_dir)

    def got_on() -> bool:
        now = stand(run_dir)
        return now.number > before.number and now.doing == _UPDATING and now.tick >= before.tick + 2

    launched.until(got_on, HUNG_S)
    return Kill(moment, rank, before.step, time.monotonic() - began)


def killed(place: Path, processes: int, number: int, seed: int, *, cold: bool) -> tuple[dict[str, Any], list[Kill]]:
    """One run and its kills, as a row of the table."""
    began, run_dir, numbers = time.monotonic(), place / f"killed-{processes}", random.Random(seed)
    steps = f"run.steps={STEPS_A_KILL * number + 400}"
    with Launched(place, processes, *RUN, steps, f"run.dir=unharmed-{processes}") as unharmed:
        assert unharmed.wait(900.0) == 0, unharmed.output
    kills: list[Kill] = []
    own = [*RUN, steps, f"run.dir={run_dir.name}"]
    with Launched(place, processes, *own, restarts=2 * number, cold=cold) as launched:
        launched.until(lambda: stand(run_dir).tick > 20)
        while len(kills) < number:
            kills.append(strike(launched, run_dir, processes, numbers))
            print(f"{processes} processes: {kills[-1]}", file=sys.stderr, flush=True)
        code = launched.wait(900.0)
        print(*launched.output.splitlines()[-5:], sep="\n", file=sys.stderr)
    done, plain = summary(run_dir), summary(place / f"unharmed-{processes}")
    seconds = [one.seconds for one in kills]
    row = {
        "kills": len(kills),
        "of them on the way into the run": sum(one.moment == "start" for one in kills),
        "of rank 0": sum(one.rank == 0 for one in kills),
        "recovered by itself": len(kills) if code == 0 else 0,  # one that is not would have ended this
        "within 60 s": sum(one <= WITHIN_S for one in seconds),
        "seconds to the next update, median": round(statistics.median(seconds), 1),
        "seconds to the next update, most": round(max(seconds), 1),
        "incidents told": len(incidents(run_dir)),
        "of them crashes": sum(one["incident"]["signal"] == "crash" for one in in_journal(run_dir, "incident_closed")),
        "left over at the end": len(left_overs(run_dir)),
        "same weights": done["weights_sha256"] == plain["weights_sha256"],
        "same state": done["state_sha256"] == plain["state_sha256"],
        "updates": done["steps"],
        "made again": done["ticks"] - done["steps"],
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    return row, kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the raw figures here")
    parser.add_argument("--cold", action="store_true", help="do not fork from where everything is imported already")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="ranks-killed-"))
    given = options.kills, options.seed
    found = {f"{number} processes": killed(place, number, *given, cold=options.cold) for number in options.processes}
    rows = {name: row for name, (row, _) in found.items()}
    print("| | " + " | ".join(rows) + " |\n|---|" + "---|" * len(rows))
    for key in next(iter(rows.values())):
        print(f"| {key} | " + " | ".join(str(row[key]) for row in rows.values()) + " |")
    if options.json:
        kills = {name: [asdict(one) for one in kills] for name, (_, kills) in found.items()}
        options.json.write_text(json.dumps({"table": rows, "kills": kills}, indent=1))
    is_well = all(
        row["same weights"] and row["same state"] and row["recovered by itself"] == row["within 60 s"] == row["kills"]
        for row in rows.values()
    )
    if is_well:
        shutil.rmtree(place)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
