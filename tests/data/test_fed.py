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
