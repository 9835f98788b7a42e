"""What ranks tell each other once an update, and what becomes of it where they do not decide alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from clinic_ranks import Net, Rows
from group import launch, together
from guarded import often, trained
from kills import incidents, summary

from resilient_train.data.trees import weights_sha256
from resilient_train.extensions.drills import Drill, TickFault
from resilient_train.extensions.scans.layout import digest
from resilient_train.ground.errors import RanksDiffer
from resilient_train.loop.arguments import checks as named
from resilient_train.loop.guard import Guard

CPU = torch.device("cpu")
INF, NAN = math.inf, math.nan


def test_a_rank_that_does_otherwise_ends_the_run_on_all(tmp_path: Path) -> None:
    """One line that names the ranks, code 1, and an incident."""
    own = ["-m", "odd_rank", "model=mlp", "data=digits", "objective=classification", "run.steps=60", "run.dir=run"]
    own += ["accelerate.cpu=true", "tracking=none", "drill=nan_grad", "drill.at=[46]"]
    own += ["checkpoint.verify_after=10", "checkpoint.memory.every=10"]
    place = tmp_path / "place"
    done = launch(place, 2, *own, ODD_RANK="1")
    assert done.codes == [1, 1]
    assert done.stderr.count("error: ranks 0 and 1 decided differently in update 46: the run ends") == 1
    found = summary(place / "run")
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    (mismatch,) = [one for one in incidents(place / "run") if one["signal"] == "rank_mismatch"]
    assert (mismatch["cause"], mismatch["outcome"], mismatch["ranks"]) == ("process", "gave_up", [0, 1])
    assert "ranks decided differently" in mismatch["advice"]


def flipped(tensor: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    other = tensor.clone()
    one = torch.ones((), dtype=whole) << bit
    other.view(whole).view(-1)[place] ^= one
    return other


@pytest.mark.parametrize("size", [1, 1023, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_flipped_bit_shows_in_the_digest(dtype: torch.dtype, size: int) -> None:
    """At the ends of a tensor and inside, from the lowest bit to the sign; the same bits have the same digest."""
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype), torch.full((9,), math.nan)]
    mine = digest(tensors, CPU)
    assert mine == digest([one.clone() for one in tensors], CPU)
    for place in {0, size // 2, size - 1}:
        for bit in range(8 * tensors[0].element_size()):
            assert mine != digest([flipped(tensors[0], place, bit), tensors[1]], CPU)


class LowBit(TickFault):
    """A bit of the mantissa of a weight flips."""

    name, spoils = "low_bit", "state"

    def spoil(self, thing: Any, tick: int) -> Any:
        weight = next(one.detach() for name, one in thing.model.named_parameters() if name.startswith("body."))
        weight.copy_(flipped(weight, 0, 12))
        return thing


STEPS, STRUCK = 50, 33  # both ends of a run are compared; this is in the middle of an interval


def guarded(accelerator: Accelerator, flips: list[LowBit], every: int, rate: float = 1e-2) -> Guard:
    checks = named("default")
    checks.replicas.every = every
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    return Guard(
        *(accelerator, accelerator.prepare(model), optimizer),
        data=Rows("none"),
        batch_size=4,
        objective=lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean(),
        checks=checks,
        memory=often(10),
        verify_after=5,
        drill=Drill(flips),
    )


def learned() -> list[dict[str, Any]]:
    """Train, on a rank: a run without a fault, some in which a bit flips on rank 1, and one with rates that differ."""
    accelerator = Accelerator(cpu=True)
    found = []
    for at, every in ((), 20), ((STRUCK,), 20), ((STRUCK,), 1), ((STEPS,), 20):
        guard = guarded(accelerator, [LowBit(at=at, rank=1)] if at else [], every)
        trained(guard, STEPS)
        found.append({"incidents": guard.incidents, "weights": weights_sha256(guard.state), "tick": guard.clock.tick})
        guard.close()
    with pytest.raises(RanksDiffer, match="ranks 0, 1 and 2 have different settings in update 1: the run ends"):
        trained(guarded(accelerator, [], 20, rate=1e-3 * (1 + accelerator.process_index)), STEPS)
    guard.world.leave()
    return found


def test_a_bit_that_flips_on_one_rank_is_found_and_undone() -> None:
    """In a place that no other scan sees; to the last bit the run without it, also where it strikes at the very end.

    The rank is named where most others agree.
    """
    ended = together(3, learned)
    assert [code for code, _ in ended] == [0] * 3
    ranks = [one for _, one in ended]
    healthy = ranks[0][0]
    assert healthy["incidents"] == []
    for number, since in enumerate((20, 31, 40)):
        assert {rank[1 + number]["weights"] for rank in ranks} == {healthy["weights"]}
        for rank in ranks:
            (incident,) = rank[1 + number]["incidents"]
            assert (incident.anomaly.signal, incident.diagnosis.cause) == ("rank_mismatch", "corruption")
            assert (incident.anomaly.since, incident.anomaly.ranks) == (since, (1,))
            assert [action.remedy for action in incident.decision.actions] == ["rewind"]
            assert (incident.outcome, incident.rewound_to <= since) == ("recovered", True)
