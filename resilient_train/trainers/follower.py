"""Takes the loop of somebody else's trainer through the engine.

The trainer fetches batches, runs forward and backward, and calls its optimizer, whose `step` is replaced by
`Follower.land`: it lands the update or treats it, and then retries what a rewind undid. So when it returns, the
state is that after the newest batch, and the trainer's counters and its place in the data never go back.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from resilient_train.data.fed import Fed, FedSamples
from resilient_train.data.samples import Slicing
from resilient_train.ground.errors import running
from resilient_train.ground.files import siblings
from resilient_train.ground.wording import log
from resilient_train.loop import arguments
from resilient_train.loop.guard import Guard
from resilient_train.loop.hooks import RecordedStates
from resilient_train.loop.rows_of_loader import number_rows

OLDEST = {"transformers": "5.22", "lightning": "2.5"}  # the versions that are tested, with the newest ones
_ABSENT = object()
_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")  # what a trainer's schedule may set in a parameter group

# Of Guard, where a trainer has the rest.
OPTIONS = {"recovery", "checks", "expect", "memory", "verify_after", "tracking", "drill", "seed"}


def refuse_unknown_options(who: str, options: Mapping[str, Any]) -> None:
    if unknown := options.keys() - OPTIONS:
        raise TypeError(f"{who} got an unknown option {min(unknown)!r}; there are {', '.join(sorted(OPTIONS))}")


class Follower(ABC):
    """One loop of a trainer, from its first batch to its end; how the trainer runs a batch is in a subclass."""

    guard: Guard  # from `follow` on
    samples: FedSamples
    fed: Fed  # the newest update

    def __init__(self) -> None:
        self.is_following = False  # from `follow` to `close`
        self.norm: torch.Tensor | None = None  # of its gradients, before they were clipped
        self.number = 0  # of the micro-batch that is run or replayed, in its update
        self._replay = 0  # which replay it is
        self._is_substituting = False
        self._is_open = False  # the trainer has fetched the newest update, and made no step yet
        self._loss: torch.Tensor | None = None  # of the newest micro-batch, until the next one begins
        self._saved: list[tuple[int, Path]] = []  # accepted updates, and checkpoints of the trainer after them
        self._replaced: list[tuple[Any, str, Any]] = []  # what there was in each instance
        self._dataset: Any = None  # whose rows have an index, and how a batch is made of them
        self._collate: Callable[[list[Any]], Any] | None = None

    def number_rows(self, loader: Any) -> None:
        if (numbered := number_rows(loader)) is not None:
            self._dataset, self._collate = numbered
            base = getattr(loader, "base_dataloader", loader)
            self._replaced += [(base, "dataset", self._dataset), (base, "collate_fn", self._collate)]

    def _replace(self, owner: Any, name: str, method: Callable[..., Any], *, always: bool = False) -> None:
        """Let `method` take the place of one of an instance, which it gets as its first argument. Unless `always`, only
        while this follows: what is run before stays, such as a search of the learning rate.
        """
        plain = getattr(owner, name)

        def replaced(*given: Any, **more: Any) -> Any:  # no method: a copy of the owner must not copy what is here
            return method(plain, *given, **more) if always or self.is_following else plain(*given, **more)

        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        vars(owner)[name] = replaced

    def end(self) -> None:
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self.close()

    def follow(
        self,
        accelerator: Any,
        model: Any,
        optimizers: Sequence[Any],
        *,
        batch_size: int,
        accumulation: int,
        made: int,
        planned: float,
        is_saver: bool,
        resume: bool,
        run_dir: str | Path,
        kept: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        """Make the guard, which keeps what is `kept`: everything is prepared. `options` are those of `Guard`.

        Other processes `made` so many of the `planned` updates (-1 or very large: no end). A run that resumes is taken
        to be the newest one that has a directory of this name. Damaged checkpoints are renamed by `is_saver`, which has
        written them.
        """
        world = arguments.world(accelerator)
        self._optimizers, self._is_saver = optimizers, is_saver
        run_dirs = [*takewhile(Path.exists, siblings(Path(run_dir)))]
        self.samples = FedSamples(
            Slicing(batch_size, accumulation, world.rank, world.size),
            dataset=self._dataset,
            collate=self._collate,
            updates=made,
            least=world.least,
        )
        self.guard = guard = Guard(
            *(accelerator, model, optimizers),
            data=self.samples,
            batch_size=batch_size,
            resume=resume,
            run_dir=run_dirs[-1] if resume and run_dirs else run_dir,
            **options,
        )
        guard.clock.step = guard.clock.tick = made
        guard.keep(**kept)
        if resume:  # first, as an earlier process may have skipped the next update
            guard.resume()
        assert isinstance(guard.seeds, RecordedStates)
        self._seeds = guard.seeds
        steps = int(planned) if 0 < planned < sys.maxsize else None
        self._batches: Iterator[Any] = guard.batches_until(sys.maxsize, steps)
        self._seen = len(guard.incidents)
        self.is_following = True

    @abstractmethod
    def _place(self) -> Any:
        """Return what a loss may read, and what a forward counts, besides weights."""

    @abstractmethod
    def _return_to(self, place: Any) -> None: ...

    @abstractmethod
    def _retry(self, batch: Any, number: int, fed: Fed) -> torch.Tensor:
        """Run forward and backward of a micro-batch that a rewind has undone."""

    @abstractmethod
    def _loss_of(self, model: Any, batch: Any, place: Any) -> torch.Tensor:
        """Run the forward of a micro-batch for a replay; return its share of the loss of the update."""

    @abstractmethod
    def _unseen(self) -> AbstractContextManager[None]:
        """Surround what is computed without the trainer, and leave what it counts and logs as it is."""

    @abstractmethod
    def _measure_norm(self) -> torch.Tensor | None:
        """Clip the gradients as the trainer does, and return their norm before."""

    def _computed(self, compute: Callable[..., Any], *given: Any) -> Any:
        """Run forward and backward of a micro-batch, or of another where they raise for this one alone."""
        try:
            return compute(*given)
        except Exception as error:
            if running(error).isdisjoint(("training_step", "_engine_run_backward")):  # but in a callback
                raise
            self._is_substituting = True
            try:
                return self.guard.instead(error)
            finally:
                self._is_substituting = False

    # What the trainer's calls become.

    def take(self, batch: Any, place: Any, rows: Sequence[int]) -> Any:
        """Take a micro-batch of the next update, or of one for which the trainer has made no step yet, and return what
        to run. `place` is that of the trainer before it.
        """
        if not self._is_open:
            self.fed, self._loss, self._is_open = self.samples.feed(), None, True
        self.samples.feed_more(self.fed, batch, rows)
        self.fed.places.append(place)
        self.number = len(self.fed.places) - 1
        if self._loss is not None:
            self.guard.update(self._loss)
        return next(self._batches)

    def note(self, loss: torch.Tensor) -> None:
        """Take the loss of a micro-batch after its backward; that of the update is the mean of them."""
        self._loss = loss.detach()

    def land(self) -> torch.Tensor | None:
        """Land the newest update. Returns its loss if it was retried; NaN if it was left out at last."""
        fed = self.fed
        fed.settings = self._scheduled()
        assert self._loss is not None, "no forward and backward before the step"
        try:
            loss = None if self._landed(fed, self._loss) else self.catch_up()
            self.guard.prepare()
            if self.samples.is_behind:  # a lower rate did better
                loss = self.catch_up()
        finally:  # also where the policy gives up
            self._rename_damaged()
        self._put_back(fed.settings)
        self._is_open = False
        return loss

    @property
    def at_hand(self) -> Fed:
        return self.samples.at(self._seeds.start)

    def _measured(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the loss of a batch for a replay, which leaves what the trainer counts as it is."""
        if not self._is_substituting:  # which another batch does for the micro-batch at hand
            self.number = self.number + 1 if self._replay == self._seeds.times else 0
        self._replay, fed, place = self._seeds.times, self.at_hand, self._place()
        own = fed.places[min(self.number, len(fed.places) - 1)] if fed.places else place
        self._return_to(own)
        with self._unseen():
            try:
                loss = self._loss_of(model, batch, own)
            finally:
                self._return_to(place)
        # The loss is that of the micro-batch, and its gradients are the share that the trainer takes.
        return loss if own.share == 1 else loss + (own.share - 1) * loss.detach()

    def _clip_unseen(self) -> None:
        """Do with the gradients of an update without the trainer what it does with those of its own."""
        self._put_back(self.at_hand.settings)
        with self._unseen():
            self.guard.take_norm(self._measure_norm())

    def catch_up(self) -> torch.Tensor:
        """Make again what was undone, until the newest update has landed or is left out; return its loss, or NaN."""
        result = torch.full((), torch.nan)
        while self.samples.is_behind:
            first = next(self._batches)
            fed, losses = self.samples.at(self._seeds.start), list[torch.Tensor]()
            for number in range(len(fed.batches or ())):
                if losses:
                    self.guard.update(losses[-1])
                batch = next(self._batches) if number else first
                self.number = number
                losses.append(self._retry(batch, number, fed).detach())
            self.norm = self._measure_norm()
            if self._landed(fed, losses[-1]) and fed is self.fed:
                result = torch.stack([loss.float().reshape(()) for loss in losses]).mean()
        return result

    def leave_out(self) -> None:
        """Leave out the newest update, with what it has changed in buffers."""
        self._is_open = False
        self.guard.leave_out()
        self.samples.skip(self.fed.start, self.fed.stop)

    def examine(self, *, is_end: bool = False) -> None:
        """Scan the whole state before the trainer evaluates or saves it, or ends, and repeat what a rewind undoes."""
        settings, place = self._scheduled(), self._place()  # of the next update, if the schedule has advanced
        while not self.guard.examine(is_end=is_end):
            self.catch_up()
            self._put_back(settings)
        self._rename_damaged()
        self._return_to(place)

    def close(self) -> None:
        if self.is_following:
            self.is_following = False
            self.guard.close()

    def saved(self, path: Path) -> None:
        self._saved.append((self.guard.clock.step, path))

    def _rename_damaged(self) -> None:
        """Rename checkpoints from after new damage, so that nothing resumes from them."""
        incidents = self.guard.incidents
        since = min((one.anomaly.since for one in incidents[self._seen :] if one.reached_weights), default=sys.maxsize)
        self._seen = len(incidents)
        damaged = [path for step, path in self._saved if step > since]
        self._saved = [one for one in self._saved if one[0] <= since]
        for path in damaged:
            if self._is_saver and path.exists():
                log.warning("%s holds a state from after the damage began", path)
                named = siblings(path.with_name(f"unverified-{path.name}"))
                try:
                    path.rename(next(one for one in named if not one.exists()))
                except OSError as error:
                    log.error("it cannot be renamed: %s", error)

    def _landed(self, fed: Fed, loss: torch.Tensor) -> bool:
        self._put_back(fed.settings)
        self.guard.take_norm(self.norm)
        self.guard.update(loss)
        return self.guard.settle()

    def _scheduled(self) -> list[list[dict[str, Any]]]:
        every = [one.param_groups for one in self._optimizers]
        return [[{key: group[key] for key in _SCHEDULED if key in group} for group in groups] for groups in every]

    def _put_back(self, settings: Sequence[list[dict[str, Any]]]) -> None:
        """Give the groups the settings of the trainer's schedule again: some schedules multiply what they find."""
        for optimizer, some in zip(self._optimizers, settings, strict=True):
            for group, setting in zip(optimizer.param_groups, some, strict=False):
                group.update(setting)
