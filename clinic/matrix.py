"""A matrix of random faults: small programs of many kinds, each with a fault drawn for it, with a guard and without.

Every faulty run is made by *plain*, the loop one writes by hand, with clipping (twice, to know how chance moves it), by
*skip only*, the same without the steps whose loss or gradient norm is not finite, and by the *guarded* loop: the guard
as it comes. *Clean* runs without a fault say what could be had. The fault, the data and their order are the same for
all of them. Healthy runs are there for false alarms.

    python -m clinic matrix --workers 2 --json matrix.json
    python -m clinic matrix --only 17 42            # two of the runs, and what the guard said
    python -m clinic matrix --families leap weights # a part of it
    python -m clinic matrix --recipes               # what the programs learn without a fault

A run is *good* when its held-out loss ends within 10 % of the way from the first weights to the clean end. It is
*honest* when it is good, or does not say that all is well. It is *worse* when it ends above the plain loop by more than
10 % of the way. The same seed draws the same runs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clinic.matrix_faults import FAMILIES, Fault
from clinic.matrix_loops import Ended, Job, started_worker, work
from clinic.matrix_programs import ODD, RECIPES, Recipe

RUNS_OF_FAMILY = 6
SOUND = ("well", "no progress")  # of a healthy run: the loss of a game need not fall
CLEAN_SEEDS = 3
SHARE = 0.1  # of the way from the first weights to the clean end
CAP = 10.0  # a loss above this many times the first one is no worse than that


# --------------------------------------------------------------------------------------------------------------- draws


@dataclass
class Run:
    """One run of the matrix, and what became of it under each arm."""

    number: int
    recipe: str
    optimizer: str
    seed: int
    hands_over: bool
    fault: Fault | None
    ends: dict[str, Ended] = field(default_factory=dict)
    marks: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.fault.family if self.is_faulty and self.fault else "healthy"

    @property
    def is_faulty(self) -> bool:
        return self.fault is not None and self.recipe not in ODD

    def jobs(self, with_log: bool) -> Iterator[Job]:
        for arm in ("plain", "again", "skip", "twin", "guarded") if self.is_faulty else ("guarded",):
            about = (self.number, self.recipe, self.optimizer, self.seed, arm)
            yield Job(*about, None if arm == "twin" else self.fault, self.hands_over, with_log)

    def __str__(self) -> str:
        form = "handed over" if self.hands_over else "objective"
        return f"#{self.number} {self.recipe}, {self.optimizer}, {form}, {self.fault or 'no fault'}"


def drawn(seed: int) -> list[Run]:
    """Draw the whole matrix."""
    runs: list[Run] = []
    for name, family in FAMILIES.items():
        dice = random.Random(f"{seed} {name}")
        pools = [_pairs(dice, is_classic=one, fits=family.fits) for one in (False, True)]
        forms = dice.sample([True] * (RUNS_OF_FAMILY // 3) + [False] * (2 * RUNS_OF_FAMILY // 3), RUNS_OF_FAMILY)
        for turn, hands_over in enumerate(forms):
            pool = pools[turn % 2] or pools[(turn + 1) % 2]
            recipe, optimizer = pool[turn // 2 % len(pool)]
            fault = family.draw(dice, RECIPES[recipe], turn)
            fault = Fault(**asdict(fault) | {"seed": dice.randrange(10**6)})
            runs.append(Run(len(runs), recipe, optimizer, dice.randrange(100, 10**4), hands_over, fault))
    dice = random.Random(f"{seed} healthy")
    pairs = [pair for one in (False, True) for pair in _pairs(dice, is_classic=one)]
    for turn in range(20):
        recipe, optimizer = pairs[turn % len(pairs)]
        runs.append(Run(len(runs), recipe, optimizer, dice.randrange(100, 10**4), turn % 3 == 2, None))
    for turn, recipe in enumerate(("gan", "bandit", "curriculum", "steep", "gan", "bandit")):
        (optimizer,) = ODD[recipe].rates
        fault = Fault("NaN loss", start=dice.randint(40, 250))
        runs.append(Run(len(runs), recipe, optimizer, dice.randrange(100, 10**4), turn % 3 == 2, fault))
    return runs


def _pairs(
    dice: random.Random, *, is_classic: bool, fits: Callable[[Recipe, str], bool] = lambda recipe, optimizer: True
) -> list[tuple[str, str]]:
    """List recipes with their optimizers in a random order, all recipes once before any comes twice."""
    rounds: list[list[tuple[str, str]]] = [[], []]
    for name, recipe in RECIPES.items():
        rates = dice.sample(sorted(recipe.rates), len(recipe.rates))
        if recipe.is_classic is is_classic:
            for turn, optimizer in enumerate(rates):
                if fits(recipe, optimizer):
                    rounds[turn].append((name, optimizer))
    for each in rounds:
        dice.shuffle(each)
    return [*rounds[0], *rounds[1]]


# ----------------------------------------------------------------------------------------------------------- judgement


@dataclass(frozen=True)
class Clean:
    """What a program comes to without a fault, on average."""

    first: float
    late: float
    loss: float
    spread: float

    @property
    def way(self) -> float:
        return self.first - self.loss

    def is_good(self, loss: float) -> bool:
        return math.isfinite(loss) and loss <= self.loss + SHARE * self.way

    def capped(self, loss: float) -> float:
        return min(loss, CAP * abs(self.first)) if math.isfinite(loss) else CAP * abs(self.first)


def clean_of(ends: Iterable[Ended]) -> Clean:
    firsts, lates, losses = zip(*((end.first, end.late, end.loss) for end in ends), strict=True)
    means = (statistics.fmean(firsts), statistics.fmean(lates), statistics.fmean(losses))
    return Clean(*means, max(losses) - min(losses))


def judge(run: Run, clean: Clean) -> None:
    """Mark a run, by its held-out loss and by what it said."""
    guarded = run.ends["guarded"]
    if run.is_faulty:  # a seed that ends badly without a fault can end no better with one
        clean = replace(clean, loss=max(clean.loss, run.ends["twin"].loss))
    if not run.is_faulty:
        allowed = 1 if run.fault else 0  # the one refused update
        refused = [one for one in guarded.incidents if one["signal"].startswith("nonfinite")][:allowed]
        run.marks = {"false alarm": len(guarded.incidents) > len(refused) or guarded.said not in SOUND}
        return
    is_good = clean.is_good(guarded.loss)
    plain = [run.ends[arm].loss for arm in ("plain", "again")]
    bound = math.inf
    if all(map(math.isfinite, plain)):
        both = [clean.capped(loss) for loss in plain]
        bound = statistics.fmean(both) + max(both) - min(both) + SHARE * clean.way
    run.marks = {
        "plain good": clean.is_good(plain[0]),
        "skip good": clean.is_good(run.ends["skip"].loss),
        "good": is_good,
        "honest": is_good or guarded.said != "well",
        "worse": clean.capped(guarded.loss) > bound,
        "gave up": guarded.said == "gave up",
    }
    if not is_good or run.marks["worse"]:
        ends = f"{guarded.loss:.4g} (clean {clean.loss:.4g}, at first {clean.first:.4g}, plain {plain[0]:.4g})"
        run.marks["reason"] = (
            f"ended at {ends}, {_share(guarded.loss, clean)}, said {guarded.said} {guarded.why}".strip()
        )


def _share(loss: float, clean: Clean) -> str:
    return f"{100 * (loss - clean.loss) / clean.way:.0f} % of the way" if math.isfinite(loss) else "not finite"


def verdict(run: Run) -> str:
    """Say in a line what is wrong with a run; empty if nothing is."""
    guarded, marks = run.ends["guarded"], run.marks
    wrong = [word for word, is_wrong in _wrong(marks).items() if is_wrong]
    met = ", ".join(f"{one['signal']} ({one['cause']})" for one in guarded.incidents[:6])
    met += f" and {len(guarded.incidents) - 6} more" if len(guarded.incidents) > 6 else ""
    told = marks.get("reason", f"said {guarded.said} {guarded.why}".strip())
    return f"{run}: {', '.join(wrong).upper()}: {told}; met {met or 'nothing'}" if wrong else ""


def _wrong(marks: dict[str, Any]) -> dict[str, bool]:
    found = {f"not {word}": not marks.get(word, True) for word in ("good", "honest")}
    return found | {word: bool(marks.get(word)) for word in ("worse", "false alarm")}


MARKS = ("plain good", "skip good", "good", "honest", "worse", "gave up")


def table(runs: list[Run]) -> str:
    """Count by family."""
    faulty = [run for run in runs if run.is_faulty]
    lines = ["| family | runs | plain good | skip good | guarded good | honest | worse | gave up |", "|---" * 8 + "|"]
    for family in [*dict.fromkeys(run.family for run in faulty), "all"]:
        some = [run for run in faulty if family in ("all", run.family)]
        counts = [sum(bool(run.marks[mark]) for run in some) for mark in MARKS]
        lines.append(f"| {family} | {len(some)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------- main


def finished(jobs: list[Job], workers: int) -> Iterator[tuple[Job, Ended]]:
    """Do all jobs, in processes of their own."""
    context, started = multiprocessing.get_context("spawn"), time.monotonic()
    with ProcessPoolExecutor(workers, context, initializer=started_worker) as pool:
        futures: dict[Future[Ended], Job] = {pool.submit(work, job): job for job in jobs}
        for count, future in enumerate(as_completed(futures), start=1):
            error = future.exception()
            yield futures[future], Ended(said="failed", why=f"worker: {error}") if error else future.result()
            passed = time.monotonic() - started
            print(f"\r{count} of {len(jobs)} loops, {passed:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def cleaned(pairs: Iterable[tuple[str, str]], seed: int) -> list[Job]:
    return [Job(-1, *pair, seed=1000 * seed + one, arm="clean") for pair in pairs for one in range(CLEAN_SEEDS)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", default=None, metavar="NUMBER", help="and show what was said")
    parser.add_argument("--families", nargs="+", default=None, choices=[*FAMILIES, "healthy"], metavar="NAME")
    parser.add_argument("--json", type=Path, default=None, help="write every run there")
    parser.add_argument("--recipes", action="store_true", help="only the clean runs: what is there to be learned?")
    return parser.parse_args()


def report(runs: list[Run], given: argparse.Namespace) -> None:
    """Print the tables, and every run that did not go as it should."""
    print(table(runs))
    healthy = [run for run in runs if not run.is_faulty]
    alarms = sum(run.marks["false alarm"] for run in healthy)
    print(f"\nfalse alarms in {alarms} of {len(healthy)} healthy runs\n")
    print("\n".join(filter(None, map(verdict, runs))))
    if given.only:
        for run in runs:
            shares = ", ".join(f"{arm} {end.loss:.4g}" for arm, end in run.ends.items())
            print(f"\n{run}\n{shares}\n{run.marks}", *run.ends["guarded"].log, sep="\n")


def main() -> None:
    """Draw, run, judge and tell."""
    given, started = arguments(), time.monotonic()
    runs = drawn(given.seed)
    if given.families or given.only:
        runs = [run for run in runs if run.family in (given.families or ()) or run.number in (given.only or ())]
    pairs = dict.fromkeys((run.recipe, run.optimizer) for run in runs if run.is_faulty)
    if given.recipes:
        runs, pairs = [], dict.fromkeys((name, one) for name, recipe in RECIPES.items() for one in recipe.rates)
    jobs = [*cleaned(pairs, given.seed), *(job for run in runs for job in run.jobs(bool(given.only)))]
    clean_ends: dict[tuple[str, str], list[Ended]] = {pair: [] for pair in pairs}
    by_number = {run.number: run for run in runs}
    for job, end in finished(jobs, given.workers):
        if job.arm == "clean":
            clean_ends[job.recipe, job.optimizer].append(end)
        else:
            by_number[job.number].ends[job.arm] = end
    cleans = {pair: clean_of(ends) for pair, ends in clean_ends.items()}
    if given.recipes:
        for (name, optimizer), clean in cleans.items():
            late = _share(clean.late, clean)
            seconds = statistics.fmean(end.seconds for end in clean_ends[name, optimizer])
            spread = f"spread {100 * clean.spread / clean.way:.1f} %"
            told = f"{clean.first:.4g} to {clean.loss:.4g}, at two thirds {late} left, {spread}, {seconds:.1f} s"
            print(f"{name} {optimizer}: {told}")
        return
    nothing = Clean(math.nan, math.nan, math.nan, math.nan)
    for run in runs:
        judge(run, cleans.get((run.recipe, run.optimizer), nothing))
    report(runs, given)
    print(f"\n{len(runs)} runs, {len(jobs)} loops in {time.monotonic() - started:.0f} s")
    if given.json is not None:
        known = {pair: asdict(clean) for pair, clean in cleans.items()}
        rows = [
            asdict(run) | {"family": run.family, "clean": known.get((run.recipe, run.optimizer)), "told": str(run)}
            for run in runs
        ]
        given.json.write_text(json.dumps(rows, indent=1, default=str), encoding="utf-8")
