"""The hot stretch: a schedule multiplies the learning rate by F for D updates, beginning at step S.

The stretch belongs to the schedule, so it comes again after a rewind. Each of 72 seeded draws of F, D, S, the form of
the loop and the optimizer is trained four times: without the stretch (*clean*), with it by hand (*plain*), by hand
without the steps that are not finite (*skip only*), and with a guard around the loop (*guarded*). A run ends 150 steps
after its stretch, and is judged by the held-out loss of the weights that it leaves behind. The program is a small
character transformer on source text of Python's standard library.

    python -m clinic hot --json hot_stretch.json
    python -m clinic hot --only 17          # one draw, with what the guard says
    python -m clinic hot --stretch 100 10 100 --seeds 5      # this one in both forms, with AdamW

The bounds are those of the functions `near`, `is_out_of_reference` and `is_worse`.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import functools
import itertools
import json
import logging
import math
import multiprocessing
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from clinic.hot_stretch_letters import Draw, Ended, arm, clean_runs, finite

Arm = Callable[[str, Draw, int], Ended]  # its name, a draw, a seed

FACTORS, LENGTHS, STARTS = (30, 100, 1000), (5, 10, 40), (20, 40, 100, 150)
FORMS, OPTIMIZERS = ("objective", "handed over"), ("adamw", "sgd")
WINDOW = 20  # steps that a median of training losses is of
SEEDS = 3  # of the runs that tell how much an end varies by itself


def draws(seed: int) -> list[Draw]:
    """Draw half of all 144 combinations: each value equally often, and about so in each beginning of the list."""
    numbers = random.Random(seed)
    left: list[tuple[Any, ...]] = []
    for place in itertools.product(FACTORS, LENGTHS, STARTS):
        turned = numbers.random() < 0.5
        optimizers = OPTIMIZERS[::-1] if turned else OPTIMIZERS
        left += [(*place, form, optimizer) for form, optimizer in zip(FORMS, optimizers, strict=True)]
    numbers.shuffle(left)
    counts: dict[tuple[int, Any], int] = {}
    made: list[Draw] = []
    while left:
        # the least common values first; of combinations that are equal in this, the first
        values = min(left, key=lambda one: sum(counts.get(pair, 0) for pair in enumerate(one)))
        left.remove(values)
        for pair in enumerate(values):
            counts[pair] = counts.get(pair, 0) + 1
        factor, length, start, form, optimizer = values
        made.append(Draw(len(made), factor, length, start, form, optimizer, seed + len(made) % SEEDS))
    return made


# ------------------------------------------------------------------------------------------------------------ judging


@dataclass
class Judged:
    """What became of one draw."""

    draw: Draw
    program: str
    clean: float = math.nan
    plain: float = math.nan
    plain_seeds: list[float] = field(default_factory=list)
    skip_only: float = math.nan
    guarded: float = math.nan
    said: str = ""
    incidents: int = 0
    why: str = ""
    before: float = math.nan  # the median training loss before the stretch, of the clean run
    after: float = math.nan  # and at the end of the guarded one
    out_of_reference: bool = False
    worse: bool = False
    seconds: float = 0.0
    error: str = ""  # of this script

    def near(self, arm: str) -> bool:
        return not self.error and bool(getattr(self, arm) <= 1.05 * self.clean)

    @property
    def dishonest(self) -> bool:
        return self.said == "well" and self.out_of_reference

    def __str__(self) -> str:
        if self.error:
            return f"{self.program} {self.draw}: HARNESS ERROR {self.error}"
        words = [
            *(["DISHONEST"] if self.dishonest else []),
            *(["WORSE"] if self.worse else []),
            *([] if self.near("guarded") else ["not near"]),
        ]
        losses = " / ".join(f"{one:.3f}" for one in (self.clean, self.plain, self.skip_only, self.guarded))
        end = f"training loss {self.before:.3f} before, {self.after:.3f} at the end"
        told = f'said "{self.said}", {self.incidents} incidents' + (f" ({self.why[:160]})" if self.why else "")
        return f"{self.program} {self.draw}: {', '.join(words) or 'near'}; {losses}; {end}; {told}"


def is_out_of_reference(before: Sequence[float], last: Sequence[float]) -> bool:
    """Say whether a run ends above where its clean twin was before the stretch, by 3 standard errors and 3 %.

    The standard error is that of the median before the stretch: a run that swings must not widen its own bound.
    """
    error = math.sqrt(math.pi / 2) * statistics.stdev(before) / math.sqrt(len(before))
    bound = 1.03 * statistics.median(before) + 3 * error
    return not last or not statistics.median(finite(one) for one in last) <= bound


def is_worse(loss: float, plain: Sequence[float]) -> bool:
    """Say whether a loss lies above those of plain runs by 2 standard deviations, and by 5 % of their mean.

    The first of them is that of the same seed: a loss that is not above it is not worse, whatever the others are.
    """
    if loss <= plain[0] or not all(math.isfinite(one) for one in plain):
        return False
    mean = statistics.fmean(plain)
    return loss > max(mean + 2 * statistics.stdev(plain), 1.05 * mean)


def judged(program: str, draw: Draw, clean: Ended, skip_only: Ended, plain: Sequence[Ended], guard: Ended) -> Judged:
    """Judge one draw; the first of the plain runs is that of its own seed."""
    before, last = clean.losses[draw.start - WINDOW : draw.start], guard.losses[-WINDOW:]
    seeds = [one.held_out for one in plain]
    return Judged(
        draw, program, clean.held_out, seeds[0], seeds, skip_only.held_out, guard.held_out, guard.said,
        guard.incidents, guard.why, statistics.median(before),
        statistics.median([finite(one) for one in last] or [math.inf]),
        is_out_of_reference(before, last), is_worse(guard.held_out, seeds),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ running


def all_arms(name: str, arm: Arm, draw: Draw, seeds: Sequence[int], clean: Ended) -> Judged:
    """Train the other arms of one draw, and judge it."""
    skip_only = arm("skip only", draw, draw.seed)
    # without a step that it skipped it is the plain run, bit for bit
    own = arm("plain", draw, draw.seed) if skip_only.skipped else skip_only
    guard = arm("guarded", draw, draw.seed)
    # only a run that ends above its plain twin can be worse than plain ones of other seeds
    others = [seed for seed in seeds if seed != draw.seed and guard.held_out > own.held_out]
    return judged(name, draw, clean, skip_only, [own, *(arm("plain", draw, seed) for seed in others)], guard)


def at_once(jobs: Sequence[Callable[[], Any]], workers: int, shows: bool) -> Iterator[tuple[int, Any]]:
    """Yield the number of each job and what it returned, or the exception that it raised, as they end."""
    left, context = dict(enumerate(jobs)), multiprocessing.get_context("spawn")
    for _ in range(3):  # a process that is killed takes the pool with it
        with futures.ProcessPoolExecutor(workers, context, initializer=begin, initargs=(shows,)) as pool:
            numbers = {pool.submit(timed, job): number for number, job in left.items()}
            for one in futures.as_completed(numbers):
                error = one.exception()
                if not isinstance(error, BrokenProcessPool):
                    del left[numbers[one]]
                    yield numbers[one], one.result() if error is None else error
        if not left:
            return
    for number in left:
        yield number, RuntimeError("its process, or the one beside it, was killed")


def begin(shows: bool) -> None:
    """Set up a worker process."""
    torch.set_num_threads(1)
    logging.basicConfig(format="    %(message)s", level=logging.INFO if shows else logging.CRITICAL)
    logging.getLogger("resilient_train").setLevel(logging.INFO if shows else logging.CRITICAL)


def timed(job: Callable[[], Any]) -> Any:
    """Run a job, and note how long it took; of an error, where it was."""
    started = time.monotonic()
    try:
        made = job()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})") from None
    if isinstance(made, Judged):
        made.seconds = time.monotonic() - started
    return made


@dataclass
class Program:
    """A program: what makes its clean runs, and what makes each of the other arms."""

    name: str
    draws: list[Draw]
    clean: Callable[[str, int, Sequence[int]], dict[int, Ended]]
    arm: Arm
    about: str = ""

    def run(self, seeds: Sequence[int], workers: int, shows: bool) -> tuple[list[Judged], dict[str, float]]:
        """Return the draws, judged, and by optimizer how much the longest clean runs of the seeds differ."""
        longest: dict[str, int] = {}
        for one in self.draws:
            longest[one.optimizer] = max(one.steps, longest.get(one.optimizer, 0))
        stops = {
            (name, seed): {steps, *(one.steps for one in self.draws if (one.optimizer, one.seed) == (name, seed))}
            for name, steps in longest.items()
            for seed in seeds
        }
        keys = list(stops)
        cleans: dict[tuple[str, int], dict[int, Ended]] = {}
        jobs: list[Callable[[], Any]] = [functools.partial(self.clean, *key, sorted(stops[key])) for key in keys]
        for number, made in at_once(jobs, workers, shows):
            say(f"{self.name}: clean, {keys[number]}: {made if isinstance(made, Exception) else 'done'}")
            cleans[keys[number]] = {} if isinstance(made, Exception) else made
        ends: dict[int, Judged] = {}
        for one in self.draws:
            if one.steps not in cleans[one.optimizer, one.seed]:
                ends[one.number] = Judged(one, self.name, error="its clean run failed")
        ready = [one for one in self.draws if one.number not in ends]
        arms = functools.partial(all_arms, self.name, self.arm)
        jobs = [functools.partial(arms, one, seeds, cleans[one.optimizer, one.seed][one.steps]) for one in ready]
        for number, made in at_once(jobs, workers, shows):
            draw = ready[number]
            end = Judged(draw, self.name, error=str(made)) if isinstance(made, Exception) else made
            ends[draw.number] = end
            say(f"[{len(ends)}/{len(self.draws)}] {end} [{end.seconds:.1f} s]")
        finals = {name: [cleans[name, seed].get(steps) for seed in seeds] for name, steps in longest.items()}
        differ = {name: spread([one.held_out for one in made if one is not None]) for name, made in finals.items()}
        return [ends[one.number] for one in self.draws], differ


def spread(losses: Sequence[float]) -> float:
    """Two standard deviations, as a fraction of the mean."""
    return 2 * statistics.stdev(losses) / statistics.fmean(losses) if len(losses) > 1 else math.nan


# ------------------------------------------------------------------------------------------------------------ telling


def table(ends: Sequence[Judged]) -> str:
    """Put the counts by F and by S into a table."""
    lines = [
        "| | runs | near: plain | near: skip only | near: guarded | dishonest | worse | gave up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups = [(f"F = {one}", [end for end in ends if end.draw.factor == one]) for one in FACTORS]
    groups += [(f"S = {one}", [end for end in ends if end.draw.start == one]) for one in STARTS]
    for name, group in [*groups, ("all", list(ends))]:
        sound = [one for one in group if not one.error]
        near = [sum(one.near(arm) for one in sound) for arm in ("plain", "skip_only", "guarded")]
        words = [sum(one.dishonest for one in sound), sum(one.worse for one in sound), *[said(sound, "gave up")]]
        lines.append(f"| {name} | {' | '.join(map(str, [len(sound), *near, *words]))} |")
    return "\n".join(lines)


def said(ends: Sequence[Judged], word: str) -> int:
    return sum(one.said == word for one in ends)


def report(program: Program, ends: Sequence[Judged], spreads: dict[str, float], seconds: float) -> str:
    """Write down what became of one program."""
    odd = [one for one in ends if one.error or one.dishonest or one.worse or not one.near("guarded")]
    words = ", ".join(f"{said(ends, word)} {word}" for word in ("well", "not recovered", "gave up", "failed"))
    errors = sum(bool(one.error) for one in ends)
    differ = ", ".join(f"{100 * value:.1f} % with {name}" for name, value in spreads.items())
    return "\n".join(
        [
            f"## {program.name}: {program.about}",
            "",
            table(ends),
            "",
            f"Guarded runs said: {words}. Harness errors: {errors}. {seconds:.0f} s.",
            f"Two standard deviations of the longest clean runs: {differ}.",
            "",
            "Dishonest, worse or not near (held-out losses of clean / plain / skip only / guarded):",
            "",
            *[f"- {one}" for one in odd],
            "",
        ]
    )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=72, help="the first so many of 72")
    parser.add_argument(
        "--only", type=int, nargs="+", default=None, metavar="NUMBER", help="these draws, told at length"
    )
    parser.add_argument("--stretch", type=int, nargs=3, metavar=("F", "D", "S"), help="instead of drawn ones")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=None, help="write every draw there")
    return parser.parse_args()


def main() -> None:
    """Run the programs, and print their tables."""
    given = arguments()
    torch.set_num_threads(1)
    every = draws(given.seed)
    seeds = [given.seed + one for one in range(given.seeds)]
    if given.stretch:
        factor, length, start = given.stretch
        pairs = enumerate(itertools.product(FORMS, seeds))
        every = [Draw(number, factor, length, start, form, "adamw", seed) for number, (form, seed) in pairs]
    chosen = [one for one in every if one.number in given.only] if given.only else every[: given.draws]
    programs = [Program("letters", chosen, clean_runs, arm, f"a character transformer, {len(chosen)} draws")]
    everything: list[Judged] = []
    for program in programs:
        started = time.monotonic()
        ends, spreads = program.run(seeds, given.workers, shows=bool(given.only))
        print(report(program, ends, spreads, time.monotonic() - started), flush=True)
        everything += ends
    if given.json is not None:
        made = [{**asdict(one), "near": one.near("guarded"), "dishonest": one.dishonest} for one in everything]
        given.json.write_text(json.dumps(made, indent=1), encoding="utf-8")
    sys.exit(any(one.error for one in everything))
