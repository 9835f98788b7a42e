"""The cursor over training data: any update, from anywhere, for any number of processes and workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strangers import Augmented, Buffered, Counting, Fixed, RarelyRandom
from torch.utils.data import SequentialSampler, default_collate

from resilient_train.data.evaluation import IterableEvaluation, MapEvaluation
from resilient_train.data.iterable import IterableSamples
from resilient_train.data.samples import MapSamples, Samples, Slicing
from resilient_train.data.stream import Stream
from resilient_train.state.tree import sha256
from resilient_train.zoo.hf import hf_dataset

BATCH = 3
UPDATE = 4 * BATCH  # samples to an update, however they are cut


def slicings(world: int) -> list[Slicing]:
    return [Slicing(BATCH, accumulation=4 // world, rank=rank, world=world) for rank in range(world)]


def over(dataset: Any, slicing: Slicing, seed: int = 5, workers: int = 0) -> Samples:
    if isinstance(dataset, Counting | Buffered):
        return IterableSamples(dataset, slicing, seed=seed, collate=default_collate)
    return MapSamples(dataset, Stream(len(dataset), seed), slicing, collate=default_collate, num_workers=workers)


def batches(samples: Samples, updates: int) -> list[str]:
    """Digests of this rank's micro-batches, row contents and random numbers included."""
    return [sha256(batch) for _ in range(updates) for batch in samples.next_update().batches]


def indices(samples: Samples, updates: int) -> list[int]:
    """The rows that this rank trains on next."""
    return [
        index for _ in range(updates) for batch in samples.next_update().batches for index in batch["index"].tolist()
    ]


def interleaved(per_rank: list[list[str]]) -> list[str]:
    """The micro-batches of all ranks in the order in which one process would meet them."""
    return [batch for group in zip(*per_rank, strict=True) for batch in group]


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from([Augmented, RarelyRandom, Fixed]),
    rows=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    update=st.integers(0, 9),
    world=st.sampled_from([1, 2, 4]),
)
def test_an_update_is_the_same_from_anywhere_for_any_world(
    kind: Any, rows: int, seed: int, update: int, world: int
) -> None:
    """Rows and the random numbers in them are those of an uninterrupted pass in one process."""
    whole = batches(over(kind(rows), slicings(1)[0], seed), update + 2)
    per_rank = []
    for slicing in slicings(world):
        samples = over(kind(rows), slicing, seed)
        samples.load_state_dict({"position": update * UPDATE})
        per_rank.append(batches(samples, 2))
    assert interleaved(per_rank) == whole[update * 4 :]


@settings(max_examples=6, deadline=None)
@given(
    kind=st.sampled_from([Augmented, RarelyRandom, Fixed]),
    seed=st.integers(0, 2**31),
    update=st.integers(0, 5),
    world=st.sampled_from([1, 2]),
    workers=st.sampled_from([1, 2]),
)
def test_workers_make_no_difference_and_rewind_with_the_cursor(
    kind: Any, seed: int, update: int, world: int, workers: int
) -> None:
    """Persistent workers give the same rows and random numbers, before and after a rewind."""
    whole = batches(over(kind(), slicings(1)[0], seed), 8)
    per_rank = []
    for slicing in slicings(world):
        samples = over(kind(), slicing, seed, workers)
        first = batches(samples, 8)
        samples.load_state_dict({"position": update * UPDATE})
        per_rank.append(first + batches(samples, 2))
        samples.close()
    assert interleaved(per_rank) == whole + whole[update * 4 : update * 4 + 8]


@given(kind=st.sampled_from([Counting, Buffered]), world=st.sampled_from([1, 2, 4]), update=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_an_iterable_that_can_be_rewound_is_as_exact(kind: Any, world: int, update: int) -> None:
    """Rows, random numbers and passes repeat after a rewind, even if its state forgets what a shuffle buffer held."""
    whole = batches(over(kind(), slicings(1)[0]), 12)
    per_rank = []
    for slicing in slicings(world):
        samples = over(kind(), slicing)
        batches(samples, update)
        here = samples.state_dict()
        batches(samples, 3)
        samples.load_state_dict(here)
        per_rank.append(batches(samples, 2))
    assert interleaved(per_rank) == whole[update * 4 : update * 4 + 8]


def test_streams_of_hugging_face_are_exact_shuffled_or_not(tmp_path: Path) -> None:
    """Their state leaves the shuffle buffer's rows out, and still none is lost by a rewind."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"index": number}) for number in range(50)))
    source: dict[str, Any] = {"path": "json", "data_files": str(tmp_path / "rows.jsonl"), "split": "train"}
    for shuffled in (False, True):
        dataset = hf_dataset(**source, streaming=True, cache_dir=str(tmp_path))
        dataset = dataset.shuffle(seed=1, buffer_size=8) if shuffled else dataset
        samples = IterableSamples(dataset, Slicing(5), seed=0, collate=default_collate)
        epoch: list[int] = indices(samples, 3)
        here = samples.state_dict()
        rest = batches(samples, 12)
        samples.load_state_dict(here)
        assert batches(samples, 12) == rest
        samples.load_state_dict(here)
        epoch += indices(samples, 7)
        assert sorted(epoch) == list(range(50))
        assert (epoch == list(range(50))) is not shuffled


def test_nodes_of_torchdata_are_exact() -> None:
    """A loader of torchdata's is an iterable like any other, random mapping included."""
    nodes = pytest.importorskip("torchdata.nodes")

    def noisy(index: int) -> dict[str, Any]:
        return {"index": index, "noise": torch.rand(2)}

    rows = nodes.ParallelMapper(nodes.SamplerWrapper(SequentialSampler(range(23))), noisy, num_workers=0)
    samples = IterableSamples(nodes.Loader(rows), Slicing(4), seed=0, collate=default_collate)
    batches(samples, 3)
    here = samples.state_dict()
    rest = batches(samples, 8)
    samples.load_state_dict(here)
    assert batches(samples, 8) == rest


def test_a_stream_is_found_again_in_a_new_process() -> None:
    """A state taken in one place and loaded in another gives the rows that followed, after a rewind as well."""
    for kind in (Counting, Buffered):
        samples = over(kind(), Slicing(5))
        batches(samples, 2)
        fresh = samples.state_dict()
        rest = batches(samples, 6)
        samples.load_state_dict(fresh)
        batches(samples, 0)
        rewound = samples.state_dict()
        for state in (fresh, rewound):
            other = over(kind(), Slicing(5))
            other.load_state_dict(state)
            assert batches(other, 6) == rest


def test_rows_differ_between_epochs_and_seeds() -> None:
    """An augmentation is drawn anew in the next epoch: repeatable does not mean frozen."""
    one_row = Augmented(1)
    seen = {sha256(batch) for seed in (0, 1) for batch in over(one_row, Slicing(1), seed).next_update().batches}
    samples = over(one_row, Slicing(1), 0)
    seen |= set(batches(samples, 3))
    assert len(seen) == 4


def test_skipping_and_quarantine_reach_the_batches() -> None:
    """What the stream passes over or replaces is not trained on."""
    stream = Stream(20, 3)
    samples = MapSamples(Augmented(20), stream, Slicing(5), collate=default_collate)
    first = samples.next_update()
    stream.skip(5, 10)
    bad = samples.stream.take(10, 1).keys[0].row
    stream.quarantine([bad])
    samples.load_state_dict({"position": first.stop})
    update = samples.next_update()
    assert (update.start, update.stop) == (10, 15)
    assert bad not in update.batches[0]["index"].tolist()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 7, 12, 13])
def test_evaluation_sees_every_row_once_with_equally_many_batches_on_every_rank(world: int, rows: int) -> None:
    """A rank without rows of its own still takes part, at weight zero."""
    for build in (
        lambda slicing: MapEvaluation(Augmented(rows), slicing, seed=0, collate=default_collate, num_workers=0),
        lambda slicing: IterableEvaluation(Counting(rows), slicing, seed=0, collate=default_collate),
    ):
        dealt = [list(build(slicing)) for slicing in slicings(world)]
        assert len({len(mine) for mine in dealt}) == 1
        seen = [index for mine in dealt for batch, weight in mine if weight for index in batch["index"].tolist()]
        assert sorted(seen) == list(range(rows))
        assert sum(weight for mine in dealt for _, weight in mine) == rows
