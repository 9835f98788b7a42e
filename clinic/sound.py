"""Is every case what it says? Its mended twin learns, and the program as it is does not, in a plain loop.

python -m clinic sound --set first --seeds 3
python -m clinic sound --only phase_by_atan2
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from clinic.by_hand import train
from clinic.program import Program, cases, guilty_lines
from clinic.score import Yardstick

LEARNED = 0.7  # of its first loss: a mended twin that is not below it has nothing to show


def yardstick(case: Any, seed: int) -> Yardstick:
    """Train the mended twin."""
    twin: Program = case.program(seed, mended=True)
    start = twin.evaluate(twin.model.state_dict())
    return Yardstick(start, twin.evaluate(train(case.program(seed, mended=True), seed)))


def ended(case: Any, seed: int, *, skips: bool) -> float:
    """Train the program as it is; return the loss that it reaches, or infinity."""
    try:
        weights = train(case.program(seed), seed, skips=skips)
    except Exception:  # whatever ends a user's run
        return math.inf
    if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
        return math.inf
    loss = case.program(seed, mended=True).evaluate(weights)
    return loss if math.isfinite(loss) else math.inf


def shapes(case: Any, *, mended: bool) -> dict[str, torch.Size]:
    """The weights of a program by name, of its first seed."""
    return {name: one.shape for name, one in case.program(0, mended=mended).model.state_dict().items()}


def tell(of: str, seeds: int, only: Sequence[str] | None) -> None:
    """Print a line for each case."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, case in cases(of):
        if only and name not in only:
            continue
        begun, faults = time.perf_counter(), set()
        told = []
        for seed in range(seeds):
            stick = yardstick(case, seed)
            plain, skipping = ended(case, seed, skips=False), ended(case, seed, skips=True)
            if not (math.isfinite(stick.healthy) and stick.healthy < stick.start - (1 - LEARNED) * abs(stick.start)):
                faults.add("the mended twin does not learn")
            if stick.is_near(plain):
                faults.add("a plain loop does as well")
            cured = " skip cures" if stick.is_near(skipping) else ""
            told.append(f"{stick.start:.3g}->{stick.healthy:.3g} plain {plain:.3g}{cured}")
        if shapes(case, mended=True) != shapes(case, mended=False):
            faults.add("the mended twin has other weights")
        guilty = case.program(0).guilty
        if guilty.ops and not guilty_lines(case):
            faults.add("no line is marked # guilty")
        if bool(guilty.rows) != (guilty.cause == "data"):
            faults.add("rows go with the cause data")
        verdict = "; ".join(sorted(faults)) or "sound"
        seconds = (time.perf_counter() - begun) / (4 * seeds)
        print(f"{name:32} {seconds:4.1f} s a run  {' | '.join(told)}  {verdict}", flush=True)
