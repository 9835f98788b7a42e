"""Rows of a guarded Trainer of transformers that have no index or no label: it trains, and blames nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from guarded import is_finite

pytest.importorskip("transformers")

import hf_programs as programs
import torch
from test_hf import incidents, weights
from torch.utils.data import Dataset, Sampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import resilient_train

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


class Drawn(Sampler[Any]):
    def __init__(self, dataset: Keyed) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return programs.ROWS

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset.row_of)


@pytest.mark.parametrize("key", KEYS)
def test_a_sampler_may_draw_any_keys(key: str, tmp_path: Path) -> None:
    trainer = programs.trainer("vit", tmp_path, steps=8)
    trainer.train_dataset = dataset = Keyed(KEYS[key])
    trainer._get_train_sampler = lambda *_: Drawn(dataset)
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


def test_a_row_without_a_label_accuses_no_line_of_the_caller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its loss is 0/0 in the library, its gradient 0: it passes, and the run has the bits of the unguarded one."""
    gc.unfreeze()  # frozen.py hides functions of libraries, and one is patched here
    tokens = torch.randint(0, 32, (16, 6), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": one, "labels": one if row != 5 else one * 0 - 100} for row, one in enumerate(tokens)]
    size: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    usual: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    usual |= {"per_device_train_batch_size": 1, "num_train_epochs": 2, "learning_rate": 1e-3}
    found = []
    for is_guarded in (False, True):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, **size))
        trainer = Trainer(model, TrainingArguments(str(tmp_path / str(is_guarded)), **usual), train_dataset=rows)
        (resilient_train.hf.guard(trainer) if is_guarded else trainer).train()
        found.append(weights(trainer))
    assert found[0] == found[1]
    [incident] = incidents(tmp_path / "True")
    assert Path(incident["culprit"]["file"]).name == "loss_utils.py"
    assert incident["outcome"] == "recovered"
    assert Path(__file__).name not in caplog.text
