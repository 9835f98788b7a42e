"""Rows without an index in a guarded Trainer of transformers: it trains, and leaves out the batches that are bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import hf_programs as programs
import torch
from test_hf import incidents
from torch.utils.data import Dataset, Sampler

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
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
