"""How often the checks cry wolf, and how soon they see what is wrong: ours beside those that people use.

    python benchmarks/detection.py
    python benchmarks/detection.py --steps 20000 --seeds 1          (for a first look)
    python benchmarks/detection.py --without arc

Curves are replayed as they are, so what a refusal or a rewind would have changed does not show: a refused update is
left out of our statistics, and the curve goes on as it was recorded. `arc-training` is measured if it is installed.
It
is slower, so it sees half of the first synthetic curve only. A detector that alarms often also sees faults by chance.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median

import numpy as np
from detection_curves import FAMILIES, Curve, recorded, risen
from detection_rivals import ALARM, REFUSED, Arc, Detector, MeanSigma, MedianMad, Ours
from panels import Panel

from resilient_train.ground.types import Vitals
from resilient_train.loop.arguments import checks as named

SCANS_SEE = ("w1e", "lay", "v", "mx")  # faults of weights and moments, which the scans look for besides
BY_CONSTRUCTION = "stuck"  # a batch that repeats: our stream cannot
SWITCHED = {"gptmix": 701}  # where the data was switched on purpose


def ours(curve: Curve) -> Detector:
    config = named("default")
    config.expect = list(curve.declared)
    return Ours(config)


DETECTORS: dict[str, Callable[[Curve], Detector]] = {
    "ours": ours,
    "mean + 6 sigma": lambda curve: MeanSigma(),
    "median + 10 MAD": lambda curve: MedianMad(),
    "ARC": lambda curve: Arc(),
}


def verdicts(detector: Detector, curve: Curve, *, until_alarm: bool = False) -> list[tuple[int, str]]:
    """What was said, and at which index of the curve."""
    said: list[tuple[int, str]] = []
    for index, (loss, norm) in enumerate(zip(curve.losses, curve.norms, strict=True)):
        verdict = detector.see(loss, norm)
        if verdict is not None:
            said.append((index, verdict))
            if until_alarm and verdict == ALARM and curve.onset is not None and index >= curve.onset:
                break
    return said


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "|".join(" --- " for _ in head) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def false_alarms(names: Sequence[str], steps: int, seeds: int) -> None:
    """Synthetic healthy curves: alarms for every 100,000 steps, and of ours the refused updates apart."""
    print(f"False alarms for every 100,000 healthy steps ({seeds} synthetic curves of {steps:,} steps each)\n")
    rows = []
    for family, make in FAMILIES.items():
        row = [family]
        for name in names:
            counts, seen = Counter[str](), 0
            for seed in range(1 if name == "ARC" else seeds):
                curve = make(np.random.default_rng(seed), steps // 2 if name == "ARC" else steps)
                counts.update(verdict for _, verdict in verdicts(DETECTORS[name](curve), curve))
                seen += len(curve.losses)
            row.append(f"{counts[ALARM] * 1e5 / seen:.1f}")
            if name == "ours":
                row.append(f"{counts[REFUSED] * 1e5 / seen:.1f}")
        rows.append(row)
    table(["family", "ours", "ours, refused updates", *names[1:]], rows)


def healthy_runs(names: Sequence[str], curves: Sequence[Curve]) -> None:
    """Recorded healthy runs."""
    steps = sum(len(curve.losses) for curve in curves)
    print(f"{len(curves)} recorded healthy runs, {steps:,} steps\n")
    rows = []
    for name in names:
        counts, runs = Counter[str](), 0
        for curve in curves:
            said = Counter(verdict for _, verdict in verdicts(DETECTORS[name](curve), curve))
            counts += said
            runs += bool(said[ALARM])
        rows.append([name, str(counts[ALARM]), f"{counts[ALARM] * 1e5 / steps:.1f}", str(runs), str(counts[REFUSED])])
    table(["detector", "false alarms", "for every 100,000 steps", "runs with one", "updates refused"], rows)


def faults(names: Sequence[str], curves: Sequence[Curve]) -> None:
    """Recorded runs with a fault that did harm."""
    print(f"{len(curves)} recorded runs with a fault that did harm\n")
    rows = []
    for name in names:
        delays, only_refused, missed, before = [], [], [], 0
        for curve in curves:
            assert curve.onset is not None
            everything = verdicts(DETECTORS[name](curve), curve, until_alarm=True)
            said = [one for one in everything if one[0] >= curve.onset]
            before += any(curve.onset - 20 <= index < curve.onset for index, _ in everything)
            if said:
                delays.append(said[0][0] - curve.onset + 1)
                only_refused += [curve.name] if all(verdict == REFUSED for _, verdict in said) else []
            else:
                missed.append(curve)
        left = [curve.name for curve in missed if not curve.fault.startswith(SCANS_SEE)]
        quick = sum(delay <= 20 for delay in delays)
        middle, late = median(delays), np.quantile(delays, 0.9)
        found = [f"{len(delays)} of {len(curves)}", str(quick), str(before), f"{middle:.0f}", f"{late:.0f}"]
        rows.append([name, *found, f"{len(only_refused)}", ", ".join(left) or "none"])
    head = ["detector", "seen", "within 20 steps", "in the 20 steps before", "median delay", "90 %", "only refused"]
    head.append("missed, and no scan sees it")
    table(head, rows)


def by_fault(curves: Sequence[Curve]) -> None:
    """What ours saw of each kind of fault that did harm, and of those that did none."""
    print("Ours, fault by fault (seen of all, median delay)\n")
    kinds: dict[str, dict[bool, list[int | None]]] = {}
    for curve in curves:
        assert curve.onset is not None
        said = [one for one in verdicts(ours(curve), curve, until_alarm=True) if one[0] >= curve.onset]
        found = said[0][0] - curve.onset + 1 if said else None
        kinds.setdefault(curve.fault, {True: [], False: []})[curve.harmful].append(found)
    table(
        ["fault", "harmful", "harmless"], [[kind, *map(_share, both.values())] for kind, both in sorted(kinds.items())]
    )


def _share(delays: Sequence[int | None]) -> str:
    seen = [delay for delay in delays if delay is not None]
    return f"{len(seen)} of {len(delays)}" + (f", {median(seen):.0f} steps" if seen else "") if delays else ""


def changes(names: Sequence[str], seeds: int) -> None:
    """Changes of the loss alone: after how many steps they are seen, at worst over the seeds."""
    print(f"Steps from the onset to the alarm, at worst in {seeds} curves\n")
    cases = {
        "3 -> 8 at once, noise 3 % (at most 8)": {"low": 3, "high": 8, "over": 1, "noise": 0.03},
        "+50 % over 200 steps, noise 3 % (at most 350)": {"low": 3, "high": 4.5, "over": 200, "noise": 0.03},
        "+50 % over 200 steps, noise 10 %": {"low": 3, "high": 4.5, "over": 200, "noise": 0.1},
        "+50 % over 1,000 steps, noise 3 % (at most 1,050)": {"low": 3, "high": 4.5, "over": 1000, "noise": 0.03},
    }
    rows = []
    for case, numbers in cases.items():
        row = [case]
        for name in names:
            delays = []
            for seed in range(seeds):
                curve = risen(seed, then=2500, **numbers)  # type: ignore[arg-type]  # numbers by name
                assert curve.onset is not None
                said = verdicts(DETECTORS[name](curve), curve, until_alarm=True)
                after = [index - curve.onset + 1 for index, _ in said if index >= curve.onset]
                delays.append(after[0] if after else None)
            seen = [delay for delay in delays if delay is not None]
            row.append(f"{max(seen)}" if len(seen) == seeds else f"{len(seen)} of {seeds} seen")
        rows.append(row)
    table(["change", *names], rows)


def cost(steps: int = 50_000) -> None:
    """What a verdict costs, and a copy of the statistics."""
    curve = FAMILIES["decay with noise"](np.random.default_rng(0), steps)
    vitals = [
        Vitals(at, at, True, loss, norm, 1e-3, at, at + 1)
        for at, (loss, norm) in enumerate(zip(curve.losses, curve.norms, strict=True), start=1)
    ]
    rows = []
    for name in ("default", "light", "paranoid", "off"):
        checks, times = Panel(named(name)).checks, []
        for first in range(0, steps, 5000):
            began = time.process_time()
            for one in vitals[first : first + 5000]:
                checks.judge(one)
            times.append((time.process_time() - began) / 5000 * 1e6)
        began = time.process_time()
        for _ in range(1000):
            checks.state_dict()
        copied = (time.process_time() - began) / 1000 * 1e6
        rows.append([name, f"{median(times):.1f}", f"{mean(times):.1f}", f"{copied:.0f}"])
    print("Cost in microseconds of CPU time\n")
    table(["checks", "a verdict, median", "mean", "a copy of the statistics"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="of each synthetic curve")
    parser.add_argument("--seeds", type=int, default=2, help="synthetic curves of each family")
    parser.add_argument("--without", nargs="*", default=[], choices=[name for name in DETECTORS if name != "ours"])
    options = parser.parse_args()
    names = [name for name in DETECTORS if name not in set(options.without)]
    if "ARC" in names:
        try:
            Arc()
        except ImportError:
            print("arc-training is not installed, so it is left out\n")
            names.remove("ARC")
    runs = list(recorded(SWITCHED))
    harmful = [run for run in runs if run.harmful and run.fault != BY_CONSTRUCTION]
    false_alarms(names, options.steps, options.seeds)
    healthy_runs(names, [run for run in runs if run.onset is None])
    faults(names, harmful)
    by_fault([run for run in runs if run.onset is not None])
    changes(names, 5)
    cost()


if __name__ == "__main__":
    main()
