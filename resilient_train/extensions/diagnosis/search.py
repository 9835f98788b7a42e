"""Replays one update as it was: the same weights and random numbers, with given batches. Training does not notice.

Then searches for its cause: replays, other rows as a control, the microscope, the rows. A forward may hold collectives:
all ranks make the same calls here in the same order, with batches of their own.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from resilient_train.core import randomness
from resilient_train.core.mark import Marks
from resilient_train.core.randomness import Seeds
from resilient_train.core.transaction import Transaction
from resilient_train.core.tree import is_sharded
from resilient_train.core.vitals import versions
from resilient_train.data.stream import Key
from resilient_train.data.trees import rebuilt
from resilient_train.extensions.diagnosis import rows as by_rows
from resilient_train.extensions.diagnosis import verdict
from resilient_train.extensions.diagnosis.microscope import Microscope
from resilient_train.extensions.diagnosis.verdict import Observations, Origin
from resilient_train.ground.errors import in_one_line
from resilient_train.ground.types import SPIKES, Anomaly, Cause, Culprit, Diagnosis, Facts, Signal, fact
from resilient_train.parts.code_lines import CALLERS
from resilient_train.parts.modes import Attributes, Saved
from resilient_train.parts.run import Run

CALLERS.add(__file__)

_CONTROLS = 4  # draws of other rows at most, where the first ones break as well
_FAR = 4.0  # times the largest of those: what makes a gradient jump is an outlier
_RARE = 100  # rows that pass an operation, for each that does not: then it is not the line; and the most to blame
_FEW, _MOST_DRAWS = 4, 32  # rows of an update, and draws of others, that are tried for that
_ABSURD = 1e4  # the same where an operation broke: one that cannot take a large value is to blame itself
NONFINITE = (Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD, Signal.NONFINITE_BATCH)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay measured on this rank alone."""

    loss: float
    norm: float  # in doubles, so that it is finite wherever the gradient is
    origin: Origin | None = None  # under the microscope: the operation that broke first
    raised: str = ""  # the exception that ended it, in one line; then loss and norm are NaN
    failure: Facts = ()  # why nothing could be measured; then the loss is NaN


@dataclass
class Replay:
    """Runs forward and backward of given batches at the current weights.

    No rank waits, as DistributedDataParallel is left out. If `is_sharded`, all replay together; gradients are of all.
    """

    model: nn.Module  # as training calls it, without the wrappers of other processes
    measure: Callable[[nn.Module, Any], Tensor]  # returns the loss of a batch
    backward: Callable[[Tensor], None]
    marks: Marks
    attributes: Attributes
    seeds: Seeds
    device: torch.device
    drop_gradients: Callable[[], None]
    trained: Sequence[Tensor]  # the weights whose gradients the gate looks at
    over_ranks: Callable[[list[Tensor]], Tensor] | None = None  # the norm of sharded gradients, which every rank calls
    # Says of file, line and operation whether what it breaks is repaired.
    is_patched: Callable[[str, int, str], bool] = lambda file, line, op: False

    def __post_init__(self) -> None:
        self._bare: nn.Module = getattr(self.model, "_orig_mod", self.model)
        self.is_sharded = any(map(is_sharded, self._bare.parameters()))

    def of(self, batches: Sequence[Any], start: int, attributes: Saved = (), *, watched: bool = False) -> Replayed:
        """Replay the update at position `start` with these batches, beginning with `attributes` of the modules; and
        find what broke, if `watched`.
        """
        microscope = Microscope(self._bare, self.is_patched) if watched else None
        gradients = [(weight, weight.grad) for weight in self._bare.parameters()]
        for weight, _ in gradients:
            weight.grad = None
        may_be_compiled = hasattr(self.model, "_orig_mod") or "torch._dynamo" in sys.modules
        # The microscope cannot look into a fused kernel.
        in_eager = torch.compiler.set_stance("force_eager") if may_be_compiled else nullcontext()
        # Unscaled: what is not finite then is no overflow that a lower scale prevents.
        with unscaled(self.marks), self.attributes.preserved(attributes), randomness.preserved(self.device), in_eager:
            try:
                with microscope or nullcontext():
                    loss = self._loss([_copied(batch) for batch in batches], start, microscope)
                measured = Replayed(loss, self._norm())
            except (torch.OutOfMemoryError, MemoryError) as error:
                return Replayed(math.nan, 0.0, failure=fact("text", text=in_one_line(error)))
            except Exception as error:
                measured = Replayed(math.nan, math.nan, raised=in_one_line(error))
            finally:
                self.drop_gradients()
                for weight, gradient in gradients:
                    weight.grad = gradient
        return replace(measured, origin=microscope.origin) if microscope is not None else measured

    def _loss(self, batches: Sequence[Any], start: int, microscope: Microscope | None) -> float:
        """The loss, after forward and backward."""
        self.seeds.for_update(start)
        losses = []
        for batch in batches:
            if microscope is not None:
                microscope.knows(batch)
            loss = self.measure(self.model, batch)
            if microscope is not None:
                microscope.judge(loss)
            self.backward(loss)
            losses.append(loss.detach().float().reshape(()))
        return float(torch.stack(losses).mean())

    def _norm(self) -> float:
        trained = set(map(id, self.trained))
        known = [weight.grad for weight in self._bare.parameters() if id(weight) in trained and weight.grad is not None]
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in known]
        if self.is_sharded and grads and self.over_ranks is not None:
            return float(self.over_ranks(grads))
        return math.hypot(*(float(torch.linalg.vector_norm(grad.double())) for grad in grads))


def _copied(batch: Any) -> Any:
    """The same tensors in other containers: an objective may remove entries."""
    return rebuilt(batch, lambda leaf: leaf if isinstance(leaf, Tensor) else copy.copy(leaf))


@contextmanager
def unscaled(marks: Marks) -> Iterator[None]:
    """Begin with an unscaled loss; at the end everything is as it was before."""
    before = marks.take()
    for one in marks.scale()[:1]:
        one.fill_(1.0)
    try:
        yield
    finally:
        marks.undo(before)


class Search:
    """Finds the culprit of an update that was refused. Every rank gets the same answer."""

    def __init__(self, run: Run, replay: Replay) -> None:
        self._run, self._replay, self._world, self._samples = run, replay, run.world, run.samples

    def diagnose(self, anomaly: Anomaly, refused: Transaction) -> Diagnosis | None:
        if anomaly.signal not in (*NONFINITE, *SPIKES, Signal.EXCEPTION):
            return None
        is_spike = anomaly.signal in SPIKES
        with randomness.preserved(self._world.device):  # fetching rows changes them
            by_rank = self._world.all_of(self._observe(refused, is_spike))
        seen = replace(verdict.merge_ranks(by_rank), landed=anomaly.step - 1)
        if not seen.reproduced:
            why = fact("not_replayed", why=[*seen.failure])
            passed = Diagnosis(Cause.TRANSIENT, fact("passed_on_replay"))
            return Diagnosis(Cause.UNKNOWN, why) if seen.failure else passed
        losses, norms = self._run.updates.recent_measurements()  # of the updates before, then of the refused one
        now = max(map(verdict.climbed, (losses, norms)))
        if refused.is_error:
            found = verdict.of_error(replace(seen, error=str(anomaly.evidence[0].get("text"))))
        elif is_spike:
            before = max(map(verdict.climbed, (losses[:-1], norms[:-1])))
            found = verdict.of_spike(replace(seen, climb=before, leap=now))
        else:
            found = verdict.of_nonfinite(replace(seen, climb=now, leap=verdict.climbed(losses)))
        ranks = tuple(rank for rank, one in enumerate(by_rank) if one.reproduced)
        return replace(found, ranks=ranks if len(ranks) < self._world.size else ())

    def loss_at(self, start: int) -> float:
        """The mean loss over ranks of the update at a position."""
        keys = self._samples.keys_at(start)
        loss = self._tried(start, lambda: self._made(keys, chain(*keys))).loss
        losses = [one for one in self._world.all_of(loss) if not math.isnan(one)]
        return sum(losses) / len(losses) if losses else math.nan

    # The replays. Every rank makes each of them.

    def _observe(self, refused: Transaction, is_spike: bool) -> Observations:
        first = self._replayed(refused, watched=not is_spike)
        origin = first.origin
        reproduced = not first.failure and _would_refuse(refused, first)
        if not self._on_any(reproduced):
            return Observations(failure=first.failure)
        filler, is_compared = self._control(refused)
        found = self._guilty(refused, filler)
        if self._replay.is_sharded:  # the gradient is of all ranks' rows: all reproduce it unless some rank's are known
            is_mine = bool(found or origin) or not (first.failure or _allows_loss(refused, first))
            is_known = self._on_any(is_mine)
            reproduced = is_mine or not is_known
        may_be_nan = is_spike or refused.nan_is_usual
        seen = Observations(
            reproduced=reproduced,
            everywhere=is_compared and filler is None,
            is_compared=is_compared,
            origin=origin,
            is_tried=origin is not None and self._is_tried((origin.after or origin).culprit),
            is_beyond=1e18 < first.norm < math.inf,  # its square leaves float32
            batch_is_bad=not may_be_nan and any(map(by_rows.nonfinite_fields, refused.inputs)),
            failure=first.failure,
        )
        seen = replace(seen, is_rare=self._are_rare(refused, found, origin))
        if not found or filler is None:
            return seen
        odd = self._odd(found, filler, _ABSURD if origin else _FAR, refused.nan_is_usual)
        rows = tuple(sorted({key.row for key in found}))
        return replace(seen, rows=rows, odd=odd)

    def _control(self, refused: Transaction) -> tuple[list[Key] | None, bool]:
        """Replay other rows at the same weights; return a healthy draw of them, and whether any was replayed."""
        filler: list[Key] | None = None
        is_compared = False
        if not self._on_any(bool(refused.update.keys)):
            return None, False
        for draw in range(2 * _CONTROLS if refused.is_error else _CONTROLS):
            others = self._others(refused.update.keys, draw)
            others = others if draw < _CONTROLS else others[:1] * len(others)  # a row may be fine where no batch is
            tried = self._replayed(refused, others)
            is_compared |= not tried.failure
            if filler is None and not _would_refuse(refused, tried):
                filler = others
            if not self._on_any(filler is None):
                break
        return filler, is_compared

    def _guilty(self, refused: Transaction, filler: Sequence[Key] | None) -> list[Key]:
        """Search the rows of all ranks for each that breaks a healthy batch, the filler; return those of this rank.

        It takes a filler on each rank: where all batches break no row is to blame.
        """
        keys = [*chain(*refused.update.keys)]
        counts = self._world.all_of(len(keys) if filler is not None else 0)
        first = sum(counts[: self._world.rank])

        def breaks(places: Sequence[int]) -> bool:
            kept = {place - first for place in places}
            return self._breaks(
                refused, [keys[place] if place in kept else other for place, other in enumerate(filler or ())]
            )

        found = by_rows.guilty(sum(counts) if all(counts) else 0, breaks)
        return [key for place, key in enumerate(keys, first) if place in found]

    def each_breaks(self, refused: Transaction, rows: Sequence[int]) -> bool:
        """Whether each of these rows of the data breaks a batch that is healthy without it."""
        filler = self._control(refused)[0] if rows else None
        if self._on_any(filler is None):
            return False
        assert filler is not None
        return all(self._breaks(refused, [filler[0]._replace(row=row), *filler[1:]]) for row in rows)

    def _breaks(self, refused: Transaction, keys: Sequence[Key]) -> bool:
        tried = self._replayed(refused, keys)
        return self._on_any(not tried.failure and _would_refuse(refused, tried))

    def _are_rare(self, refused: Transaction, found: Sequence[Key], origin: Origin | None) -> bool:
        """Whether rows alone break an operation of data, and hardly any of a hundred others for each of them does."""
        keys = refused.update.keys
        may_be = origin is not None and self._may_be_rare(keys, found, origin)
        others, draw, count = set[int](), _CONTROLS, len(found) if may_be else 0
        most = count + (2 * sum(map(len, keys)) <= _RARE)  # of a large draw many rows may break
        while self._on_any(len(others) < _RARE * count <= _RARE * most) and draw < _MOST_DRAWS:
            drawn = self._others(keys, draw)
            tried = self._replayed(refused, drawn)
            count, draw = count + (may_be and _would_refuse(refused, tried)), draw + 1
            others.update(key.row for key in drawn)
        return may_be and len(others) >= _RARE * count and count <= most

    def _may_be_rare(self, keys: Sequence[Sequence[Key]], found: Sequence[Key], origin: Origin) -> bool:
        is_data = origin.is_of_data and origin.phase == "forward" and not (origin.was_given or origin.after)
        if not is_data or not 0 < len(found) <= _FEW:
            return False
        reached = max((math.prod(one["shape"]) for one in origin.inputs), default=0)
        if reached < min(map(len, keys), default=0):  # hardly any row has got to that line
            return False
        known = {key.row for key in found} | self._samples.stream.quarantined
        is_few = _RARE * len(known) <= min(self._samples.rows, _RARE * _RARE)
        return is_few and not self._is_tried(origin.culprit)

    def _replayed(self, refused: Transaction, keys: Sequence[Key] | None = None, *, watched: bool = False) -> Replayed:
        """Replay a refused update, or other rows in the places of its own."""
        was_modified = refused.versions != [versions(batch) for batch in refused.inputs]  # its batches, in place

        def made() -> Sequence[Any]:
            if keys is not None or (was_modified and refused.update.keys):
                return self._made(refused.update.keys, keys or chain(*refused.update.keys))
            if was_modified:
                raise RuntimeError("the batch was changed in place during its update, and it cannot be fetched again")
            return [self._world.on_device(batch) for batch in refused.inputs]

        before = self._replay.attributes.before(refused.mark)
        tried = self._tried(refused.update.start, made, attributes=before, watched=watched)
        if tried.raised and not refused.is_error:  # what ends an update is a measurement only where it had ended one
            return replace(tried, failure=fact("text", text=tried.raised))
        return tried

    def _tried(self, start: int, make: Callable[[], Sequence[Any]], **how: Any) -> Replayed:
        """Make batches and replay them."""
        made, failure = None, fact("other_rank_failed")
        try:
            made = make()
        except Exception as error:
            failure = fact("text", text=in_one_line(error))
        # Where ranks wait for each other in a forward, all make one, or none does.
        if self._replay.is_sharded and self._on_any(made is None):
            made = None
        missing = Replayed(math.nan, 0.0, failure=failure)
        measured = self._replay.of(made, start, **how) if made is not None else missing
        self._run.beat()  # a search takes longer than the watchdog allows an update
        return measured

    def _made(self, batches: Sequence[Sequence[Key]], keys: Iterable[Key]) -> Sequence[Any]:
        left = iter(keys)
        return [self._world.on_device(self._samples.collated([*islice(left, len(some))])) for some in batches]

    def _others(self, batches: Sequence[Sequence[Key]], draw: int) -> list[Key]:
        return [key for some in batches for key in self._samples.others(some, draw)]

    def _odd(self, guilty: Sequence[Key], filler: Sequence[Key], far: float, nan_is_usual: bool) -> dict[int, Facts]:
        known = [*filler[: by_rows.OTHERS]]
        known += self._samples.others(guilty, 0, least=by_rows.ENOUGH) if len(known) < by_rows.ENOUGH else []
        others = [self._samples.fetched(key) for key in known]
        found = {}
        for key in guilty:
            row = self._samples.fetched(key)
            odd = () if nan_is_usual else by_rows.nonfinite_fields(row)
            if odd := odd or by_rows.outlying_fields(row, others, far):
                found[key.row] = odd[:3]
        return found

    def _is_tried(self, culprit: Culprit) -> bool:
        """Whether the operation is patched, or cannot be."""
        return (culprit.file, culprit.line, culprit.op) in self._run.handled_lines

    def _on_any(self, is_so: bool) -> bool:
        return any(self._world.all_of(is_so))


def _allows_loss(refused: Transaction, tried: Replayed) -> bool:
    return -math.inf < tried.loss <= refused.limits[0]


def _would_refuse(refused: Transaction, tried: Replayed) -> bool:
    return not (_allows_loss(refused, tried) and tried.norm <= refused.limits[1])
