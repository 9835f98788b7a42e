"""What is kept of the batches that a trainer has fetched."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from resilient_train.data import fed
from resilient_train.data.fed import FedSamples
from resilient_train.data.samples import Slicing

ROWS, BATCH, MICRO_BATCHES = torch.arange(64.0), 4, 2
UPDATE = BATCH * MICRO_BATCHES
UPDATE_BYTES = UPDATE * ROWS.element_size()


def samples(updates: int) -> FedSamples:
    """Updates that were fetched and made."""
    made = FedSamples(Slicing(BATCH, MICRO_BATCHES, 0, 1), dataset=ROWS, collate=default_collate)
    for start in range(0, updates * UPDATE, UPDATE):
        first, second = range(start, start + BATCH), range(start + BATCH, start + UPDATE)
        newest = made.feed()
        made.feed_more(newest, ROWS[first], first)
        made.next_update()
        made.feed_more(newest, ROWS[second], second)
    return made


def kept(of: FedSamples) -> int:
    return sum(batch.nbytes for one in of._fed for batch in one.batches or ())


def test_no_more_is_kept_than_allowed_also_while_a_rewind_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that were fetched again are dropped again, and each repetition gets the same ones."""
    most = 3 * UPDATE_BYTES
    monkeypatch.setattr(fed, "_MAX_BYTES", most)
    repeated = samples(8)
    assert kept(repeated) == repeated._kept_bytes <= most
    for _ in range(3):
        repeated.load_state_dict({"position": 0})
        for number in range(8):
            update = repeated.next_update()
            assert torch.cat(update.batches).tolist() == list(range(number * UPDATE, (number + 1) * UPDATE))
            assert kept(repeated) == repeated._kept_bytes <= most + UPDATE_BYTES  # that of the update at hand


def test_what_is_replaced_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = samples(8)
    repeated.quarantine([5, 21])
    repeated.load_state_dict({"position": 0})
    while repeated.is_behind:
        repeated.next_update()
    assert kept(repeated) == repeated._kept_bytes == 8 * UPDATE_BYTES
    repeated.forget_before(repeated.newest_stop + 100 * UPDATE)
    assert kept(repeated) == repeated._kept_bytes == 0


@pytest.mark.parametrize("unknown", [0, 1])
def test_rows_are_known_of_all_micro_batches_or_of_none(unknown: int) -> None:
    """A sampler may yield what is no row number now and then: no batch is lost, and no other rows are blamed."""
    made = FedSamples(Slicing(BATCH, MICRO_BATCHES, 0, 1), dataset=ROWS, collate=default_collate)
    given = [(), range(4, 8)] if unknown == 0 else [range(4), ()]
    together = made.feed()
    made.feed_more(together, ROWS[:4], given[0])
    made.feed_more(together, ROWS[4:8], given[1])
    made.next_update()
    one_by_one = made.feed()
    made.feed_more(one_by_one, ROWS[8:12], given[0])
    made.next_update()
    made.feed_more(one_by_one, ROWS[12:16], given[1])
    assert together.rows == one_by_one.rows == []
    made.quarantine([5])
    made.load_state_dict({"position": 0})
    for start in (0, 8):
        assert torch.cat(made.next_update().batches).tolist() == list(range(start, start + 8))
