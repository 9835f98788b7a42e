"""A Trainer of transformers under the guard: untouched while healthy, cured when struck."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import lightning
import pytest
import torch
from torch.utils.data import IterableDataset

pytest.importorskip("transformers")

import hf_programs as programs
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from hf_ranks import on_two_ranks
from safetensors.torch import load_file
from warm import ENVIRONMENT

import resilient_train
from resilient_train import GaveUp, Guard
from resilient_train.adapters.follower import OLDEST, Follower
from resilient_train.state.tree import sha256


def weights(trainer: Any) -> str:
    return sha256(dict(trainer.model.named_parameters()))


def rows(trainer: Any) -> list[dict[str, float]]:
    """What the trainer logged, without times."""
    return [
        {name: value for name, value in row.items() if "runtime" not in name and "per_second" not in name}
        for row in trainer.state.log_history
    ]


def incidents(output: Path) -> list[dict[str, Any]]:
    lines = (output / "resilient_train" / "incidents.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def trained(program: str, output: Path, fault: str = "", *, guarded: bool = True, **more: Any) -> Any:
    trainer = programs.trainer(program, output, fault, **more)
    if guarded:
        assert resilient_train.hf.guard(trainer) is trainer
    trainer.train()
    return trainer


class Ended(NamedTuple):
    """What is left of a trainer that has trained."""

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
    "more", [{}, {"gradient_accumulation_steps": 1, "max_grad_norm": -1.0}], ids=["usual", "plain"]
)
@pytest.mark.parametrize("program", list(programs.PROGRAMS))
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
    [
        ("nan_batch", "nonfinite_loss", "transient"),
        ("nan_grad", "nonfinite_grad", "transient"),
        ("bit_flip", "weights_jump", "corruption"),
    ],
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


@pytest.mark.parametrize(("program", "fault"), [("gpt2", "bad_rows"), ("vit", "hot_lr")])
def test_a_trainer_that_is_only_observed_ends_as_a_plain_one(program: str, fault: str, tmp_path: Path) -> None:
    """With `recovery="observe"`: the same bits and logs, NaN included, and its incidents are reported."""
    plain = trained(program, tmp_path / "plain", fault, guarded=False, logging_nan_inf_filter=False)
    seen = resilient_train.hf.guard(programs.trainer(program, tmp_path / "seen", fault), recovery="observe")
    seen.train()
    assert weights(seen) == weights(plain)
    assert repr(rows(seen)) == repr(rows(plain))
    found = incidents(tmp_path / "seen")
    assert bool(found) == bool(fault)
    assert len(found) < 3
    assert {incident["outcome"] for incident in found} <= {"observed"}


def test_bad_rows_are_named_and_left_out_also_after_a_resume(tmp_path: Path) -> None:
    struck = trained("gpt2", tmp_path, "bad_rows", save_strategy="steps", save_steps=50)
    named = [incident["rows"] for incident in incidents(tmp_path)]
    assert sorted(named) == [[17], [99]]
    assert all(incident["cause"] == "data" for incident in incidents(tmp_path))
    assert all(weight.isfinite().all() for weight in struck.model.parameters())
    again = programs.trainer("gpt2", tmp_path, "bad_rows", steps=80)
    resilient_train.hf.guard(again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-50"))
    assert again.state.global_step == 80
    assert len(incidents(tmp_path)) == 2


def test_a_broken_operation_is_named_by_its_line(tmp_path: Path) -> None:
    struck = trained("vit", tmp_path, "operation", steps=120, learning_rate=3e-3)
    found = incidents(tmp_path)
    assert found
    culprit = found[0]["culprit"]
    assert culprit["file"].endswith("hf_programs.py")
    assert "sqrt" in culprit["op"]
    assert all(weight.isfinite().all() for weight in struck.model.parameters())
    assert programs.evaluation_loss(struck) < 1.0


def test_a_hot_stretch_of_the_learning_rate_ends_where_a_healthy_run_ends(tmp_path: Path) -> None:
    healthy = programs.evaluation_loss(trained("vit", tmp_path / "healthy", guarded=False, steps=120))
    plain = programs.evaluation_loss(trained("vit", tmp_path / "plain", "hot_lr", guarded=False, steps=120))
    struck = trained("vit", tmp_path / "struck", "hot_lr", steps=120)
    assert programs.evaluation_loss(struck) < healthy + 0.2 * (plain - healthy) + 0.05
    assert struck.lr_scheduler.get_last_lr() == [1e-3]


def folders(output: Path) -> set[str]:
    return {folder.name for folder in output.iterdir() if "checkpoint" in folder.name}


def test_no_checkpoint_holds_damage_that_a_scan_finds(tmp_path: Path) -> None:
    """A bit flips before the update after which one is saved: its weights are those of a run without the fault."""
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": programs.AT + 1, "steps": 2 * programs.AT + 2}
    trained("vit", tmp_path / "healthy", guarded=False, **more)
    trained("vit", tmp_path / "struck", "bit_flip", **more)
    assert [incident["signal"] for incident in incidents(tmp_path / "struck")] == ["weights_jump"]
    for name in (f"checkpoint-{programs.AT + 1}", f"checkpoint-{2 * programs.AT + 2}"):
        found, healthy = (load_file(tmp_path / which / name / "model.safetensors") for which in ("struck", "healthy"))
        assert max(float(value.abs().max()) for value in found.values()) < 100
        assert sha256(found) == sha256(healthy)


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
    assert f"unverified-2-checkpoint-{programs.AT + 2}" in saved
    if recovery == "off":
        assert max(int(name.rpartition("-")[2]) for name in saved if name.startswith("checkpoint")) <= since


def test_a_healthy_step_looks_at_no_earlier_checkpoint() -> None:
    """Its cost does not grow with their number."""

    class Unread(list[Any]):
        def __iter__(self) -> NoReturn:
            raise AssertionError

    follower = object.__new__(Follower)
    vars(follower).update(guard=SimpleNamespace(incidents=[]), _seen=0, _saved=Unread())
    assert follower.rename_damaged(is_main=True) == []


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
    assert all(weight.isfinite().all() for weight in again.model.parameters())


def test_a_resume_finds_the_run_directory_of_its_checkpoint(tmp_path: Path) -> None:
    trained("vit", tmp_path, steps=4)
    trained("vit", tmp_path, "bad_rows", steps=50, save_strategy="steps", save_steps=50)
    second = tmp_path / "resilient_train-2"
    assert len((second / "incidents.jsonl").read_text().splitlines()) == 2
    again = programs.trainer("vit", tmp_path, "bad_rows", steps=100)
    resilient_train.hf.guard(again).train(resume_from_checkpoint=True)
    assert len((second / "incidents.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "resilient_train-3").exists()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have trained, one after the other, what the tests below look at."""
    place = tmp_path_factory.mktemp("two_ranks")
    names = ["bad_rows", "nan_grad", "plain+bad_rows", "observe+bad_rows", "plain+", "observe+"]
    code, said = on_two_ranks(place, *names)
    assert code == 0, said
    return place


def test_an_error_on_one_rank_is_that_error(tmp_path: Path) -> None:
    code, said = on_two_ranks(tmp_path, "raises")
    assert code not in (0, None)
    assert "ZeroDivisionError" in said


@pytest.mark.parametrize(("fault", "met"), [("bad_rows", 2), ("nan_grad", 1)])
def test_two_ranks_meet_the_same_incidents(fault: str, met: int, two_ranks: Path) -> None:
    one, other = ((two_ranks / f"{fault}-{rank}").read_text() for rank in (0, 1))
    assert one == other
    assert [incident["outcome"] for incident in incidents(two_ranks / fault)] == ["recovered"] * met


@pytest.mark.parametrize(("fault", "met"), [("bad_rows", ["observed"]), ("", [])])
def test_two_ranks_that_are_only_observed_end_as_plain_ones(fault: str, met: list[str], two_ranks: Path) -> None:
    """Bit for bit, with weights of NaN, and with one incident that was observed."""
    found = {(two_ranks / f"{how}+{fault}-{rank}").read_text() for how in ("plain", "observe") for rank in (0, 1)}
    assert len(found) == 1
    assert [incident["outcome"] for incident in incidents(two_ranks / f"observe+{fault}")] == met


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


MISUSE = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import torch
from resilient_train import Guard
if sys.argv[2] == "transformers":
    import hf_programs
    trainer = hf_programs.trainer("vit", sys.argv[3], steps=4)
    trainer.create_optimizer()
    guard = Guard(None, trainer.model, trainer.optimizer, data=trainer.train_dataset, batch_size=4)
    trainer.train()
else:
    import lightning_programs as programs
    module, trainer = programs.Net(), programs.trainer_of(sys.argv[3], guarded=False, max_steps=4)
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizer
    guard = Guard(None, module, optimizer, data=programs.Rows(), batch_size=8)
    trainer.fit(module, programs.loader())
print("trained")
"""


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_guard_behind_which_a_trainer_steps_says_so_at_the_end(library: str, tmp_path: Path) -> None:
    """The trainer is not disturbed; when the process ends, the guard says what to write instead."""
    words = [sys.executable, "-c", MISUSE, str(Path(__file__).parents[1]), library, str(tmp_path)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    [told] = [line for line in done.stderr.splitlines() if "has made no update" in line]
    assert "while its optimizers made 4 steps" in told
    assert "resilient_train.hf.guard(trainer)" in told
    assert "callbacks=[resilient_train.lightning.Guarded()]" in told


def test_the_page_has_the_versions_that_are_supported() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    assert f"`transformers` {OLDEST['transformers']} or newer" in page
    assert f"`lightning` {OLDEST['lightning']} or newer" in page


def test_an_error_of_the_user_passes_through_and_the_trainer_is_as_before(tmp_path: Path) -> None:
    trainer = resilient_train.hf.guard(programs.trainer("vit", tmp_path))
    plain, trainer.compute_loss = trainer.compute_loss, lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.compute_loss = plain
    trainer.train()
    assert trainer.state.global_step == 60


def test_the_lines_of_the_page_guard_a_trainer(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    [lines] = re.findall(r"```python\n(.*?hf\.guard.*?)```", page, re.DOTALL)
    made = programs.trainer("vit", tmp_path, steps=4)
    names = {"Trainer": type(made), "model": made.model, "args": made.args, "dataset": made.train_dataset}
    exec(lines, names)
    assert names["trainer"].state.global_step == 4
    assert incidents(tmp_path) == []
