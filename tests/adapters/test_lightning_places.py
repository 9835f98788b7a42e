"""Where a Lightning trainer under guard is in its data and counts: after a resume, and in what a rewind undoes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

L = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint  # noqa: E402
from lightning_programs import BATCH, WARNINGS, Fitted, Net, Rows, loader, trainer_of  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

pytestmark = [pytest.mark.filterwarnings(one) for one in WARNINGS]
BAD = 170  # a row


class Stateful:
    """A loader whose rows have no index, and which resumes in the middle of a pass; one row is bad."""

    def __init__(self) -> None:
        rows = Rows(bad=(BAD,))
        self.batches = [*zip(torch.split(rows.x, BATCH), torch.split(rows.y, BATCH), strict=True)]
        self.first = self.fetched = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for number in range(first, len(self)):
            self.fetched = number + 1
            yield self.batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"first": self.fetched}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


def steady(module: Net) -> Net:
    module.net[3].p = 0.0  # a resume does not restore the random numbers of Lightning
    return module


def fit(place: Path, module: Any, data: Any, ckpt_path: Path | None = None, **more: Any) -> Fitted:
    L.seed_everything(1, verbose=False)
    saver = ModelCheckpoint(place / "files", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    usual = {"guarded": True, "callbacks": (saver,), "max_epochs": 1, "enable_checkpointing": True}
    trainer = trainer_of(place, **{**usual, **more})
    trainer.fit(steady(module), data, ckpt_path=ckpt_path)
    return Fitted(trainer, module, trainer.logger.rows, place)


def test_what_was_skipped_is_left_out_again_after_a_resume(tmp_path: Path) -> None:
    """Also if its update has several batches: the run ends with the bits of the one that was not interrupted."""

    def run(ckpt_path: Path | None = None) -> Fitted:
        return fit(tmp_path, Net(), Stateful(), ckpt_path, accumulate_grad_batches=4)

    whole = run()
    resumed = run(tmp_path / "files" / "step=3.ckpt")
    [incident] = resumed.incidents
    assert incident["actions"] == [{"remedy": "skip"}]
    assert resumed.weights == whole.weights
    assert resumed.trainer.global_step == whole.trainer.global_step


class Counted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output, loop = super().training_step(batch, batch_idx), self.trainer.fit_loop.epoch_loop
        output["loss"] *= 1 + 0.01 * self.trainer.global_step + self.current_epoch + 0.001 * loop.total_batch_idx
        return output


def test_what_a_rewind_undoes_is_repeated_at_the_place_where_it_was(tmp_path: Path) -> None:
    """With the counts of its time, and with its own number of batches where a callback changes it in every epoch.

    The damage is found in the last epoch, and what it undoes begins in the first.
    """

    def weights(fault: str) -> list[list[float]]:
        accumulation = (GradientAccumulationScheduler({0: 1, 1: 4, 2: 2}),)
        more: Any = {"max_epochs": 3, "enable_checkpointing": False, "callbacks": accumulation}
        run = fit(tmp_path / fault, Counted(fault, at=44), loader(), **more)
        assert [one["rewound_to"] for one in run.incidents] == ([25] if fault else [])
        return run.weights

    assert weights("bit_flip") == weights("")


class Stop(Callback):  # type: ignore[misc]
    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        trainer.should_stop = trainer.global_step >= 4


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([Rows()[row] for row in range(64)])


@pytest.mark.parametrize(
    ("more", "steps"),
    [({"max_epochs": 1}, None), ({"max_epochs": -1, "callbacks": (Stop(),)}, None), ({"max_steps": 4}, 4)],
)
def test_a_plan_without_an_end_is_unknown(tmp_path: Path, more: dict[str, Any], steps: int | None) -> None:
    """A stream without a length, and a trainer without a last step: neither -1 nor a huge number."""
    fit(tmp_path, Net(), DataLoader(Unsized(), BATCH), **{"enable_checkpointing": False, "callbacks": (), **more})
    loop = json.loads((tmp_path / "resilient_train" / "loop.json").read_text())
    assert loop["steps"] == steps
    assert loop["given"].get("steps") == steps
