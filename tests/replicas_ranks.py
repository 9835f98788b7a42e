"""A run of DDP without a fault, and others in which a bit flips on rank 1, and what each rank has learned."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from clinic_ranks import Net, Rows

from resilient_train.adapters.guard import Guard
from resilient_train.drills import BitFlip, Drill
from resilient_train.reader import MemoryConfig
from resilient_train.watch.config import named

STEPS, STRUCK = 50, 33  # both ends of a run are compared; this is in the middle of an interval


def guarded(accelerator: Accelerator, flips: list[BitFlip], every: int) -> Guard:
    fired: set[int] = set()
    checks = named("default")
    checks.replicas.every = every
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return Guard(
        accelerator,
        accelerator.prepare(model),
        optimizer,
        data=Rows("none"),
        batch_size=4,
        objective=lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean(),
        checks=checks,
        memory=MemoryConfig(every=10, keep=4, max_gib=None),
        verify_after=5,
        drill=Drill(flips, has_fired=fired.__contains__, fired=lambda number, name, tick: fired.add(number)),
    )


def learned(bit: int) -> list[dict[str, Any]]:
    """Train, on a rank, one run after the other."""
    accelerator = Accelerator(cpu=True)
    found = []
    for at, every in ((), 20), ((STRUCK,), 20), ((STRUCK,), 1), ((STEPS,), 20):
        guard = guarded(accelerator, [BitFlip(at=at, rank=1, bit=bit)] if at else [], every)
        guard.steps = STEPS
        for batch in guard.batches():
            guard.step(batch)
        told = [
            {
                "signal": one.anomaly.signal,
                "cause": one.diagnosis.cause,
                "since": one.anomaly.since,
                "ranks": one.anomaly.ranks,
                "evidence": one.anomaly.evidence,
                "remedies": [action.remedy for action in one.decision.actions],
                "rewound_to": one.rewound_to,
                "outcome": one.outcome,
            }
            for one in guard.incidents
        ]
        found.append({"told": told, "weights": guard.state.weights_sha256(), "tick": guard.clock.tick})
        guard.close()
    guard.world.leave()
    return found
