"""What the trainers of other libraries promise under guard, over all of them: as without it while healthy, then cured.

A trainer is a function here: it trains in a place, with a fault of `hf_programs` or `lightning_programs`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from guarded import is_finite
from kills import incidents as listed
from kills import summary
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

pytest.importorskip("transformers")
L = pytest.importorskip("lightning")

import hf_programs  # noqa: E402
import lightning_programs  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint  # noqa: E402
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR  # noqa: E402
from trainer_ranks import on_two_ranks  # noqa: E402
from transformers import Trainer  # noqa: E402

import resilient_train  # noqa: E402
from resilient_train import GaveUp  # noqa: E402
from resilient_train.data import fed  # noqa: E402
from resilient_train.data.trees import sha256  # noqa: E402

pytestmark = [pytest.mark.filterwarnings(one) for one in lightning_programs.WARNINGS]
BAD = 100  # a row without an index
BATCH = lightning_programs.BATCH


class Ended(NamedTuple):
    weights: str
    logs: str
    steps: int
    incidents: list[dict[str, Any]]
    model: nn.Module


def ended(place: Path, model: nn.Module, logs: Any, steps: int) -> Ended:
    directory = place / "resilient_train"
    return Ended(sha256(model.state_dict()), repr(logs), steps, listed(directory) if directory.exists() else [], model)


BROKEN = ("broken", "unreadable")


class Broken(Dataset[Any]):
    """A row that raises when it is fetched, and unless all others are fine, one that no forward can take."""

    def __init__(self, own: Any, fault: str) -> None:
        self.own, self.strange = own, 99 if fault == "broken" else None

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, row: int) -> Any:
        if row == 17:
            raise ValueError("cannot be decoded")
        made = self.own[row]
        if row != self.strange:
            return made
        return {**made, "labels": made["labels"] + 10_000} if isinstance(made, dict) else (made[0], made[1] + 10_000)


class Stream(IterableDataset[Any]):
    """Rows without an index."""

    def __iter__(self) -> Iterator[Any]:
        return map(hf_programs.Sentences((BAD,)).__getitem__, range(hf_programs.ROWS))


class CountingTrainer(hf_programs.Struck):
    def compute_loss(self, *given: Any, **more: Any) -> torch.Tensor:
        loss: torch.Tensor = Trainer.compute_loss(self, *given, **more)
        loss *= 1 + 0.01 * self.state.global_step + self.state.epoch
        return loss


def hugging_face(
    place: Path,
    fault: str = "",
    *,
    guarded: bool = True,
    saves: int = 0,
    resume: int = 0,
    stream: bool = False,
    counts: bool = False,
    recovery: str = "balanced",
    program: str = "llama",
    workers: int = 0,
    **more: Any,
) -> Ended:
    more |= {"dataloader_num_workers": workers} | (at_rate(hugging_face, 300) if fault == "hot" else {})
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": saves} if saves else {}
    trainer = hf_programs.trainer(program, place, fault, logging_nan_inf_filter=False, **saving, **more)
    if counts:
        trainer.__class__ = CountingTrainer
    if stream:
        trainer.train_dataset = Stream()
    if fault in BROKEN:
        trainer.train_dataset = Broken(trainer.train_dataset, fault)
    if guarded:
        assert resilient_train.hf.guard(trainer, recovery=recovery) is trainer
    trainer.train(resume_from_checkpoint=str(place / f"checkpoint-{resume}") if resume else None)
    times = ("runtime", "per_second")
    logs = [
        {name: value for name, value in row.items() if not any(time in name for time in times)}
        for row in trainer.state.log_history
    ]
    return ended(place, trainer.model, logs, trainer.state.global_step)


class CountingNet(lightning_programs.Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output, loop = super().training_step(batch, batch_idx), self.trainer.fit_loop.epoch_loop
        output["loss"] *= 1 + 0.01 * self.trainer.global_step + self.current_epoch + 0.001 * loop.total_batch_idx
        return output


def lightning(
    place: Path,
    fault: str = "",
    *,
    guarded: bool = True,
    saves: int = 0,
    resume: int = 0,
    counts: bool = False,
    steps: int = 96,
    at: int = lightning_programs.AT,
    schedule: Any = None,
    workers: int = 0,
    callbacks: tuple[Any, ...] = (),
    **more: Any,
) -> Ended:
    L.seed_everything(1, verbose=False)
    saver = ModelCheckpoint(place, filename="checkpoint-{step}", every_n_train_steps=saves or None, save_top_k=-1)
    callbacks += (saver,) if saves else ()
    callbacks += (GradientAccumulationScheduler({0: 1, 1: 4, 2: 2}),) if counts else ()
    more = {"max_steps": steps, "max_epochs": -1, "callbacks": callbacks, "enable_checkpointing": saves > 0, **more}
    trainer = lightning_programs.trainer_of(place, guarded=guarded, **more)
    fault = {"bad_rows": "rows", "hot_lr": "rate"}.get(fault, fault)
    schedule = at_rate(lightning, 300)["schedule"] if fault == "hot" else schedule
    module = (CountingNet if counts else lightning_programs.Net)(fault, schedule, at)
    rows = lightning_programs.loader((17, 99) if fault == "rows" else (), workers)
    if fault in BROKEN:
        rows = DataLoader(Broken(rows.dataset, fault), BATCH, shuffle=True, num_workers=workers)
    path = place / f"checkpoint-step={resume}.ckpt" if resume else None
    trainer.fit(module, rows, DataLoader(lightning_programs.Rows(64), 32), ckpt_path=path)
    return ended(place, module, trainer.logger.rows, trainer.global_step)


Train = Callable[..., Ended]
TRAINERS: dict[str, Train] = {"hugging_face": hugging_face, "lightning": lightning}
of_all = pytest.mark.parametrize("train", TRAINERS.values(), ids=TRAINERS)


HEALTHY: dict[str, tuple[Train, dict[str, Any]]] = {
    "two batches an update": (hugging_face, {}),
    "not clipped": (hugging_face, {"program": "vit", "gradient_accumulation_steps": 1, "max_grad_norm": -1.0}),
    "batches that do not fill an update": (hugging_face, {"gradient_accumulation_steps": 5, "steps": 24}),
    "stopped early": (lightning, {"callbacks": (EarlyStopping("val", patience=0, min_delta=10.0),)}),
    "a last update of fewer batches": (
        lightning,
        {
            "accumulate_grad_batches": 5,
            "max_steps": -1,
            "max_epochs": 2,
            "workers": 1,
            "gradient_clip_val": 0.01,
            "gradient_clip_algorithm": "value",
        },
    ),
    "bf16 and a schedule": (
        lightning,
        {
            "precision": "bf16-mixed",
            "gradient_clip_val": 0.5,
            "steps": 40,
            "schedule": lambda optimizer: ExponentialLR(optimizer, 0.97),
            "val_check_interval": 7,
        },
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_that_without_the_guard(name: str, tmp_path: Path) -> None:
    """The same rows reach the loggers, and the weights and running statistics are the same bits."""
    train, more = HEALTHY[name]
    plain, guarded = (train(tmp_path / str(one), guarded=one, **deepcopy(more)) for one in (False, True))
    assert guarded[:3] == plain[:3]
    assert guarded.incidents == []


def at_rate(train: Train, factor: float) -> dict[str, Any]:
    """Options of a trainer whose rate is so many times as high."""
    if train is hugging_face:
        return {"learning_rate": 1e-3 * factor, "lr_scheduler_type": "constant"}
    return {"schedule": lambda optimizer: LambdaLR(optimizer, lambda step: factor)}


@of_all
def test_lower_rates_are_tried_where_the_loss_stands(train: Train, tmp_path: Path) -> None:
    """One that does better is taken; where none does, the run is as if none had been tried."""
    plain, guarded = (
        train(tmp_path / str(one), guarded=one, steps=160, **at_rate(train, 1e-4)) for one in (False, True)
    )
    assert guarded[:4] == (*plain[:3], [])
    assert summary(tmp_path / "True" / "resilient_train")["trial_updates"] > 32
    hot = train(tmp_path / "hot", "hot", steps=160)
    assert [(one["signal"], one["outcome"]) for one in hot.incidents] == [("no_progress", "recovered")]


@of_all
def test_a_trial_measures_what_the_trainer_does(train: Train, tmp_path: Path) -> None:
    """Also where an update has several batches, each of which has a share of its loss."""
    count = {"gradient_accumulation_steps" if train is hugging_face else "accumulate_grad_batches": 4}
    [incident] = train(tmp_path, "hot", steps=80, **count).incidents
    usual = float(re.findall(r"average ([\d.]+)", incident["evidence"])[0])
    assert 0.5 * usual < incident["tried"][0]["loss"] < 2 * usual


def test_batches_that_are_not_kept_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows without an index: no rate can be tried on them."""
    monkeypatch.setattr(fed, "_MAX_BYTES", 40_000)
    assert hugging_face(tmp_path, stream=True, steps=80, **at_rate(hugging_face, 1e-4)).steps == 80


@of_all
def test_what_strikes_once_leaves_no_trace(train: Train, tmp_path: Path) -> None:
    """What is retried has the counts of its time, also where a callback changes how many batches an update has."""
    healthy = train(tmp_path / "healthy", guarded=False, counts=True)
    for fault, cause in (("nan_batch", "transient"), ("bit_flip", "corruption")):
        struck = train(tmp_path / fault, fault, counts=True)
        [incident] = struck.incidents
        assert (incident["cause"], incident["outcome"]) == (cause, "recovered")
        assert (struck.weights, struck.steps) == (healthy.weights, healthy.steps)
        assert "nan" not in struck.logs


@of_all
def test_bad_rows_are_named_and_left_out_also_after_a_resume(train: Train, tmp_path: Path) -> None:
    struck = train(tmp_path, "bad_rows", saves=50, steps=60)
    assert [(one["cause"], one["rows"]) for one in struck.incidents] == [("data", [17, 99])]
    kept = json.loads((tmp_path / "resilient_train" / "quarantine.json").read_text())
    assert sorted(one["row"] for one in kept["rows"]) == [17, 99]
    assert is_finite(struck.model)
    again = train(tmp_path, "bad_rows", resume=50, steps=80)
    assert (again.steps, len(again.incidents)) == (80, 1)


@of_all
@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_raise_are_named_and_left_out(train: Train, workers: int, tmp_path: Path) -> None:
    struck = train(tmp_path, "broken", steps=60, workers=workers)
    found = sorted((one["signal"], one["cause"], one["outcome"], *one["rows"]) for one in struck.incidents)
    assert found == [("exception", "data", "recovered", row) for row in (17, 99)]
    assert struck.steps == 60
    assert is_finite(struck.model)


@of_all
def test_a_run_that_is_only_observed_ends_as_a_plain_one(train: Train, tmp_path: Path) -> None:
    """The same bits and logs, NaN included, and its incidents are reported."""
    plain = train(tmp_path / "plain", "bad_rows", guarded=False)
    seen = train(tmp_path / "seen", "bad_rows", recovery="observe")
    assert seen[:3] == plain[:3]
    assert {one["outcome"] for one in seen.incidents} == {"observed"}


@pytest.mark.parametrize(
    ("train", "recovery"), [(hugging_face, "balanced"), (hugging_face, "off"), (lightning, "balanced")]
)
def test_a_checkpoint_from_after_the_damage_began_is_renamed(train: Train, recovery: str, tmp_path: Path) -> None:
    with pytest.raises(GaveUp) if recovery == "off" else nullcontext():
        train(tmp_path, "hot_lr", saves=2, recovery=recovery)  # 100 times as high for ten updates
    landed = [one["since"] for one in listed(tmp_path / "resilient_train") if one["landed"]]
    since = min(landed, default=hf_programs.AT)
    names = [path.name for path in tmp_path.iterdir() if "checkpoint" in path.name]
    steps = {name: int(re.findall(r"\d+", name)[0]) for name in names}
    renamed = [step for name, step in steps.items() if name.startswith("unverified-")]
    assert renamed
    assert min(renamed) > since
    assert recovery != "off" or max(step for name, step in steps.items() if name.startswith("check")) <= since


@of_all
def test_a_run_resumes_from_a_checkpoint_of_the_trainer(train: Train, tmp_path: Path) -> None:
    """And ends as the one that is not guarded."""
    found = []
    for guarded in (False, True):
        train(tmp_path / str(guarded), guarded=guarded, saves=32, steps=32)
        found.append(train(tmp_path / str(guarded), guarded=guarded, resume=32, steps=64))
    assert found[0].weights == found[1].weights
    assert not (tmp_path / "True" / "resilient_train-2").exists()


@of_all
def test_a_resume_finds_the_run_directory_of_its_checkpoint(train: Train, tmp_path: Path) -> None:
    train(tmp_path, steps=4)
    train(tmp_path, "bad_rows", steps=30, saves=30)
    second = tmp_path / "resilient_train-2"
    assert len(listed(second)) == 1
    train(tmp_path, "bad_rows", steps=34, resume=30)
    assert len(listed(second)) == 1
    assert not (tmp_path / "resilient_train-3").exists()


def test_an_update_that_is_left_out_is_logged_with_0(tmp_path: Path) -> None:
    """Its NaN is in no row, nor in the sum that the rows after it are made of."""
    ended = hugging_face(tmp_path, stream=True, logging_steps=1, steps=15)
    losses = [float(loss) for loss in re.findall("'loss': ([^,]+)", ended.logs)]
    assert [step for step, loss in enumerate(losses, start=1) if loss == 0] == [13]  # the update that has the bad row
    assert all(0 <= loss < 5 for loss in losses)


ON_TWO_RANKS: dict[str, list[Any]] = {  # what happens to a trainer, and its incidents
    "hugging_face+plain+bad_rows": [],
    "hugging_face+observe+bad_rows": [("observed", [17])],
    "hugging_face+balanced+bad_rows": [("recovered", [17, 99])],
    "lightning+plain+": [],
    "lightning+balanced+bit_flip": [("recovered", [])],
    "lightning+balanced+bad_rows": [("recovered", [17, 99])],
    "hugging_face+balanced+unreadable": [("recovered", [17])],
    "lightning+balanced+unreadable": [("recovered", [17])],
    "hugging_face+balanced+hot": [("recovered", [])],
    "lightning+balanced+hot": [("recovered", [])],
}


def test_two_ranks_treat_a_fault_of_one_alike(tmp_path: Path) -> None:
    """They end with the same weights; and an error of one rank is that error."""
    code, said = on_two_ranks(tmp_path, *ON_TWO_RANKS, "hugging_face+balanced+raises")
    assert code not in (0, None)
    assert "ZeroDivisionError" in said
    weights = {name: [(tmp_path / f"{name}-{rank}").read_text() for rank in range(2)] for name in ON_TWO_RANKS}
    assert all(first == second for first, second in weights.values())
    assert weights["hugging_face+plain+bad_rows"] == weights["hugging_face+observe+bad_rows"]
    assert weights["lightning+plain+"] == weights["lightning+balanced+bit_flip"]
    for name, expected in ON_TWO_RANKS.items():
        directory = tmp_path / name / "resilient_train"
        found = listed(directory) if directory.exists() else []
        assert sorted((one["outcome"], one["rows"]) for one in found) == expected, name
