"""What only a Trainer of transformers has: how it carries updates, evaluates, saves, logs, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from guarded import is_finite
from torch.utils.data import Dataset

pytest.importorskip("transformers")

import hf_programs as programs
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from kills import incidents as listed
from kills import summary
from transformers import TrainerCallback

import resilient_train
from resilient_train import Guard
from resilient_train.data.trees import sha256
from resilient_train.trainers.follower import OLDEST


def weights(trainer: Any) -> str:
    return sha256(dict(trainer.model.named_parameters()))


def rows(trainer: Any) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if "runtime" not in name and "per_second" not in name}
        for row in trainer.state.log_history
    ]


def incidents(output: Path) -> list[dict[str, Any]]:
    return listed(output / "resilient_train")


def trained(program: str, output: Path, fault: str = "", *, guarded: bool = True, **more: Any) -> Any:
    trainer = programs.trainer(program, output, fault, **more)
    if guarded:
        assert resilient_train.hf.guard(trainer) is trainer
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda trainer: resilient_train.hf.guard(trainer.model), "expected a transformers.Trainer"),
        (lambda trainer: resilient_train.hf.guard(trainer, steps=3), "unknown option 'steps'"),
        (lambda trainer: resilient_train.hf.guard(lightning.Trainer(logger=False)), r"of lightning; .*Guarded\(\)"),
        (lambda trainer: resilient_train.hf.guard(resilient_train.hf.guard(trainer)), "guarded already"),
        (lambda trainer: resilient_train.hf.guard(type(trainer)), "trainer: expected a transformers.Trainer"),
        (lambda trainer: resilient_train.lightning.Guarded(recover="balanced"), "unknown option 'recover'"),
        (lambda trainer: Guard(trainer.model, trainer, None, data=[0]), r"plain PyTorch, got .*hf.guard\(trainer\)"),
    ],
)
def test_misuse_is_refused_in_a_line(wrong: Any, error: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=error):
        wrong(programs.trainer("vit", tmp_path))


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        (DistributedType.DEEPSPEED, "DeepSpeed makes its updates itself"),
        (DistributedType.MEGATRON_LM, "Megatron-LM makes its updates itself"),
        (DistributedType.FSDP, "FullyShardedDataParallel keeps weights and gradients in flat pieces"),
    ],
)
def test_engines_that_cannot_be_guarded_are_refused_in_a_line(
    engine: DistributedType, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = programs.trainer("vit", tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", engine)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1) if engine is DistributedType.FSDP else None
    monkeypatch.setitem(trainer.accelerator.state._shared_state, "fsdp_plugin", plugin)
    with pytest.raises(ValueError, match=error) as caught:
        resilient_train.hf.guard(trainer)
    assert "\n" not in str(caught.value)


def test_the_page_has_the_versions_that_are_supported() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    assert f"`transformers` {OLDEST['transformers']} or newer" in page
    assert f"`lightning` {OLDEST['lightning']} or newer" in page


def test_the_lines_of_the_page_guard_a_trainer(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    [lines] = re.findall(r"```python\n(.*?hf\.guard.*?)```", page, re.DOTALL)
    made = programs.trainer("vit", tmp_path, steps=4)
    names = {"Trainer": type(made), "model": made.model, "args": made.args, "dataset": made.train_dataset}
    exec(lines, names)
    assert names["trainer"].state.global_step == 4
    assert incidents(tmp_path) == []


EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "per_device_eval_batch_size": 64,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # so that damage looks like the best state
}


def evaluations(trainer: Any) -> list[float]:
    return [row["eval_loss"] for row in rows(trainer) if "eval_loss" in row]


class Flip(TrainerCallback):  # type: ignore[misc]  # mypy runs without transformers
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step == programs.AT:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e3


def test_damage_that_a_scan_finds_is_neither_evaluated_nor_saved(tmp_path: Path) -> None:
    """The weights change just before both: the metric and the checkpoint are those of a run in which they do not."""
    more = EVALUATED | {"eval_steps": programs.AT, "save_steps": programs.AT, "steps": programs.AT}
    healthy = trained("vit", tmp_path / "healthy", guarded=False, **more)
    struck = resilient_train.hf.guard(programs.trainer("vit", tmp_path / "struck", **more))
    struck.add_callback(Flip())
    struck.train()
    assert [incident["signal"] for incident in incidents(tmp_path / "struck")] == ["weights_jump"]
    assert evaluations(struck) == evaluations(healthy)
    assert struck.state.best_metric == healthy.state.best_metric
    file = f"checkpoint-{programs.AT}/model.safetensors"
    assert (tmp_path / "struck" / file).read_bytes() == (tmp_path / "healthy" / file).read_bytes()


def test_the_best_weights_at_the_end_leave_no_incident_open(tmp_path: Path) -> None:
    """A run that ends soon after an incident, and loads the weights of its best evaluation, says that it recovered."""
    more = EVALUATED | {"eval_steps": 4, "save_steps": 4, "load_best_model_at_end": True}
    trainer = trained("vit", tmp_path, "bad_rows", steps=24, **more)
    assert trainer.state.best_global_step == 4
    written = summary(tmp_path / "resilient_train")
    assert [incident["outcome"] for incident in incidents(tmp_path)] == ["recovered"]
    assert written["incidents"]["recovered"] == written["incidents"]["total"] == 1


class Norms(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.read: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.read.append(sum(float(weight.grad.norm()) for weight in model.parameters() if weight.grad is not None))


def test_a_callback_before_the_step_reads_the_gradients(tmp_path: Path) -> None:
    """Once for each step of the trainer, also if an update is refused and retried."""
    found: dict[bool, list[float]] = {}
    for is_guarded in (False, True):
        fault = "nan_grad" if is_guarded else ""
        trainer = programs.trainer("vit", tmp_path / f"{is_guarded}", fault, steps=programs.AT + 4)
        trainer.add_callback(norms := Norms())
        (resilient_train.hf.guard(trainer) if is_guarded else trainer).train()
        found[is_guarded] = norms.read
    refused = found[True].pop(programs.AT)
    assert refused != refused
    del found[False][programs.AT]
    assert found[True] == found[False]


def test_a_run_within_a_handler_of_an_earlier_error_completes(tmp_path: Path) -> None:
    try:
        raise ValueError("no checkpoint")
    except ValueError:
        trained("vit", tmp_path, steps=4)
    assert summary(tmp_path / "resilient_train")["verdict"] == "well"


class Fail(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("of mine")


def test_an_error_of_the_users_passes_through(tmp_path: Path, info: pytest.LogCaptureFixture) -> None:
    """The trainer is as it was. The end of the run names no checkpoint: those of the trainer are not the guard's."""
    failing = resilient_train.hf.guard(programs.trainer("vit", tmp_path, steps=4, save_strategy="steps", save_steps=2))
    failing.add_callback(Fail)
    with pytest.raises(RuntimeError, match="of mine"):
        failing.train()
    assert (tmp_path / "checkpoint-2").is_dir()
    assert not any("newest checkpoint" in one for one in info.messages)
    failing.remove_callback(Fail)
    failing.train()
    assert failing.state.global_step == 4


KEYS: dict[str, Callable[[int], Any]] = {
    "name": lambda row: f"{row}",  # not a number, though it looks like one
    "number": lambda row: 1000 + row,
}


class Keyed(Dataset[dict[str, torch.Tensor]]):
    """Rows by keys of their own, and the first bad one of the usual data set."""

    def __init__(self, key: Callable[[int], Any]) -> None:
        self.pictures = programs.Pictures(programs.BAD_ROWS[:1])
        self.row_of = {key(row): row for row in range(programs.ROWS)}

    def __len__(self) -> int:
        return programs.ROWS

    def __getitem__(self, key: Any) -> dict[str, torch.Tensor]:
        return self.pictures[self.row_of[key]]


@pytest.mark.parametrize("key", KEYS)
def test_a_sampler_may_draw_any_keys(key: str, tmp_path: Path) -> None:
    trainer = programs.trainer("vit", tmp_path, steps=8)
    trainer.train_dataset = dataset = Keyed(KEYS[key])
    trainer._get_train_sampler = lambda *_: [*dataset.row_of]
    resilient_train.hf.guard(trainer).train()
    [incident] = incidents(tmp_path)
    assert (incident["cause"], incident["rows"], incident["actions"]) == ("data", [], [{"remedy": "skip"}])
    assert trainer.state.global_step == 8


def test_batches_may_be_fetched_on_one_rank_for_all(tmp_path: Path) -> None:
    """With `dispatch_batches` of Accelerate no rank knows which rows it gets."""
    dispatch = {"dispatch_batches": True}
    trainer = programs.trainer("vit", tmp_path, "bad_rows", steps=4, accelerator_config=dispatch)
    resilient_train.hf.guard(trainer).train()
    assert {tuple(incident["rows"]) for incident in incidents(tmp_path)} == {()}
    assert is_finite(trainer.model)
