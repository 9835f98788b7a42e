"""What became of a run, and whom it accused: judged from plain data, so that old figures can be told anew."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NEAR = 0.1  # of the way from the start to where the mended twin ends: within it, a run is cured
TWIN = "mended twin"  # the arm that makes the yardstick
ACCUSES = ("operation", "overflow")  # causes that lay it on a line of code
RIGHT, HALF, WRONG, UNKNOWN = "right", "half right", "wrong", "unknown"


@dataclass(frozen=True)
class Yardstick:
    """Where a case begins and where its mended twin ends."""

    start: float
    healthy: float

    def away(self, loss: float) -> float:
        """How far a loss is from the twin's, as a share of the way from the start."""
        return (loss - self.healthy) / (self.start - self.healthy)

    def is_near(self, loss: float) -> bool:
        return math.isfinite(loss) and self.away(loss) <= NEAR


@dataclass(frozen=True)
class Expected:
    """Who did it. Lines are all of the statement that ends with `# guilty`."""

    cause: str
    ops: Sequence[str]
    rows: Sequence[int]
    file: str
    lines: Sequence[int]


@dataclass(frozen=True)
class Said:
    """What one incident says."""

    signal: str
    cause: str
    file: str | None
    line: int | None
    op: str | None
    rows: Sequence[int]
    advice: str
    did: Sequence[str]
    outcome: str | None


@dataclass
class Run:
    """One case, trained once by one arm."""

    of: str
    case: str
    seed: int
    arm: str
    made_by: str  # a digest of all source that it comes from
    why: str = ""  # it did not end in the ordinary way
    loss: float | None = None  # of the mended twin, with these weights; None if it is not finite
    start: float | None = None  # the same before training: of the twin only
    is_finite: bool = False  # the weights; buffers are not asked
    lost: int | None = None  # attempts that left nothing behind
    seconds: float = 0.0
    expected: Expected | None = None
    incidents: list[Said] = field(default_factory=list)
    told: str = ""

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Run:
        """Take what `dataclasses.asdict` made of one."""
        expected = Expected(**row["expected"]) if row["expected"] else None
        return cls(**{**row, "expected": expected, "incidents": [Said(**said) for said in row["incidents"]]})

    # Whom does it accuse?

    @property
    def _accusations(self) -> list[str]:
        """Of each incident that names a line. Where no line is guilty, to lay it on one is wrong."""
        if self.expected is None:  # killed at the limit of time before it could say anything
            return []
        if self.expected.ops:
            return [self._accuses(said) for said in self.incidents if said.line is not None]
        return [WRONG for said in self.incidents if said.line is not None and said.cause in ACCUSES]

    def _accuses(self, said: Said) -> str:
        assert self.expected is not None
        if said.file != self.expected.file or said.line not in self.expected.lines:
            return WRONG
        return RIGHT if said.op in self.expected.ops else HALF

    @property
    def culprit(self) -> str:
        """Whether line and operation were found: half right is the line with another operation."""
        found = self._accusations
        return next((verdict for verdict in (RIGHT, HALF, WRONG) if verdict in found), UNKNOWN)

    @property
    def accuses_another(self) -> bool:
        """Whether any incident names a line that is innocent, whatever the others say."""
        return WRONG in self._accusations

    @property
    def rows(self) -> str:
        """Whether the bad rows were found: half right are some of them, or all and others."""
        wanted = set(self.expected.rows) if self.expected else set()
        named = {row for said in self.incidents if said.cause == "data" for row in said.rows}
        if not named:
            return UNKNOWN
        if named == wanted:
            return RIGHT
        return HALF if named < wanted or named > wanted else WRONG

    @property
    def cause(self) -> str:
        named = {said.cause for said in self.incidents} - {"unknown"}
        return RIGHT if self.expected and self.expected.cause in named else WRONG if named else UNKNOWN


@dataclass(frozen=True)
class Figures:
    """All runs of a set, with the yardsticks to judge them by."""

    runs: Sequence[Run]
    yardsticks: Mapping[tuple[str, int], Yardstick]  # by case and seed

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Figures:
        """Tell twins from the runs that are judged by them; what has no yardstick is left out."""
        runs = list(runs)
        sticks = {
            (run.case, run.seed): Yardstick(run.start, run.loss)
            for run in runs
            if run.arm == TWIN and run.start is not None and run.loss is not None
        }
        return cls([run for run in runs if run.arm != TWIN and (run.case, run.seed) in sticks], sticks)

    def of_arm(self, arm: str, case: str | None = None) -> list[Run]:
        return [run for run in self.runs if run.arm == arm and case in (None, run.case)]

    def is_cured(self, run: Run) -> bool:
        stick = self.yardsticks[run.case, run.seed]
        return not run.why and run.is_finite and run.loss is not None and stick.is_near(run.loss)

    def cured(self, runs: Sequence[Run]) -> int:
        return sum(self.is_cured(run) for run in runs)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def tellers(self) -> list[str]:
        """The tools that have said something."""
        return [arm for arm in self.arms if any(run.incidents for run in self.of_arm(arm))]

    @property
    def cases(self) -> list[str]:
        return sorted({run.case for run in self.runs})

    def seeds_of(self, case: str) -> int:
        return len({run.seed for run in self.runs if run.case == case})


# -------------------------------------------------------------------------------------------------------------- tables


def summary(figures: Figures) -> str:
    """One line a figure, one column a tool."""
    told = [["cured", *(share(figures.cured(runs), len(runs)) for runs in map(figures.of_arm, figures.arms))]]
    for name, figure in DIAGNOSES.items():
        told.append([name, *(figure(figures.of_arm(arm)) if arm in figures.tellers else "" for arm in figures.arms)])
    lost = [_lost([run for run in figures.of_arm(arm) if figures.is_cured(run)]) for arm in figures.arms]
    return markdown(["", *figures.arms], [*told, ["steps lost where it was cured, median", *lost]])


def by_case(figures: Figures) -> str:
    """One line a case: how often each arm cured it, and what the first that says something said of it."""
    teller = next(iter(figures.tellers), None)
    head = ["case", *figures.arms, *([f"culprit ({teller})", f"rows ({teller})"] if teller else []), "remark"]
    rows = []
    for case in figures.cases:
        arms = [figures.of_arm(arm, case) for arm in figures.arms]
        counts = [f"{figures.cured(runs)}/{len(runs)}" if runs else "" for runs in arms]
        said = figures.of_arm(teller, case) if teller else []
        verdicts = [_verdicts("culprit", having_line(said)), _verdicts("rows", having_rows(said))] if teller else []
        rows.append([f"`{case}`", *counts, *verdicts, _remark(figures, case)])
    return markdown(head, rows)


def _verdicts(of: str, runs: Sequence[Run]) -> str:
    """How often it was right, and what it was otherwise unless it kept silent."""
    if not runs:
        return ""
    found = [getattr(run, of) for run in runs]
    others = [f"{found.count(verdict)} {verdict}" for verdict in (HALF, WRONG) if verdict in found]
    return ", ".join([f"{found.count(RIGHT)}/{len(found)}", *others])


def _remark(figures: Figures, case: str) -> str:
    skipping = figures.of_arm("skip", case)
    remarks = ["skip does as well"] if skipping and figures.cured(skipping) == len(skipping) else []
    accusers = [arm for arm in figures.arms if any(run.accuses_another for run in figures.of_arm(arm, case))]
    if accusers:
        remarks.append(f"an innocent line accused ({', '.join(accusers)})")
    return "; ".join(remarks)


def _lost(runs: Sequence[Run]) -> str:
    known = [run.lost for run in runs if run.lost is not None]
    return f"{statistics.median(known):g}" if known else ""


def having_line(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.expected and run.expected.ops]


def having_rows(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.expected and run.expected.rows]


def right(of: str, runs: Sequence[Run]) -> str:
    """Share of the runs whose verdict is right, and how many are half right."""
    found = [getattr(run, of) for run in runs]
    half = f", {found.count(HALF)} half" if HALF in found else ""
    return share(found.count(RIGHT), len(found)) + half


def either_right(runs: Sequence[Run]) -> str:
    """What has a guilty line is asked for it, what has rows only for these."""
    lines = having_line(runs)
    rows = [run for run in having_rows(runs) if run not in lines]
    return share(sum(run.culprit == RIGHT for run in lines) + sum(run.rows == RIGHT for run in rows), len(lines + rows))


def share(count: int, of: int) -> str:
    return f"{100 * count / of:.0f} % ({count}/{of})" if of else ""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


DIAGNOSES: dict[str, Callable[[Sequence[Run]], str]] = {
    "culprit right, of runs that have a guilty line": lambda runs: right("culprit", having_line(runs)),
    "runs that accuse an innocent line": lambda runs: str(sum(run.accuses_another for run in runs)),
    "rows right, of runs that have bad rows": lambda runs: right("rows", having_rows(runs)),
    "culprit or rows right, of runs that have either": either_right,
    "cause right": lambda runs: right("cause", runs),
}
