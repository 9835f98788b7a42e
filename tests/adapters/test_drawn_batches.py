"""A loop of plain PyTorch whose batches come from a function, with micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded import SKIP, Net, often
from torch.nn import functional as F

from resilient_train import Guard
from resilient_train.core.randomness import Seeds
from resilient_train.data.trees import sha256

STEPS, MICRO_BATCHES, ROWS, NEVER = 60, 2, 8, -1
POOL = torch.randn(512, 6, generator=torch.Generator().manual_seed(0))
Batch = tuple[torch.Tensor, torch.Tensor]


def get_batch() -> Batch:
    rows = torch.randint(len(POOL), (ROWS,))
    return POOL[rows], rows % 3


class Loop:
    def __init__(self, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        usual: dict[str, Any] = {"steps": STEPS, "memory": often(10), "clip": 1.0}
        self.guard = Guard(
            *(None, self.model, self.optimizer),
            data=more.pop("data", get_batch),
            accumulate=MICRO_BATCHES,
            **{**usual, **more},
        )
        self.seen: list[tuple[int, Batch]] = []  # the number of the update, and a batch that it was given

    def forward_backward(self, batch: Batch, spoil: float = 1.0) -> torch.Tensor:
        loss: torch.Tensor = F.cross_entropy(self.model(batch[0]), batch[1]) * spoil
        (loss / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
        return loss

    def train(self, at: int = NEVER) -> Loop:
        for update in self.guard.updates():
            number, strikes = self.guard.attempted_step, at == self.guard.attempted_step
            count = 0
            for count, batch in enumerate(update, start=1):
                self.seen.append((number, batch))
                spoils = strikes and count == MICRO_BATCHES
                self.guard.update(self.forward_backward(batch, float("nan" if spoils else 1)))
            assert count == MICRO_BATCHES
            at = NEVER if strikes else at  # it strikes once
        return self

    def digest(self) -> str:
        live = self.guard.state.live()
        return sha256([live["weights"], live["buffers"], live["optimizer.0"]["moments"]])


def test_a_healthy_run_ends_as_a_plain_loop() -> None:
    """To the last bit, with the batches and the random numbers of the guard."""
    loop = Loop(clip=None).train()
    assert (loop.guard.clock.step, loop.guard.incidents) == (STEPS, [])
    plain, seeds = Loop(clip=None), Seeds(0, 0, torch.device("cpu"))
    plain.guard.let_go()
    for number, (_, batch) in enumerate(loop.seen):
        if number % MICRO_BATCHES == 0:
            seeds.for_update(loop.guard.samples.slicing.samples * number // MICRO_BATCHES)
        plain.forward_backward(batch)
        if number % MICRO_BATCHES == 1:
            plain.optimizer.step()
            plain.optimizer.zero_grad()
    assert plain.digest() == loop.digest()


def test_a_bad_update_is_skipped_by_its_place(info: pytest.LogCaptureFixture) -> None:
    """The function cannot name rows, and it says so; the updates after it get the batches that they would have got."""
    loop, healthy = Loop(recovery=SKIP).train(30), Loop(steps=STEPS + 1).train()
    [incident] = loop.guard.incidents
    assert (incident.anomaly.signal, incident.diagnosis.rows) == ("nonfinite_loss", ())
    assert sum("bad rows have no names" in one.message for one in info.records) == 2  # once a run
    landed = {number: sha256(batch) for number, batch in loop.seen}
    others = {number: sha256(batch) for number, batch in healthy.seen}
    assert all(landed[number] == others[number + (number >= 30)] for number in range(STEPS))


def test_an_error_of_the_function_is_the_loops() -> None:
    with pytest.raises(ZeroDivisionError):
        Loop(data=lambda: 1 / 0).train()
