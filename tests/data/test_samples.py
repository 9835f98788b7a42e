"""The cursor over training data: any update, from anywhere, for any number of processes and workers."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import SequentialSampler, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from user_programs import Augmented, Counting, Fixed, RarelyRandom

from resilient_train.core.transaction import Update
from resilient_train.data import build
from resilient_train.data.samples import MapSamples, Samples, Slicing
from resilient_train.data.sequential import IterableSamples
from resilient_train.data.stream import Stream
from resilient_train.data.trees import sha256
from resilient_train.zoo.hf import hf_dataset

BATCH = 3
UPDATE = 4 * BATCH  # samples to an update, however they are cut
EIGHT = Slicing(8)


def slicings(world: int) -> list[Slicing]:
    return [Slicing(BATCH, accumulation=4 // world, rank=rank, world=world) for rank in range(world)]


def of_stream(dataset: Any, slicing: Slicing, seed: int = 0) -> IterableSamples:
    return IterableSamples(dataset, slicing, seed, default_collate)


def over(
    dataset: Any,
    slicing: Slicing = EIGHT,
    seed: int = 5,
    workers: int = 0,
    *,
    shuffle: bool = True,
    collate: Any = default_collate,
) -> Any:
    if isinstance(dataset, Counting):
        return of_stream(dataset, slicing, seed)
    stream = Stream(len(dataset), seed, shuffle=shuffle)
    return MapSamples(dataset, stream, slicing, collate=collate, num_workers=workers, pin_memory=False)


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
    """Rows and their random numbers are those of an uninterrupted pass; and of batches that are made of their keys."""
    whole = batches(over(kind(rows), slicings(1)[0], seed), update + 2)
    per_rank = []
    for slicing in slicings(world):
        samples, other = over(kind(rows), slicing, seed), over(kind(rows), slicing, seed)
        samples.load_state_dict({"position": update * UPDATE})
        made = [samples.next_update(), samples.next_update()]
        per_rank.append([sha256(batch) for one in made for batch in one.batches])
        keys = [keys for one in made for keys in one.keys]
        assert [len(some) for some in keys] == [BATCH] * 2 * slicing.accumulation
        assert [sha256(other.collated(some)) for some in keys] == per_rank[-1]
    assert interleaved(per_rank) == whole[update * 4 :]


@settings(max_examples=4, deadline=None)
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


@given(st.sampled_from([1, 2, 4]), st.integers(0, 9), st.integers(0, 1))
@example(1, 3, 1)
@settings(max_examples=20, deadline=None)
def test_an_iterable_that_can_be_rewound_is_as_exact(world: int, update: int, skipped: int) -> None:
    """Rows, random numbers and passes repeat after a rewind.

    So they do in a new process, for a state from before the rewind and for one from after it; also where what
    follows is skipped, as after an incident.
    """
    whole = batches(over(Counting(), slicings(1)[0]), 12)
    per_rank = []
    for slicing in slicings(world):
        samples = over(Counting(), slicing)
        batches(samples, update)
        here = samples.state_dict()
        batches(samples, 3)
        samples.load_state_dict(here)
        rewound, left_out = samples.state_dict(), [(samples.position, samples.position + UPDATE)] * skipped
        for span in left_out:
            samples.skip(*span)
        behind = samples.state_dict()
        per_rank.append(batches(samples, 2))
        for state in (here, rewound, behind):
            other = over(Counting(), slicing)
            other.load_state_dict(state)
            for span in left_out:
                other.skip(*span)
            assert batches(other, 2) == per_rank[-1]
    assert interleaved(per_rank) == whole[(update + skipped) * 4 :][:8]


def of_hugging_face(place: Path) -> Any:
    (place / "rows.jsonl").write_text("\n".join(json.dumps({"index": number}) for number in range(23)))
    source: dict[str, Any] = {"path": "json", "data_files": str(place / "rows.jsonl"), "split": "train"}
    return hf_dataset(**source, streaming=True, cache_dir=str(place))


def of_torchdata(place: Path) -> Any:
    """With a random mapping."""
    nodes = pytest.importorskip("torchdata.nodes")

    def noisy(index: int) -> dict[str, Any]:
        return {"index": index, "noise": torch.rand(2)}

    return nodes.Loader(nodes.ParallelMapper(nodes.SamplerWrapper(SequentialSampler(range(23))), noisy, num_workers=0))


@pytest.mark.parametrize("made", [of_hugging_face, of_torchdata])
def test_streams_of_libraries_are_exact(made: Any, tmp_path: Path) -> None:
    samples = of_stream(made(tmp_path), Slicing(4))
    epoch = indices(samples, 3)
    here = samples.state_dict()
    rest = batches(samples, 8)
    samples.load_state_dict(here)
    assert batches(samples, 8) == rest
    samples.load_state_dict(here)
    assert (epoch + indices(samples, 3))[:23] == list(range(23))


def test_rows_differ_between_epochs_and_seeds() -> None:
    """An augmentation is drawn anew in the next epoch: repeatable does not mean frozen."""
    one_row = Augmented(1)
    seen = {sha256(batch) for seed in (0, 1) for batch in over(one_row, Slicing(1), seed).next_update().batches}
    samples = over(one_row, Slicing(1), 0)
    seen |= set(batches(samples, 3))
    assert len(seen) == 4


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 7, 12, 13])
def test_evaluation_sees_every_row_once_with_equally_many_batches_on_every_rank(world: int, rows: int) -> None:
    """A rank without rows of its own still takes part, at weight zero."""
    config: Any = SimpleNamespace(eval={"_target_": "rows"}, num_workers=0)
    dealt = [
        list(build.Evaluation(Augmented(rows), config, slicing, seed=0, collate=default_collate).batches())
        for slicing in slicings(world)
    ]
    assert len({len(mine) for mine in dealt}) == 1
    seen = [index for mine in dealt for batch, weight in mine if weight for index in batch["index"].tolist()]
    assert sorted(seen) == list(range(rows))
    assert sum(weight for mine in dealt for _, weight in mine) == rows


def test_making_batches_in_between_changes_nothing() -> None:
    """A diagnosis may make what batches it likes: the stream goes on as if it had not."""
    plain, asked = over(Augmented(), slicings(1)[0]), over(Augmented(), slicings(1)[0])
    for _ in range(5):
        update = asked.next_update()
        asked.collated(asked.others(update.keys[0], 0))
        assert sha256(update.batches) == sha256(plain.next_update().batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_update_after_a_quarantine_is_made_with_substitutes(workers: int) -> None:
    """What was fetched ahead is thrown away; all other places stay what they were, without those that are skipped."""
    samples, before = over(Augmented(), Slicing(5), workers=workers), over(Augmented(), Slicing(5))
    samples.next_update()
    expected = [before.next_update() for _ in range(4)][1:]
    bad = expected[0].keys[0][2].row
    samples.quarantine([bad])
    samples.skip(expected[1].start, expected[1].stop)
    for old in (expected[0], expected[2]):
        new = samples.next_update()
        assert (new.start, new.stop) == (old.start, old.stop)
        assert bad not in new.batches[0]["index"].tolist()
        for was, now in zip(old.keys[0], new.keys[0], strict=True):
            assert was.row == bad or was == now
    samples.close()


# Rows that raise.


@dataclass
class Faulty(Augmented):
    """Some rows cannot be read, some have another shape than all others."""

    rows: int = 37
    missing: Collection[int] = ()
    odd: Collection[int] = ()

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        if index in self.missing:
            Path(f"/nowhere/{index}.png").read_bytes()  # THE LINE
        if index in self.odd:
            row["x"] = torch.zeros(3)
        return row


LINE = next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# THE LINE" in line)


class InBatches(Faulty):
    """The same, fetched many at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def picky(rows: list[dict[str, Any]]) -> Any:
    """A collate function of a user's own, that stumbles over some rows."""
    if any(row["index"] % 10 == 3 for row in rows):
        raise ValueError(f"cannot pad\n row {rows[0]['index']}")
    return default_collate(rows)


def rows_of(update: Update) -> list[int]:
    return [key.row for keys in update.keys for key in keys]


def epoch_of(samples: MapSamples) -> list[Update]:
    return [samples.next_update() for _ in range(-(-samples.rows // samples.slicing.samples))]


@pytest.mark.parametrize(("kind", "workers"), [(Faulty, 0), (InBatches, 2)])
def test_rows_that_raise_are_told_with_others_in_their_places(kind: Any, workers: int) -> None:
    """Wherever they come, the first update and several in one batch included; all other places stay what they were."""
    plain, missing = over(Augmented(40)), {5, 17, 18, 30}
    first = rows_of(plain.next_update())
    plain.load_state_dict({"position": 0})
    missing |= set(first[:2])
    others, samples = active_children(), over(kind(40, missing), workers=workers)
    seen = set()
    for old in epoch_of(plain):
        new = samples.next_update()
        guilty = [row for row in rows_of(old) if row in missing]
        assert [row.row for row in new.failed] == guilty
        assert (new.start, new.stop) == (old.start, old.stop)
        for was, now in zip(old.keys[0], new.keys[0], strict=True):
            assert now.row not in missing
            assert was.row in missing or was == now
        assert new.batches[0]["index"].tolist() == rows_of(new)
        seen |= set(guilty)
        for row in new.failed:
            what = f"FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/{row.row}.png'"
            assert row.error == f"{what} ({__file__}:{LINE})"
    assert seen == missing
    samples.close()
    assert {*active_children()} <= {*others}, "a worker that has raised outlives its loader"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_update_that_failed_fails_alike_until_its_rows_are_in_quarantine(workers: int) -> None:
    """Going back to it gives the very same; with its rows in quarantine nothing fails any more."""
    samples = over(Faulty(24, {4, 9}), workers=workers)
    failed = next(update for update in epoch_of(samples) if update.failed)
    samples.go_back(failed)
    again = samples.next_update()
    assert (again.keys, again.failed, sha256(again.batches)) == (failed.keys, failed.failed, sha256(failed.batches))
    samples.go_back(failed)
    samples.quarantine([4, 9])
    cured = samples.next_update()
    assert (cured.start, cured.failed) == (failed.start, [])
    assert all(update.failed == [] for update in epoch_of(samples))
    samples.close()


SHAPE = "RuntimeError: stack expects each tensor to be equal size"


@pytest.mark.parametrize(
    ("count", "odd", "batch_size", "collate", "error"),
    [
        (40, {2, 11, 12}, 8, default_collate, SHAPE),
        (300, set(range(0, 300, 60)), 100, default_collate, SHAPE),  # although as many others would hold odd ones too
        (40, {3, 13, 23, 33}, 8, picky, f"ValueError: cannot pad row .* [(]{__file__}:"),
    ],
    ids=["another shape", "large batches", "the user's collate"],
)
def test_rows_that_do_not_collate_are_found(
    count: int, odd: set[int], batch_size: int, collate: Any, error: str
) -> None:
    """As themselves and not as all others; the error is that of collating, in one line, with the line of the user."""
    rows = Faulty(count, {7}, odd if collate is default_collate else ())
    samples = over(rows, Slicing(batch_size), collate=collate)
    failed = {row.row: row.error for update in epoch_of(samples) for row in update.failed}
    assert failed.keys() == odd | {7}
    assert all(re.match(error, failed[row]) for row in odd)


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (Faulty(12, range(12)), {"workers": 2}, "No such file or directory: '/nowhere/"),
        (Faulty(1, {0}), {}, "No such file or directory: '/nowhere/0.png'"),
        (Augmented(12), {"collate": lambda rows: rows[0]["z"]}, "'z'"),
        (Faulty(12, (), range(0, 12, 2)), {"shuffle": False}, "stack expects each tensor"),
    ],
)
def test_where_no_row_helps_the_error_is_the_users_own(dataset: Any, options: dict[str, Any], said: str) -> None:
    """A data set or a collate function that is broken as a whole ends the run, with its own traceback."""
    samples = over(dataset, Slicing(12), **options)
    for _ in range(2):
        with pytest.raises(Exception, match=said) as raised:
            samples.next_update()
        assert raised.value.__context__ is None
        assert "Original Traceback" not in str(raised.value)
        assert samples.position == 0
    samples.close()


def test_an_interrupt_while_a_row_is_fetched_is_heard() -> None:
    class Interrupted(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        over(Interrupted()).next_update()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks every 5 seconds whether a worker that it waits for is alive."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.3,))


def workers_of(samples: MapSamples) -> list[Any]:
    return list(samples._batches._workers)  # type: ignore[union-attr]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_is_killed_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Wherever the training is at the time: the samples are what they would have been."""
    plain, samples = over(Augmented(400)), over(Augmented(400), workers=2)
    with caplog.at_level(logging.WARNING, "resilient_train"):
        for number in range(24):
            if number in (3, 14):
                os.kill(struck := workers_of(samples)[0].pid, signal.SIGKILL)
                while _state(struck) != "Z":  # the training, in which nothing may be raised
                    time.sleep(0.01)
            assert sha256(samples.next_update().batches) == sha256(plain.next_update().batches)
        assert len(workers_of(samples)) == 2
        assert all(worker.is_alive() for worker in workers_of(samples))
    assert len(caplog.messages) == 2
    for line in caplog.messages:  # as it is met: by a signal, or by a pipe that is dead
        assert re.search("exited unexpectedly|Connection|EOF", line)
    samples.close()
