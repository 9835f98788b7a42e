"""A Trainer of transformers under the guard: untouched while healthy, cured when struck."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import pytest
import torch
from guarded import is_finite
from torch.utils.data import IterableDataset

pytest.importorskip("transformers")

import hf_programs as programs
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from hf_ranks import on_two_ranks
from kills import incidents as listed

import resilient_train
from resilient_train import GaveUp, Guard
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


class Ended(NamedTuple):
    weights: str
    rows: list[dict[str, float]]


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Train without a guard and without a fault, once for all tests that compare with it."""
    made: dict[str, Ended] = {}

    def once(program: str, **more: Any) -> Ended:
        if (key := f"{program} {more}") not in made:
            trainer = trained(program, tmp_path_factory.mktemp("unguarded"), guarded=False, **more)
            made[key] = Ended(weights(trainer), rows(trainer))
        return made[key]

    return once


@pytest.mark.parametrize(
    ("program", "more"), [("llama", {}), ("vit", {"gradient_accumulation_steps": 1, "max_grad_norm": -1.0})]
)
def test_a_healthy_trainer_ends_with_the_same_bits_and_logs(
    program: str, more: dict[str, Any], tmp_path: Path, unguarded: Callable[..., Ended]
) -> None:
    plain = unguarded(program, **more)
    guarded = trained(program, tmp_path / "guarded", **more)
    assert weights(guarded) == plain.weights
    assert rows(guarded) == plain.rows
    assert incidents(tmp_path / "guarded") == []
    assert type(guarded).__name__ == "Struck"


@pytest.mark.parametrize(
    ("fault", "signal", "cause"),
    [("nan_batch", "nonfinite_loss", "transient"), ("bit_flip", "weights_jump", "corruption")],
)
def test_what_strikes_once_leaves_no_trace(
    fault: str, signal: str, cause: str, tmp_path: Path, unguarded: Callable[..., Ended]
) -> None:
    healthy = unguarded("llama")
    struck = trained("llama", tmp_path / "struck", fault)
    [incident] = incidents(tmp_path / "struck")
    assert (incident["signal"], incident["cause"], incident["outcome"]) == (signal, cause, "recovered")
    assert struck.state.global_step == 60
    assert weights(struck) == healthy.weights
    assert [row["loss"] for row in rows(struck) if "loss" in row][:5] == [
        row["loss"] for row in healthy.rows if "loss" in row
    ][:5]
    assert all(row["loss"] == row["loss"] for row in rows(struck) if "loss" in row)  # no NaN in the logs


def test_bad_rows_are_named_and_left_out_also_after_a_resume(tmp_path: Path) -> None:
    struck = trained("gpt2", tmp_path, "bad_rows", save_strategy="steps", save_steps=50)
    named = [incident["rows"] for incident in incidents(tmp_path)]
    assert sorted(named) == [[17], [99]]
    assert all(incident["cause"] == "data" for incident in incidents(tmp_path))
    assert is_finite(struck.model)
    again = programs.trainer("gpt2", tmp_path, "bad_rows", steps=80)
    resilient_train.hf.guard(again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-50"))
    assert again.state.global_step == 80
    assert len(incidents(tmp_path)) == 2


def folders(output: Path) -> set[str]:
    return {folder.name for folder in output.iterdir() if "checkpoint" in folder.name}


@pytest.mark.parametrize("recovery", ["balanced", "off"])
def test_a_checkpoint_from_after_the_damage_began_is_renamed(recovery: str, tmp_path: Path) -> None:
    (tmp_path / f"unverified-checkpoint-{programs.AT + 2}").mkdir()  # of an earlier run
    trainer = programs.trainer("vit", tmp_path, "hot_lr", save_strategy="steps", save_steps=2)
    resilient_train.hf.guard(trainer, recovery=recovery)
    with pytest.raises(GaveUp) if recovery == "off" else nullcontext():
        trainer.train()
    [since] = {incident["since"] for incident in incidents(tmp_path) if incident["landed"]} or [programs.AT]
    saved = folders(tmp_path)
    assert f"checkpoint-{since}" in saved
    assert f"unverified-checkpoint-{programs.AT + 2}-2" in saved
    if recovery == "off":
        assert max(int(name.rpartition("-")[2]) for name in saved if name.startswith("checkpoint")) <= since
    else:  # the learning rate was 100 times as high for ten updates
        assert programs.evaluation_loss(trainer) < 1.0
        assert trainer.state.global_step == 60


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Rows without an index, though their number is known; one of them is bad."""

    def __init__(self, bad: int | None = None, rows: int = 200) -> None:
        self.pictures = programs.Pictures(() if bad is None else (bad,))
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.pictures[row % programs.ROWS] for row in range(self.rows))


def of_a_stream(output: Path, stream: Stream, *, guarded: bool = True, **more: Any) -> Any:
    trainer = programs.trainer("vit", output, **more)
    trainer.train_dataset = stream
    return resilient_train.hf.guard(trainer) if guarded else trainer


def test_batches_that_do_not_fill_an_update_are_carried_into_the_next_pass(tmp_path: Path) -> None:
    plain = of_a_stream(tmp_path / "plain", Stream(rows=40), guarded=False, steps=12, gradient_accumulation_steps=4)
    plain.train()
    guarded = of_a_stream(tmp_path / "guarded", Stream(rows=40), steps=12, gradient_accumulation_steps=4)
    guarded.train()
    assert weights(guarded) == weights(plain)


def test_what_was_skipped_is_left_out_again_after_a_resume(tmp_path: Path) -> None:
    of_a_stream(tmp_path, Stream(bad=100), save_strategy="steps", save_steps=10, steps=20).train()
    [incident] = incidents(tmp_path)
    assert incident["actions"] == [{"remedy": "skip"}]
    again = of_a_stream(tmp_path, Stream(bad=100), steps=25)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert again.state.global_step == 25
    assert len(incidents(tmp_path)) == 1
    assert is_finite(again.model)


def test_a_resume_finds_the_run_directory_of_its_checkpoint(tmp_path: Path) -> None:
    trained("vit", tmp_path, steps=4)
    trained("vit", tmp_path, "bad_rows", steps=30, save_strategy="steps", save_steps=30)
    second = tmp_path / "resilient_train-2"
    assert len(listed(second)) == 2
    again = programs.trainer("vit", tmp_path, "bad_rows", steps=34)
    resilient_train.hf.guard(again).train(resume_from_checkpoint=True)
    assert len(listed(second)) == 2
    assert not (tmp_path / "resilient_train-3").exists()


def test_two_ranks_meet_the_same_incidents(tmp_path: Path) -> None:
    """Trained one after the other: guarded, observed and plain with bad rows; and an error of one rank is that error.

    Observed they end as plain ones, bit for bit, with weights of NaN, and with one incident.
    """
    code, said = on_two_ranks(tmp_path, "bad_rows", "plain+bad_rows", "observe+bad_rows", "raises")
    assert code not in (0, None)
    assert "ZeroDivisionError" in said
    digests = {one.name: one.read_text() for one in tmp_path.glob("*bad_rows-[01]")}
    assert len(digests) == 6, said
    assert digests["bad_rows-0"] == digests["bad_rows-1"]
    assert len({digest for name, digest in digests.items() if "+" in name}) == 1
    assert [incident["outcome"] for incident in incidents(tmp_path / "bad_rows")] == ["recovered"] * 2
    assert [incident["outcome"] for incident in incidents(tmp_path / "observe+bad_rows")] == ["observed"]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda trainer: resilient_train.hf.guard(trainer.model), "expected a transformers.Trainer"),
        (lambda trainer: resilient_train.hf.guard(trainer, steps=3), "unknown option 'steps'"),
        (lambda trainer: resilient_train.hf.guard(trainer, recovery="balancd"), "balancd"),
        (lambda trainer: resilient_train.hf.guard(lightning.Trainer(logger=False)), r"of lightning; .*Guarded\(\)"),
        (lambda trainer: resilient_train.hf.guard(resilient_train.hf.guard(trainer)), "guarded already"),
        (lambda trainer: resilient_train.hf.guard(type(trainer)), "trainer: expected a transformers.Trainer"),
        (lambda trainer: resilient_train.hf.guard(trainer, memory=5), "memory: expected a MemoryConfig"),
        (lambda trainer: resilient_train.hf.guard(trainer, verify_after=-1), "verify_after=-1: must be a whole number"),
        (lambda trainer: resilient_train.lightning.Guarded(recover="balanced"), "unknown option 'recover'"),
        (lambda trainer: Guard(trainer.model, trainer, None, data=[0]), r"plain PyTorch, got .*hf.guard\(trainer\)"),
        (lambda trainer: Guard(None, trainer, None, data=[0]), r"model: .*got Struck; .*hf.guard\(trainer\)"),
        # The trainer makes its optimizer in `train`.
        (
            lambda trainer: Guard(None, trainer.model, trainer.optimizer, data=[0], batch_size=1),
            r"got None; .*hf.guard",
        ),
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


def test_an_error_of_the_user_passes_through_and_the_trainer_is_as_before(tmp_path: Path) -> None:
    trainer = resilient_train.hf.guard(programs.trainer("vit", tmp_path, steps=4))
    plain, trainer.compute_loss = trainer.compute_loss, lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.compute_loss = plain
    trainer.train()
    assert trainer.state.global_step == 4


def test_the_lines_of_the_page_guard_a_trainer(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    [lines] = re.findall(r"```python\n(.*?hf\.guard.*?)```", page, re.DOTALL)
    made = programs.trainer("vit", tmp_path, steps=4)
    names = {"Trainer": type(made), "model": made.model, "args": made.args, "dataset": made.train_dataset}
    exec(lines, names)
    assert names["trainer"].state.global_step == 4
    assert incidents(tmp_path) == []
