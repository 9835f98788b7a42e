"""Do 1,024 ranks decide alike, and what does the host of each pay for it? Simulated in one process.

Every rank has its own checks, policy, incidents and digest, and sees nothing of the others but the table that an update
exchanges: a row each with loss, gradient norm, flags and the digest of its decisions. Losses differ from rank to rank,
and some become NaN or leap. No collective operation runs: what is measured is the work of one rank's host and device
(here the CPU, too) on a table of that size. In the last part one rank decides by another policy.

    python benchmarks/many_ranks.py
    python benchmarks/many_ranks.py --ranks 64 --updates 200
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from resilient_train.ranks.world import odd_ones
from resilient_train.recover.decide import by_signal, decide, decisions_digest, update_digest
from resilient_train.recover.knobs import KnobValues
from resilient_train.recover.policy import Policy
from resilient_train.recover.policy import named as policy_named
from resilient_train.recover.remedies import Circumstances
from resilient_train.types import Incident, Vitals
from resilient_train.update.gate import DIGEST, Agreement
from resilient_train.watch.checks import Checks
from resilient_train.watch.config import named as checks_named
from resilient_train.watch.vitals import read_vitals

CPU = torch.device("cpu")
BATCH = 8  # samples of a rank in an update


class Rank:
    """What one process knows."""

    def __init__(self, number: int, policy: Policy) -> None:
        self.number, self.policy = number, policy
        self.checks = Checks(checks_named("default"))
        self.incidents: list[Incident] = []
        self.step = self.tick = self.start = 0
        self.table = torch.zeros(0)  # that the collective of the newest update left on its device
        self.agreement = Agreement(lambda mine: self.table, CPU)
        self.decisions = 0
        self.agree_s, self.judge_s, self.read_s = list[float](), list[float](), list[float]()

    def digest(self) -> int:
        return update_digest(self.decisions, self.step, self.tick, self.start, BATCH, KnobValues())

    def update(self, measured: torch.Tensor, table: torch.Tensor) -> Vitals:
        """Reduce the table, read six numbers, judge, and decide where something is wrong."""
        self.table = table
        began = time.perf_counter()
        numbers, rows = self.agreement.reduce(measured, self.digest())
        read = numbers.tolist()
        agreed = time.perf_counter()
        self.tick += 1

        def by_rank() -> list[list[float]]:
            began = time.perf_counter()
            found: list[list[float]] = [] if rows is None else rows.tolist()
            self.read_s.append(time.perf_counter() - began)
            return found

        place = self.tick, self.step, self.start, self.start + BATCH, 1e-3
        vitals = read_vitals(*place, read, self.checks.limits, has_scale=False, by_rank=by_rank)
        finding = self.checks.judge(vitals)
        if finding.anomaly is None:
            self.step += vitals.accepted
        else:
            anomaly, diagnosis = finding.anomaly, by_signal(finding.anomaly)
            decision = decide(self.policy, anomaly, diagnosis, self.incidents, self.tick, Circumstances())
            incident = Incident(len(self.incidents) + 1, anomaly, diagnosis, decision)
            self.incidents.append(incident)
            self.decisions = decisions_digest([incident], self.decisions)
        self.start += BATCH
        self.agree_s.append(agreed - began)
        self.judge_s.append(time.perf_counter() - agreed)
        return vitals


def simulate(size: int, updates: int, *, odd: int | None = None) -> tuple[list[Rank], int | None, tuple[int, ...]]:
    """Train `size` ranks. Returns them, the update at which they noticed that they differ, and who was named.

    The rank `odd` follows another policy.
    """
    policy, other = policy_named("balanced"), policy_named("skip")
    ranks = [Rank(number, other if number == odd else policy) for number in range(size)]
    numbers = torch.Generator().manual_seed(0)
    for update in range(updates):
        table = torch.zeros(size, DIGEST + 1)
        table[:, 0] = 2.0 * 0.998**update + 0.05 * torch.randn(size, generator=numbers)
        table[:, 1] = 1.0 + 0.1 * torch.rand(1, generator=numbers)  # of gradients that were averaged before
        guilty = int(torch.randint(size, (), generator=numbers))
        if update % 40 == 39:  # a NaN: the loss of one rank, and the gradients of all
            table[guilty, 0] = table[:, 1] = torch.nan
        elif update % 97 == 96:  # a gradient that is far beyond any before
            table[:, 1] = 1e4
        table[:, DIGEST] = torch.tensor([float(rank.digest()) for rank in ranks])
        seen = [rank.update(table[rank.number, :2], table) for rank in ranks]
        if not all(one.ranks_agree for one in seen):
            assert not any(one.ranks_agree for one in seen), "some have noticed, and some have not"
            return ranks, update, odd_ones(table[:, DIGEST].tolist())
        assert update % 40 != 39 or all(one.ranks == (guilty,) for one in seen), "the rank of the NaN was not named"
    return ranks, None, ()


def main() -> None:
    """Simulate groups of several sizes, and print what they did and what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 64, 1024], help="(default: 2 64 1024)")
    parser.add_argument("--updates", type=int, default=200, help="of each group (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{given.updates} updates, torch {torch.__version__}, one thread; microseconds of one rank, medians\n")
    print("| ranks | incidents | different decisions | agree | judge | read who it was | one rank decides otherwise |")
    print("|---|---|---|---|---|---|---|")
    figures = []
    for size in given.ranks:
        ranks, noticed, _ = simulate(size, given.updates)
        made = {
            json.dumps([[one.decision.rung, str(one.decision.actions)] for one in rank.incidents]) for rank in ranks
        }
        digests = {rank.digest() for rank in ranks}
        lone = size // 3
        _, at, named_ranks = simulate(size, given.updates, odd=lone)
        figure = {
            "ranks": size,
            "incidents": len(ranks[0].incidents),
            "different": len(made) - 1 + len(digests) - 1 + (noticed is not None),
            **{
                name: round(1e6 * statistics.median(one for rank in ranks for one in getattr(rank, name)), 1)
                for name in ("agree_s", "judge_s", "read_s")
            },
            "noticed": at,
            "named": list(named_ranks),
        }
        figures.append(figure)
        who = "both" if size == 2 and named_ranks == (0, 1) else f"rank {', '.join(map(str, named_ranks))}"
        what = "not noticed" if at is None else f"noticed by all at update {at + 1}: {who}"
        cells = [f"{size:,}", *(str(figure[key]) for key in ("incidents", "different", "agree_s", "judge_s", "read_s"))]
        print(f"| {' | '.join([*cells, what])} |", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))
    wrong = [one for one in figures if one["different"] or one["noticed"] is None]
    sys.exit(f"{len(wrong)} groups did not decide alike, or did not notice who differed" if wrong else 0)


if __name__ == "__main__":
    main()
