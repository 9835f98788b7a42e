"""The stream of samples: arithmetic on positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_train.data.stream import Key, Stream

rows = st.integers(1, 50)
seeds = st.integers(0, 2**32)
positions = st.integers(0, 400)
counts = st.integers(1, 120)


def walk(stream: Stream, count: int) -> list[Key]:
    """One uninterrupted pass, a sample at a time."""
    keys: list[Key] = []
    position = 0
    while len(keys) < count:
        _, position, taken = stream.take(position, 1)
        keys += taken
    return keys


@given(rows, seeds, positions, counts, st.booleans())
def test_any_span_is_a_slice_of_the_uninterrupted_pass(n: int, seed: int, at: int, count: int, shuffle: bool) -> None:
    """Jumping to a position gives what walking there gives."""
    stream = Stream(n, seed, shuffle=shuffle)
    assert stream.take(at, count) == (at, at + count, walk(Stream(n, seed, shuffle=shuffle), at + count)[at:])


@given(rows, seeds, st.integers(0, 5))
def test_each_epoch_holds_every_row_once(n: int, seed: int, epoch: int) -> None:
    """An epoch is a permutation, and says which epoch it is."""
    keys = Stream(n, seed).take(epoch * n, n)[2]
    assert sorted(key.row for key in keys) == list(range(n))
    assert {key.epoch for key in keys} == {epoch}


def test_the_order_is_that_of_the_seed_and_the_epoch_if_it_is_shuffled() -> None:
    """There is another order for every epoch and every seed; without shuffling it is 0, 1, 2, ... in every epoch."""
    takes = [(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    orders = {tuple(key.row for key in Stream(50, seed).take(50 * epoch, 50)[2]) for seed, epoch in takes}
    assert len(orders) == 4
    assert [key.row for key in Stream(3, 9, shuffle=False).take(0, 7)[2]] == [0, 1, 2, 0, 1, 2, 0]


@given(rows, seeds, positions, counts, st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=5))
def test_skipped_ranges_are_passed_over_and_nothing_else_is(
    n: int, seed: int, at: int, count: int, ranges: list[tuple[int, int]]
) -> None:
    """What is taken is the uninterrupted pass without the skipped positions, overlapping ranges included."""
    stream = Stream(n, seed)
    for start, length in ranges:
        stream.skipped.append([start, start + length])
    dead = {position for start, length in ranges for position in range(start, start + length)}
    _, stop, keys = stream.take(at, count)
    alive = [position for position in range(at, stop) if position not in dead]
    full = walk(Stream(n, seed), stop)
    assert keys == [full[position] for position in alive]
    assert len(alive) == count
    assert stop - 1 not in dead


@given(st.integers(2, 50), seeds, st.data())
def test_quarantine_changes_the_places_of_its_rows_only(n: int, seed: int, data: st.DataObject) -> None:
    """Every other place stays what it was; a substitute is healthy and the same each time it is asked for."""
    bad = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n - 1))
    stream = Stream(n, seed)
    stream.quarantine(bad)
    before, after = Stream(n, seed).take(0, 3 * n)[2], stream.take(0, 3 * n)[2]
    for old, new in zip(before, after, strict=True):
        assert new.row not in bad
        assert old.row in bad or old == new
    position = data.draw(st.integers(0, 3 * n - 1))
    assert stream.take(position, 1)[2] == [after[position]]


@given(st.integers(1, 40), seeds, st.integers(1, 12), st.integers(0, 5), st.data())
def test_others_are_healthy_rows_beside_those_that_are_given(
    n: int, seed: int, count: int, draw: int, data: st.DataObject
) -> None:
    """As many, each in its key's epoch, none twice while there are enough; the same ones whenever asked."""
    bad = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    without = data.draw(st.sets(st.integers(0, n - 1), max_size=n))
    stream = Stream(n, seed)
    stream.quarantine(bad)
    keys = stream.take(data.draw(positions), count)[2]
    others = stream.others(keys, draw, without=without)
    assert others == stream.others(list(keys), draw, without=sorted(without))
    if n - len(bad) - len(without) > 20 and count > 5:  # enough that another draw, or other keys, cannot give the same
        assert others != stream.others(keys, draw + 1, without=without)
    healthy = set(range(n)) - bad - without
    beside = healthy - {key.row for key in keys}
    if not healthy:
        assert others == []
        return
    assert [key.epoch for key in others] == [key.epoch for key in keys]
    rows = {key.row for key in others}
    assert rows <= (beside or healthy)
    assert len(rows) == min(count, len(beside or healthy))


def test_quarantining_every_row_is_refused() -> None:
    """A stream without a healthy row would search for ever."""
    with pytest.raises(ValueError, match="all 3 rows"):
        Stream(3, 0).quarantine([0, 1, 2])
