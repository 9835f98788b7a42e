"""What ranks send each other so that they agree, beyond what DDP sends without a guard.

A small model of what a guard adds is held against counts: collectives and bytes over 100 updates, by the number of
processes and of tensors. It ends with 1 where a count is not what the model says.

    python benchmarks/agreement.py --processes 2 4
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from counts import counting
from interleaved import Job, Loop, OnStep, answer, begin, group, quiet, spawn, table
from torch import nn

COUNTED = 100  # updates: whole cycles of scans (10), replicas (20) and snapshots (25)
BEFORE = 100  # until buckets, moments and the size of a snapshot are known


@dataclass(frozen=True)
class Sent:
    """What a process sends in collectives over `COUNTED` updates."""

    collectives: float
    bytes: float


def model_of(processes: int, tensors: int) -> dict[str, Sent]:
    """What a guard with default checks adds to DDP, by what it is for; AdamW, weights without buffers beside them."""
    return {
        "agreement": Sent(COUNTED, COUNTED * 4 * 3 * processes),  # loss, norm, a flag: a row of each rank
        # Largest of each weight, of both its moments and of its count of updates, and the sum of its second moment: of
        # all ranks the largest number; and a number for what the loop keeps.
        "scans": Sent(COUNTED / 10, COUNTED / 10 * 4 * (5 * tensors + 1)),
        "replicas": Sent(0, COUNTED / 20 * 4 * 2 * 4),  # a digest in four numbers, in the same collective
        "snapshots": Sent(COUNTED / 25, COUNTED / 25 * 8),  # the size of the largest rank's
        "looks": Sent(2, 2 * 8),  # at updates 128 and 192: how far the weights have moved lately
    }


def in_all(model: dict[str, Sent]) -> Sent:
    """All of it together."""
    return Sent(sum(one.collectives for one in model.values()), sum(one.bytes for one in model.values()))


# ------------------------------------------------------------------------------------------------------------ counts


def net(tensors: int) -> nn.Module:
    """A stack with so many tensors."""
    assert tensors % 2 == 0
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(tensors // 2)))


def squared(model: Any, batch: Any) -> torch.Tensor:
    """An objective."""
    loss: torch.Tensor = (model(batch[0]) - 1.0).pow(2).mean()
    return loss


def without_guard(model: nn.Module, accelerator: Accelerator, on_step: OnStep) -> None:
    """DDP by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = torch.randn(8, 8)
    for step in range(1, BEFORE + COUNTED + 1):
        accelerator.backward(squared(model, [rows]))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        on_step(step)


def with_guard(model: nn.Module, accelerator: Accelerator, on_step: OnStep) -> None:
    """The same in a guard."""
    from resilient_train import Guard

    rows = torch.utils.data.TensorDataset(torch.randn(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    guard = Guard(
        accelerator, model, optimizer, data=rows, batch_size=8, steps=BEFORE + COUNTED + 1, objective=squared, clip=1.0
    )
    for step, batch in enumerate(guard.batches(), start=1):
        guard.step(batch)
        on_step(step)
    guard.close()


def placed_in_group(
    loop: Loop, place: Mapping[str, str], job: Job, on_step: OnStep, tell: Callable[[Any], None]
) -> None:
    """Run a loop as one of several processes."""
    os.environ.update(place)
    loop(job, on_step, tell)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def count(processes: int, tensors: int) -> tuple[Sent, list[int], list[int]]:
    """What a guard adds over `COUNTED` updates, and the collectives of each of them without it and with it."""
    per_step = []
    totals = []
    for loop in (without_guard, with_guard):
        members = [spawn(_counted, loop, tensors, place) for place in group(processes)]
        found = [answer(pipe, loop.__name__) for _, pipe in members]
        for process, _ in members:
            process.join()
        if any(one != found[0] for one in found):
            raise SystemExit(f"{loop.__name__}: the ranks of {processes} count differently: {found}")
        steps, sent = found[0]
        per_step.append(steps)
        totals.append(sent)
    added = Sent(sum(per_step[1]) - sum(per_step[0]), totals[1] - totals[0])
    return added, per_step[0], per_step[1]


def _counted(
    loop: Callable[[nn.Module, Accelerator, OnStep], None], tensors: int, place: dict[str, str], pipe: Connection
) -> None:
    quiet()
    counts = Counter[str]()
    counted = counting(counts)
    steps: list[int] = []

    def on_step(step: int) -> None:
        if step == BEFORE:
            counted.__enter__()
        elif BEFORE < step <= BEFORE + COUNTED:
            steps.append(counts["collectives"] - sum(steps))
        if step == BEFORE + COUNTED:
            counted.__exit__(None, None, None)

    def run(job: Job, on_step: OnStep, tell: Callable[[Any], None]) -> None:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        loop(accelerator.prepare(net(tensors)), accelerator, on_step)

    placed_in_group(run, place, Job("", 0, 0, 0), on_step, pipe.send)
    pipe.send((steps, counts["bytes in collectives"]))


def counts_of(processes: Sequence[int], tensors: Sequence[int]) -> tuple[list[dict[str, Any]], bool]:
    """Count, print beside what the model says, and say whether they agree."""
    found, rows = [], []
    for size in processes:
        for number in tensors:
            added, without, with_it = count(size, number)
            said = in_all(model_of(size, number))
            more = Counter(mine - its for mine, its in zip(with_it, without, strict=True))
            found.append({"processes": size, "tensors": number, "counted": vars(added), "model": vars(said)})
            found[-1]["steps_by_collectives_more"] = dict(sorted(more.items()))
            told = ", ".join(f"{times} with {extra}" for extra, times in sorted(more.items()))
            both = [f"{one.collectives / COUNTED:g}, {one.bytes / COUNTED:g}" for one in (added, said)]
            rows.append([str(size), str(number), *both, told])
    title = ["processes", "tensors", "more a step: collectives, bytes", "the model says", f"of {COUNTED} steps"]
    print("\nwhat a guard adds to DDP")
    print(table(title, rows), flush=True)
    return found, all(one["counted"] == one["model"] for one in found)


def main() -> None:
    """Count, print, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description="What ranks send each other so that they agree.")
    parser.add_argument("--processes", type=int, nargs="+", metavar="N", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--tensors", type=int, nargs="+", metavar="N", default=[4, 40], help="(default: 4 40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    here = begin()
    counts, as_said = counts_of(given.processes, given.tensors)
    if given.json:
        given.json.write_text(json.dumps({"machine": here, "counts": counts}, indent=2) + "\n")
    if not as_said:
        raise SystemExit("the model of what is sent does not say what was counted")


if __name__ == "__main__":
    main()
