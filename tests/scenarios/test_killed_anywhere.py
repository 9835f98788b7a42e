"""A run that is killed between any two entries of its journal comes to what it comes to without."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from fork_server import Forked
from power import Careless
from tasks import FIT, Ends, Running, Scenario, other_loss
from torch import Tensor, nn

from resilient_train import Guard
from resilient_train.data.trees import weights_sha256
from resilient_train.durable.journal import JOURNAL, Journal, read
from resilient_train.durable.run_history import in_words
from resilient_train.durable.writer import Writer
from resilient_train.ground import files
from resilient_train.ground.reader import MemoryConfig
from resilient_train.ground.types import Cause
from resilient_train.ground.wording import lines_of
from resilient_train.report.story import read_story, review

BATCH, STEPS = 8, 390
# The updates in which something goes wrong: rows that are not finite, that raise, that a line cannot take, that are far
# out; a loss that is NaN once, a weight that flips, moments that are lost, losses that stay NaN; a rate that leaps.
NAN, RAISES, BREAKS, OUTLIER, NAN_TOO = 20, 40, 85, 265, 285
PASSES, FLIPS, SHRINKS, STAYS = 60, 110, 150, 325
HOT = 200


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor, int]]):
    """In their order. Some are bad each time that they are read."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.x = torch.randn(BATCH * (STEPS + 60), 4, generator=numbers)
        self.y = self.x.sin().sum(1, keepdim=True)
        self.x[[BATCH * NAN + 3, BATCH * NAN_TOO + 1], 2] = torch.nan
        self.x[BATCH * BREAKS + 2] = 0.0
        self.y[BATCH * OUTLIER + 4] = 1e7

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, int]:
        if row == BATCH * RAISES + 5:
            raise ValueError("cannot be decoded")
        return self.x[row], self.y[row], row


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.05), nn.Linear(16, 1))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        length = (x * self.scale).pow(2).sum(1, keepdim=True)
        return self.layers(x) + 0.1 * length.sqrt()


class Faults:
    """What goes wrong until it is treated: a process that was killed before that meets it again."""

    def __init__(self, run_dir: Path) -> None:
        self.journal, self.struck = run_dir / JOURNAL, set[int]()

    def strike(self, signal: str, start: int, rows: Tensor) -> bool:
        now = int(rows.min()) // BATCH
        if now in self.struck or now != start:
            return False
        self.struck.add(now)
        entries = (one for one in read(self.journal) if one["kind"] == "incident_treated")
        return all(one["incident"]["anomaly"]["signal"] != signal for one in entries)


def train(run_dir: Path) -> None:
    """The program, which resumes what there is."""
    files.disk, Writer.offer = Careless(), Writer.write_now  # type: ignore[method-assign]
    torch.manual_seed(0)
    model, faults = Net(), Faults(run_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 300.0 if HOT <= step < HOT + 5 else 1.0)

    def objective(model: nn.Module, batch: list[Tensor]) -> Tensor:
        x, y, rows = batch
        loss = nn.functional.mse_loss(model(x), y)
        is_bad = BATCH * STAYS <= rows.min() < BATCH * (STAYS + 3) or faults.strike("nonfinite_loss", PASSES, rows)
        return loss * torch.nan if is_bad else loss

    guard = Guard(
        *(None, model, optimizer),
        data=Rows(),
        batch_size=BATCH,
        steps=STEPS,
        schedule=schedule,
        objective=objective,
        shuffle=False,
        clip=1.0,
        memory=MemoryConfig(every=5, keep=6, max_gib=None),
        verify_after=5,
        disk=20,
        run_dir=run_dir,
        resume=True,
    )
    for batch in guard.batches():
        if faults.strike("weights_jump", FLIPS, batch[2]):
            with torch.no_grad():
                model.layers[0].weight[3, 1] = 1e30  # type: ignore[operator]
        if faults.strike("optimizer_range", SHRINKS, batch[2]):
            for state in optimizer.state.values():
                state["exp_avg_sq"].mul_(1e-6)
        guard.step(batch)
    guard.close()
    (run_dir / "weights").write_text(weights_sha256(guard.state))


def train_changed(run_dir: Path) -> None:
    """Another loss from a step on, which is told from damage by an experiment."""
    train_simply(run_dir, other_loss, hands_over=True)


def train_observed(run_dir: Path) -> None:
    """A loss that makes the weights NaN, and every update after it."""

    def spoil(run: Running, model: Any, batch: Any, loss: Tensor) -> Tensor:
        return loss * (torch.nan if run.step == 100 else 1.0)

    train_simply(run_dir, spoil, recovery="observe")


def train_simply(run_dir: Path, spoil: Any, *, hands_over: bool = False, **more: Any) -> None:
    files.disk, Writer.offer = Careless(), Writer.write_now  # type: ignore[method-assign]
    guard = {"disk": 20, "resume": True, **more}
    run = Running(Scenario(FIT, Ends(), spoil, hands_over=hands_over, guard=guard), run_dir).train()
    (run_dir / "weights").write_text(weights_sha256(run.guard.state))


PROGRAMS = {"ten_faults": train, "change": train_changed, "observed_nan": train_observed}


def train_with_copies(train: Callable[[Path], None], run_dir: Path, copies: Path) -> None:
    """Copy the run directory behind each entry of the journal: it is what a kill would leave there."""
    write = Journal.write

    def writing(journal: Journal, kind: str, /, **fields: Any) -> None:
        write(journal, kind, **fields)
        shutil.copytree(run_dir, copies / f"{journal.entries[-1]['n']:03} {kind}" / "run")

    Journal.write = writing  # type: ignore[method-assign]
    train(run_dir)


def samples_skipped(spans: list[list[int]]) -> int:
    """Count the samples of spans, which may overlap."""
    return len({sample for start, stop in spans for sample in range(start, stop)})


def story_of(run_dir: Path, *, is_experiment: bool) -> dict[str, Any]:
    """What was noticed, found, done and reached, but for the kill; without the numbers of steps and ticks.

    An experiment is made again by the next process, with other samples: the incidents that it makes come again.
    """
    story = read_story(run_dir)
    lines = [in_words(one) for one in story.incidents if one.diagnosis.cause is not Cause.PROCESS]
    facts = [[one[name] for name in ("signal", "cause", "rows", "actions", "outcome")] for one in lines]
    where = [culprit and [culprit["op"], culprit["line"]] for culprit in (one["culprit"] for one in lines)]
    rows = sorted(row for row, *_ in story.remedies.get("quarantined", []))
    left = {"rows": rows, "skipped": samples_skipped(story.remedies.get("skipped", []))}
    if is_experiment:
        return {"incidents": {str(one[:-1]) for one in facts}, "last": facts[-1][-1], **left}
    return {"incidents": [*zip(facts, where, strict=True)], "weights": (run_dir / "weights").read_text(), **left}


@pytest.fixture(scope="module", params=PROGRAMS)
def whole(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was never killed, and its copies."""
    place: Path = tmp_path_factory.mktemp("whole") / request.param
    place.mkdir()
    made = Forked(
        train_with_copies, PROGRAMS[place.name], place / "run", place / "copies", place=place, out=place / "out.txt"
    )
    assert made.wait() == 0, made.output
    return place


def test_each_fault_is_said_as_it_was(whole: Path) -> None:
    """Evidence and advice, but for figures, lines and times, which depend on the machine and on this file."""
    story = read_story(whole / "run")
    lines = [*review(story), *(line for one in story.incidents for line in ["", *lines_of(one, "block")])]
    said = "\n".join(lines).replace(str(whole), "").replace(str(Path(__file__).parent), "")
    for pattern, instead in (
        (r"\d[\d-]+ [\d:]{8},", "TIME,"),
        (r"(\.py:)\d+", r"\1LINE"),
        (r"\d+\.\d+(e[+-]\d+)?", "#"),
    ):
        said = re.sub(pattern, instead, said)
    golden.check(f"{whole.name}.txt", f"{said}\n")


@pytest.mark.timeout(1800)  # in the long form seventy processes
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_between_any_two_entries_costs_nothing_of_the_story(whole: Path, every: int) -> None:
    """The same program comes to the same incidents, rows and weights, whatever is the last entry before the kill."""

    def resume(place: Path) -> dict[str, Any]:
        resumed = Forked(PROGRAMS[whole.name], place / "run", place=place, out=place / "out.txt")
        assert resumed.wait() == 0, resumed.output
        return story(place / "run")

    story = partial(story_of, is_experiment=whole.name == "change")
    copies, expected = sorted((whole / "copies").iterdir()), story(whole / "run")
    assert len(expected["incidents"]) == {"ten_faults": 9, "change": 2, "observed_nan": 1}[whole.name]
    if whole.name == "observed_nan":  # one that the end of the run has closed is not opened again
        copies = [one for one in copies if one.name < next(one.name for one in copies if "closed" in one.name)]
    with ThreadPoolExecutor(2) as pool:
        stories = dict(zip((copy.name for copy in copies[::every]), pool.map(resume, copies[::every]), strict=True))
    assert [name for name, story in stories.items() if story != expected] == []
