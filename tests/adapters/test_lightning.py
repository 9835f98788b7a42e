"""Lightning's Trainer under guard: what a plain run computes, and what becomes of faults."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import Forked, torchrun
from kills import incidents
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, IterableDataset

L = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging  # noqa: E402
from lightning_programs import AT, BATCH, WARNINGS, Fitted, Net, Rows, fit, loader, trainer_of  # noqa: E402

pytestmark = [pytest.mark.filterwarnings(one) for one in WARNINGS]

HEALTHY: dict[str, dict[str, Any]] = {
    "stopped early": {"patience": 0},
    "a last update of fewer batches": {
        "accumulate_grad_batches": 5,
        "max_epochs": 2,
        "workers": 1,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "bf16 and a schedule": {
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.5,
        "max_steps": 40,
        "max_epochs": -1,
        "schedule": lambda optimizer: ExponentialLR(optimizer, 0.97),
        "val_check_interval": 7,
    },
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_that_without_the_guard(tmp_path: Path, name: str) -> None:
    """The same rows reach the loggers, and the weights and running statistics are the same bits."""
    plain, guarded = (fit(tmp_path / str(one), guarded=one, **HEALTHY[name]) for one in (False, True))
    assert guarded.rows == plain.rows
    assert guarded.weights == plain.weights
    assert guarded.trainer.global_step == plain.trainer.global_step
    assert not guarded.incidents


class Copies(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["batch"] == batch_idx
        self.losses.append(float(outputs["loss"]))


def test_what_strikes_once_leaves_no_trace(tmp_path: Path) -> None:
    """What was retried counts once, and `on_train_batch_end` gets its output, not that of the refused batch."""
    seen, seen_healthy = Copies(), Copies()
    healthy = fit(tmp_path / "healthy", guarded=False, callbacks=(seen_healthy,))
    run = fit(tmp_path / "struck", "nan_batch", callbacks=(seen,))
    [incident] = run.incidents
    found = [incident[name] for name in ("signal", "cause", "step", "outcome")]
    assert found == ["nonfinite_loss", "transient", AT + 1, "recovered"]
    assert run.rows == healthy.rows
    assert run.weights == healthy.weights
    assert seen.losses == seen_healthy.losses


def test_a_broken_operation_is_named_by_its_line(tmp_path: Path) -> None:
    """A line of the user's training_step that breaks gradients is named, and patched; no NaN was logged."""
    run = fit(tmp_path, "operation", max_epochs=6)
    first = run.incidents[0]
    assert (first["cause"], first["outcome"], first["actions"]) == ("operation", "recovered", [{"remedy": "armor"}])
    line = Path(first["culprit"]["file"]).read_text().splitlines()[first["culprit"]["line"] - 1]
    assert "torch.sqrt(rest)" in line
    assert run.loss <= fit(tmp_path / "healthy", guarded=False).loss + 0.2
    assert all(math.isfinite(value) for _, row in run.rows for value in row.values())


def test_bad_rows_are_named_and_left_out(tmp_path: Path) -> None:
    """Two rows that hold NaN go to quarantine by their index, and none of the rest does."""
    run = fit(tmp_path, "rows", accumulate_grad_batches=3)
    assert sorted(row for incident in run.incidents for row in incident["rows"]) == [17, 99]
    listed = json.loads((run.place / "resilient_train" / "quarantine.json").read_text())
    assert sorted(one["row"] for one in listed["rows"]) == [17, 99]
    assert math.isfinite(run.loss)


def test_a_batch_without_a_loss_is_skipped(tmp_path: Path) -> None:
    """A training_step that returns None now and then makes no update, as without the guard."""
    plain, run = fit(tmp_path / "plain", "none", guarded=False), fit(tmp_path / "guarded", "none")
    assert not run.incidents
    assert run.trainer.global_step == 96
    assert run.weights == plain.weights
    assert run.rows == plain.rows


def test_a_trainer_that_is_only_observed_ends_as_a_plain_one(tmp_path: Path) -> None:
    """With `recovery="observe"`: the same bits and logs, NaN included, and its incidents are reported."""
    plain = fit(tmp_path / "plain", "rows", guarded=False)
    seen = fit(tmp_path / "seen", "rows", recovery="observe")
    assert repr(seen.weights) == repr(plain.weights)
    assert repr(seen.rows) == repr(plain.rows)
    assert {one["outcome"] for one in seen.incidents} == {"observed"}


def test_damage_is_found_before_a_validation(tmp_path: Path) -> None:
    """The state is scanned first, and what is trained again does not disturb a schedule that multiplies its rate."""

    def schedule(optimizer: Any) -> ExponentialLR:
        return ExponentialLR(optimizer, 0.97)

    plain = fit(tmp_path / "plain", guarded=False, schedule=schedule)
    run = fit(tmp_path / "guarded", "bit_flip", at=AT + 1, schedule=schedule)
    assert [(one["step"], one["rewound_to"]) for one in run.incidents] == [(64, 25)]
    assert run.weights == plain.weights
    assert [row["val"] for _, row in run.rows if "val" in row] == [row["val"] for _, row in plain.rows if "val" in row]


@pytest.mark.parametrize("nested", ["iterable", "mapping"])
def test_rows_without_an_index_need_none(tmp_path: Path, nested: str) -> None:
    """A stream, or loaders in a mapping, are repeated from memory."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Rows()[row] for row in range(256)])

    class OfMapping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"] if nested == "mapping" else batch, batch_idx)

    def end(fault: str, *, guarded: bool) -> list[list[float]]:
        L.seed_everything(1, verbose=False)
        trainer, module = trainer_of(tmp_path / fault, guarded=guarded), OfMapping(fault)
        trainer.fit(module, {"a": loader()} if nested == "mapping" else DataLoader(Stream(), BATCH))
        return Fitted(trainer, module, [], tmp_path).weights

    assert end("bit_flip", guarded=True) == end("", guarded=False)


def test_a_checkpoint_of_a_damaged_state_is_renamed(tmp_path: Path) -> None:
    """Checkpoints from before the damage stay, and those after it are healthy."""

    class Damage(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
            if trainer.global_step == 63:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    names = [f"step={step}.ckpt" for step in (20, 40, 60, 80)]
    saver = ModelCheckpoint(tmp_path / "files", filename="{step}", every_n_train_steps=20, save_top_k=-1)
    run = fit(tmp_path / "run", "rate", callbacks=(Damage(), saver), enable_checkpointing=True)
    first = run.incidents[0]
    assert (first["cause"], first["rewound_to"], first["outcome"]) == ("rate", 25, "recovered")
    assert sorted(one.name for one in (tmp_path / "files").iterdir()) == names
    assert (tmp_path / "unverified-saved.ckpt").exists()
    assert not (tmp_path / "saved.ckpt").exists()
    for name in names:
        state = torch.load(tmp_path / "files" / name, weights_only=False)["state_dict"]
        assert all(value.isfinite().all() and value.abs().max() < 1e4 for value in state.values())


def test_a_run_resumes_from_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    """One epoch, and two more from its checkpoint, are the run that is not guarded."""

    def weights(guarded: bool) -> list[list[float]]:
        place = tmp_path / str(guarded)
        for epochs in (1, 3):
            L.seed_everything(1, verbose=False)
            module, saver = Net(), ModelCheckpoint(place / "files", save_last=True)
            trainer = trainer_of(
                place, guarded=guarded, callbacks=(saver,), max_epochs=epochs, enable_checkpointing=True
            )
            trainer.fit(module, loader(), ckpt_path=place / "files" / "last.ckpt" if epochs == 3 else None)
        assert trainer.global_step == 96
        return Fitted(trainer, module, [], place).weights

    assert weights(True) == weights(False)
    assert not (tmp_path / "True" / "resilient_train-2").exists()


@pytest.mark.parametrize(("fault", "error"), [("raises", ZeroDivisionError), ("nan_batch", None)])
def test_nothing_stays_replaced(tmp_path: Path, fault: str, error: Any) -> None:
    """However `fit` ends, trainer, module and loader are what they were, and an error is the user's own."""
    L.seed_everything(1, verbose=False)
    module, own = Net(fault), loader()
    trainer = trainer_of(tmp_path, guarded=True)
    loop = trainer.fit_loop
    inner = (loop.epoch_loop, loop.epoch_loop.automatic_optimization, loop.epoch_loop.val_loop)
    owners: list[Any] = [trainer, module, trainer.strategy, trainer.precision_plugin, loop, *inner]
    before = [{name for name, value in vars(one).items() if callable(value)} for one in owners]
    with nullcontext() if error is None else pytest.raises(error):
        trainer.fit(module, own)
    added = [{name for name, value in vars(one).items() if callable(value)} for one in owners]
    names = ("run", "backward", "optimizer_step", "clip_grad_by_norm", "convert_input", "log", "save_checkpoint")
    assert not [name for was, now in zip(before, added, strict=True) for name in (now - was) if name in names]
    assert isinstance(next(iter(own)), list)
    assert isinstance(own.dataset, Rows)


def test_what_cannot_be_guarded_is_refused_by_name(tmp_path: Path) -> None:
    """Strategies that shard, the loss scaler of float16, and what would not rewind."""
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

    from resilient_train.trainers.lightning import refuse

    trainer = trainer_of(tmp_path, guarded=False)
    trainer.strategy._precision_plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="16-mixed is not supported yet"):
        refuse(trainer, Net())
    deep_speed: Any = DeepSpeedStrategy.__new__(DeepSpeedStrategy)  # it cannot be made without DeepSpeed
    megatron: Any = type("MegatronStrategy", (DDPStrategy,), {})()  # as in NeMo
    deep_speed._precision_plugin = None
    for strategy in (FSDPStrategy(), deep_speed, megatron):
        trainer._accelerator_connector.strategy = strategy
        with pytest.raises(ValueError, match=f"{type(strategy).__name__} is not supported yet: use one device"):
            refuse(trainer, Net())
    module, average = Net(), StochasticWeightAveraging(1e-2)
    with pytest.raises(ValueError, match="StochasticWeightAveraging does not rewind: use EMAWeightAveraging"):
        refuse(trainer_of(tmp_path, guarded=False, callbacks=(average,)), module)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"manual optimization is not supported: guard its loop with .*Guard"):
        refuse(trainer_of(tmp_path, guarded=False), module)


RANKS = """
import sys
from contextlib import nullcontext
from pathlib import Path
import torch
import lightning as L
from torch.utils.data import DataLoader
from lightning_programs import Net, Rows, lightning

class OnOneRank(Net):
    def strikes(self, fault):
        return self.trainer.global_rank == 1 and super().strikes(fault)

for fault in ("plain", "bit_flip", "rows"):
    place = Path(sys.argv[1], fault)
    L.seed_everything(1, verbose=False)
    module = OnOneRank(fault)
    trainer = L.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=5, logger=False, default_root_dir=place,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[lightning.Guarded()] if fault != "plain" else [],
    )
    trainer.fit(module, DataLoader(Rows(bad=(17, 99) if fault == "rows" else ()), 8, shuffle=True))
    place.mkdir(exist_ok=True)
    torch.save([one.detach() for one in module.parameters()], place / f"weights-{trainer.global_rank}.pt")
"""


def _agent(*words: str) -> None:
    torchrun("lightning", "--standalone", "--nproc_per_node=2", *words)


ENDS = {"plain": [], "bit_flip": [("corruption", 25)], "rows": [("data", None, 17), ("data", None, 99)]}


def test_two_processes_treat_a_fault_of_one_alike(tmp_path: Path) -> None:
    """Both ranks retry the update, rewind and leave rows out together: they end with the same weights."""
    program, said = tmp_path / "program.py", tmp_path / "said.txt"
    program.write_text(RANKS)
    agent = Forked(_agent, str(program), str(tmp_path), out=said)
    try:
        assert agent.ended(300.0) == 0, said.read_text()
    finally:
        agent.kill()

    weights = {one: [torch.load(tmp_path / one / f"weights-{rank}.pt") for rank in range(2)] for one in ENDS}
    for first, second in weights.values():
        assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, weights["plain"][0], weights["bit_flip"][0]))
    for fault, expected in ENDS.items():
        if fault != "plain":
            found = incidents(tmp_path / fault / "resilient_train")
            assert sorted((one["cause"], one["rewound_to"], *one["rows"]) for one in found) == expected
