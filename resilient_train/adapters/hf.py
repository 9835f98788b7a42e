"""Guards a Trainer of transformers, or of any class derived from it, such as those of TRL.

    trainer = resilient_train.hf.guard(SFTTrainer(...), recovery="balanced")
    trainer.train()

The trainer stays what it is: its class is extended by one that overrides the places where it fetches batches, makes a
step, clips and saves. What a rewind undoes is retried inside of the optimizer's step, so `global_step` and the place
in the data never go back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import send_to_device

from resilient_train.adapters import arguments
from resilient_train.adapters.follower import OLDEST, Follower, TrainersSettings, refuse_bad_options, run_dir_of
from resilient_train.adapters.guard import Guard
from resilient_train.adapters.rows_of_loader import NumberedBatch, copied, number_rows, with_added, without_numbers
from resilient_train.data.fed import Fed, FedSamples
from resilient_train.data.samples import Slicing
from resilient_train.errors import TrainError, named_type
from resilient_train.state import randomness
from resilient_train.update.objective import Measured

T = TypeVar("T")

_NOTE = "resilient_train.txt"  # in a checkpoint: the name of the run directory
_ITSELF = "_resilient"  # the attribute of a guarded trainer
_NOTED = (  # what TRL's trainers count in a forward, and the control of an entropy bonus
    *("_metrics", "_stored_metrics", "_total_train_tokens", "_logs", "_pending_metrics", "_pending_extra_logs"),
    *("entropy_coef", "_last_world_entropy", "_entropy_window_stats"),
)


def guard(trainer: T, *, run_dir: str | Path | None = None, **options: Any) -> T:
    """Guard a trainer: from now on its `train` refuses, diagnoses, rewinds and cures.

    `run_dir` is where incidents are written, by default a folder in the trainer's `output_dir`, and with `push_to_hub`
    one next to it. `options` are those of `resilient_train.Guard` that are in `OPTIONS`.
    """
    if (
        isinstance(trainer, type)
        or not hasattr(trainer, "get_batch_samples")
        or not hasattr(trainer, "_finalize_training")
    ):
        oldest = OLDEST["transformers"]
        other = type(trainer).__module__.partition(".")[0]
        is_lightning = other in ("lightning", "pytorch_lightning")
        hint = "; for Lightning: L.Trainer(callbacks=[resilient_train.lightning.Guarded()])" if is_lightning else ""
        what = f"expected a transformers.Trainer, {oldest} or newer, got {named_type(trainer)} of {other}{hint}"
        raise TypeError(f"trainer: {what}")
    refuse_bad_options("guard", options)
    given: Any = trainer
    if isinstance(given, _Guarded):
        raise TrainError("this trainer is guarded already")
    arguments.world(given.accelerator)  # which refuses what cannot be guarded
    if given.args.n_gpu > 1:
        raise ValueError("trainer: DataParallel keeps copies that cannot be guarded: start it with torchrun")
    given.args.logging_nan_inf_filter = False  # it hides NaN, and waits for the device at every micro-batch
    # What lies in `output_dir` is uploaded with push_to_hub, and a journal does not belong there.
    output = Path(given.args.output_dir)
    usual = output.with_name(f"{output.name}_incidents") if given.args.push_to_hub else output / "resilient_train"
    options["run_dir"] = usual if run_dir is None else run_dir
    kind = type(given)
    given.__dict__[_ITSELF] = Guarding(given, options)
    given.__class__ = type(kind.__name__, (_Guarded, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return trainer


class Guarding:
    """What a guarded trainer needs during one call of `train`."""

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self.trainer, self.options = trainer, options
        self.follower: Follower | None = None  # None outside of `train`
        self._resumes_from: Path | None = None  # a checkpoint of the trainer
        self._dataset: Any = None  # map-style, and how a batch is made of its rows
        self._collate: Any = None
        self._is_training, self._loaders = False, list[Any]()  # loaders whose batches carry the indices of their rows
        self._rows: list[Any] = []  # of the batches that are being fetched
        self._backward: Callable[..., None] | None = None  # Accelerate's
        self._optimizer_step: Any = None
        self._is_replay, self._number = False, 0  # which of an update's micro-batches it is
        self._replayed: torch.Tensor | None = None  # the loss whose backward a replay makes itself
        self._loss_before: torch.Tensor | None = None  # the trainer's sum of losses before the newest update
        self._noted_before: dict[str, Any] | None = None  # its metrics then, until that update is made
        self._left_out = 0  # updates since the trainer's last log
        self._norm: torch.Tensor | None = None  # of the gradients of the newest update that was made
        self._best_before = dict[Path, tuple[Any, Any, Any]]()  # metric, step and checkpoint, before each evaluation

    # Beginning and end.

    @contextmanager
    def training(self, resumes_from: Any) -> Iterator[None]:
        self._left_out, self._norm = 0, None
        self._best_before.clear()
        self._resumes_from, accelerator = Path(resumes_from) if resumes_from else None, self.trainer.accelerator
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False
            while self._loaders:
                without_numbers(self._loaders.pop())
            follower, self.follower = self.follower, None
            if follower is not None:
                accelerator.__dict__.pop("backward", None)
                self.trainer.optimizer.step = self._optimizer_step
                follower.close()

    def begin(self) -> Follower:
        """Make the guard when everything is prepared, before the first batch."""
        trainer, args = self.trainer, self.trainer.args
        accelerator = trainer.accelerator
        world = arguments.world(accelerator)
        batch_size = args.per_device_train_batch_size
        slicing = Slicing(batch_size, args.gradient_accumulation_steps, world.rank, world.size)
        samples = FedSamples(
            slicing,
            dataset=self._dataset,
            collate=self._collate,
            updates=trainer.state.global_step,
            keeps_places=not args.ignore_data_skip,
            least=world.least,
        )
        options = {"seed": args.seed, **self.options}
        if self._resumes_from is not None:
            note = self._resumes_from / _NOTE
            name = note.read_text() if note.exists() else ""
            options["run_dir"] = run_dir_of(Path(options["run_dir"]), name)
        guard = Guard(
            *(accelerator, trainer.model_wrapped, trainer.optimizer),
            data=samples,
            batch_size=batch_size,
            schedule=TrainersSettings(),
            objective=Measured(self._measured, "the trainer's loss", key="trainer"),
            clip=args.max_grad_norm if args.max_grad_norm > 0 else None,
            resume=self._resumes_from is not None,
            **options,
        )
        self.follower = follower = Follower(
            *(guard, samples, self._make_again, self._measure_norm),
            made=trainer.state.global_step,
            planned=trainer.state.max_steps,
        )
        kinds = {kind for one in trainer.callback_handler.callbacks for kind in type(one).__mro__}
        with_hook = [kind for kind in kinds if "on_pre_optimizer_step" in vars(kind)]  # one of them is the base class
        guard._updater.changes_after_norm = len(with_hook) > 1
        self._backward = accelerator.backward
        accelerator.backward = self._run_backward
        self._optimizer_step, trainer.optimizer.step = trainer.optimizer.step, self._step
        trainer.optimizer._opt_called = True  # without this mark, torch's schedulers warn that no step was made
        return follower

    # Batches.

    def number(self, loader: Any) -> Any:
        """Let the batches of a loader carry the indices of their rows, unless these are only prompts."""
        if self._is_training and not self._generates and (found := number_rows(loader)) is not None:
            self._dataset, self._collate = found
            self._loaders.append(loader)
        return loader

    def numbered(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, without rows that are in quarantine, and note the indices of their rows."""
        follower = self.follower or self.begin()
        self._rows = []
        for batch in batches:
            if not isinstance(batch, NumberedBatch):
                self._rows.append(())
            else:
                healthy, rows = follower.samples.healthy(batch.batch, batch.rows)
                self._rows.append(rows)
                batch = healthy if rows is batch.rows else send_to_device(healthy, self.trainer.args.device)
            yield batch

    def fed(self, batches: list[Any], items: Any) -> tuple[list[Any], Any]:
        """Pass on what the trainer has fetched for one update; its losses are divided by the number of `items`."""
        if batches and self.follower is not None:
            fed = self.follower.feed(batches, self._rows)
            fed.before = fed.before or self._counts
            fed.more = fed.more or {"items": [], "shares": []}
            fed.more["items"] += [items] * len(batches)
            fed.more["shares"] += [len(batches)] * len(batches)
        return batches, items

    @property
    def _generates(self) -> bool:
        """Whether the trainer makes its inputs from prompts now and then, and keeps them, as GRPO does."""
        return hasattr(self.trainer, "_buffered_inputs")

    def prepared(self, prepare: Callable[[Any], Any], inputs: Any) -> Any:
        """Prepare inputs, but generate them only once: what is repeated gets what was generated for it."""
        if self.follower is None or not self._generates or not self.trainer.model.training:
            return prepare(inputs)
        fed, device = self.follower.at_hand, self.trainer.args.device
        if self._number >= len(fed.prepared):
            noted = self._noted()
            fed.prepared.append((prepare(inputs), randomness.capture(device)))
            self.follower.samples.keep(fed, fed.prepared[-1][0])
            if self._noted_before is not None:  # what was generated counts once
                self._noted_before = with_added(self._noted_before, noted, self._noted())
        made, after = fed.prepared[self._number]
        randomness.restore(after, device)  # generation has drawn from it
        return dict(made)

    # One update.

    def training_step(self, plain: Callable[..., torch.Tensor], model: Any, inputs: Any, items: Any) -> torch.Tensor:
        """Run forward and backward of a micro-batch, in the trainer's own way."""
        follower = self.follower
        if follower is None or self._is_replay:
            return plain(model, inputs, items)
        if not follower.taken:
            self._loss_before, self._noted_before = self.trainer._tr_loss.clone(), self._noted()
        self._number = follower.taken
        loss = plain(model, follower.next_batch(), items)
        follower.note(loss * self.trainer.current_gradient_accumulation_steps)  # of which it is a share
        return loss

    def _step(self, closure: Any = None) -> None:
        """Take the place of the optimizer's step."""
        follower = self.follower
        assert follower is not None
        norm, counts = follower.norm, self._counts
        try:
            loss = follower.step()
        except TrainError:  # which all ranks raise together
            self._look_at_incidents()
            raise
        finally:
            self._return_to(counts)
        self._look_at_incidents()
        if loss is not None:
            self._correct_logs(loss, norm)
        if loss is None or loss.isfinite():
            self._norm = follower.norm
        self._noted_before = None
        newest = follower.guard.newest  # after an overflow in fp16 the trainer's schedule waits
        self.trainer.optimizer._is_overflow = newest is not None and newest.overflowed

    _step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # another mark that they look for

    def note_norm(self, norm: Any) -> Any:
        """Note what the trainer has measured of its gradients."""
        if self.follower is not None:
            full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            self.follower.norm = torch.as_tensor(full, dtype=torch.float32)
            return self.follower.norm if isinstance(norm, torch.Tensor) else norm
        return norm

    def _correct_logs(self, loss: torch.Tensor, norm: torch.Tensor | None) -> None:
        """Count the loss and the norm of the update as it was made in the end; none if it was left out."""
        trainer, before = self.trainer, self._loss_before
        assert before is not None
        assert self.follower is not None
        is_made = self.follower.was_made(loss)
        if not is_made and self._noted_before is not None:
            vars(trainer).update(self._noted_before)
        trainer._tr_loss.copy_(before + loss.to(before.device) if is_made else before)
        self._left_out += not is_made
        newest = self.follower.norm if is_made else self._norm
        if norm is not None and newest is not None:
            norm.copy_(newest)

    def correct_mean(self, *, is_end: bool = False) -> None:
        """Let the loss that the trainer logs be the mean of the updates that were made; if none was, it logs no row."""
        trainer = self.trainer
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        if self._left_out and (trainer.control.should_log or is_end):
            trainer.control.should_log &= steps > self._left_out
            if steps > self._left_out:
                trainer._tr_loss *= steps / (steps - self._left_out)
                self._left_out = 0

    def _make_again(self, batch: Any, number: int, fed: Fed) -> torch.Tensor:
        """Run forward and backward of a micro-batch that a rewind has undone."""
        trainer, self._number = self.trainer, number
        assert self.follower is not None
        assert fed.batches is not None
        # The newest update counts as it is made in the end, unless it was logged already; older ones have counted.
        is_counted = fed is self.follower.fed and self._noted_before is not None
        if is_counted and number == 0:
            vars(trainer).update(copied(self._noted_before))
        noted = self._noted()
        is_last = number == len(fed.batches) - 1
        if number == 0:
            self._return_to(fed.before)
            count = len(fed.batches)
            if fed.more.setdefault("shares", [count] * count) == [count] * count:
                # Some of its rows may be others now, perhaps on another rank only: all ranks count again together.
                items = trainer._get_num_items_in_batch(fed.batches, trainer.args.device)
                fed.more["items"] = [items] * count
        share: int = fed.more["shares"][number]
        trainer.current_gradient_accumulation_steps = share
        trainer.accelerator.gradient_state._set_sync_gradients(is_last)
        model = trainer.model_wrapped
        with nullcontext() if is_last else trainer.accelerator.no_sync(model=model):
            loss = self._plain_step(model, batch, fed.more["items"][number]) * share
        if not is_counted:
            vars(trainer).update(noted)
        return loss

    def _noted(self) -> dict[str, Any]:
        noted = {name: vars(self.trainer)[name] for name in _NOTED if name in vars(self.trainer)}
        return {name: copied(one) for name, one in noted.items()}

    @property
    def _counts(self) -> tuple[int, float | None, int | None]:
        """What a loss may read: updates and epochs, and GRPO's count of batches."""
        return self.trainer.state.global_step, self.trainer.state.epoch, getattr(self.trainer, "_step", None)

    def _return_to(self, counts: tuple[int, float | None, int | None]) -> None:
        self.trainer.state.global_step, self.trainer.state.epoch, step = counts
        if step is not None:
            self.trainer._step = step

    def _measure_norm(self) -> torch.Tensor | None:
        trainer = self.trainer
        norm = trainer._clip_grad_norm(trainer.model_wrapped) if trainer.args.max_grad_norm > 0 else None
        trainer._get_grad_norm(trainer.model_wrapped, grad_norm=norm)
        return None if self.follower is None else self.follower.norm

    # Replays.

    def _measured(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, before its backward, for a replay."""
        assert self.follower is not None
        trainer, (fed, self._number) = self.trainer, self.follower.replayed()
        before = self._noted()
        before |= {"_buffered_inputs": trainer._buffered_inputs} if hasattr(trainer, "_buffered_inputs") else {}
        counts, self._is_replay, self._replayed = self._counts, True, None
        self._return_to(fed.before or counts)
        try:
            items = fed.more.get("items") or [None]
            loss = self._plain_step(model, batch, items[min(self._number, len(items) - 1)])
        finally:
            self._is_replay = False
            vars(trainer).update(before)
            self._return_to(counts)
        return loss if self._replayed is None else self._replayed

    def _run_backward(self, loss: torch.Tensor, **more: Any) -> None:
        if self._is_replay:
            self._replayed = loss
        else:
            assert self._backward is not None
            self._backward(loss, **more)

    def _plain_step(self, model: Any, batch: Any, items: Any) -> torch.Tensor:
        loss: torch.Tensor = super(_Guarded, self.trainer).training_step(model, batch, items)  # type: ignore[misc]
        return loss

    # The trainer's evaluations and checkpoints.

    def examine(self, *, is_end: bool = False) -> None:
        """Look at the whole state before the trainer evaluates it, saves it, or reports its end."""
        if self.follower is not None:
            counts = self._counts
            self.follower.examine(is_end=is_end)
            self._return_to(counts)
            self._look_at_incidents()

    def before_evaluation(self) -> None:
        """Examine the state, and note the best one until now, in case that damage is found later in this one."""
        if self.follower is not None:
            self.examine()
            state = self.trainer.state
            mark = Path(os.devnull, str(state.global_step))  # in the place of a checkpoint: no such file can exist
            best = state.best_metric, state.best_global_step, state.best_model_checkpoint
            self._best_before.setdefault(mark, best)  # the first, if it evaluates twice
            self.follower.saved(mark)

    def saved(self, folder: Path) -> None:
        if self.follower is not None:
            self.follower.saved(folder)
            run_dir = self.follower.guard.reporter.place.directory
            if run_dir is not None and self.trainer.args.should_save:
                (folder / _NOTE).write_text(run_dir.name)

    def _look_at_incidents(self) -> None:
        """Let the trainer forget what it evaluated and saved with damage, and its best state is again that before."""
        assert self.follower is not None
        damaged = self.follower.rename_damaged(is_main=self.trainer.args.should_save)
        if before := next((self._best_before[mark] for mark in damaged if mark in self._best_before), None):
            # The trainer keeps only so many checkpoints. Ranks without a shared disk decide alike.
            has_gone = before[2] is not None and not Path(before[2]).exists()
            if self.follower.guard.world.on_main(lambda: has_gone):
                before = None, None, None
            state = self.trainer.state
            state.best_metric, state.best_global_step, state.best_model_checkpoint = before


class _Guarded:
    """What a guarded trainer does in another way."""

    _resilient: Guarding

    def _inner_training_loop(self, *args: Any, **more: Any) -> Any:
        resumes_from = more.get("resume_from_checkpoint", args[2] if len(args) > 2 else None)
        with self._resilient.training(resumes_from):
            return super()._inner_training_loop(*args, **more)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        return self._resilient.number(super().get_train_dataloader())  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches = self._resilient.numbered(epoch_iterator)
        return self._resilient.fed(*super().get_batch_samples(batches, num_batches, device))  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return self._resilient.training_step(super().training_step, model, inputs, num_items_in_batch)  # type: ignore[misc]

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self._resilient.prepared(super()._prepare_inputs, inputs)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._resilient.note_norm(super()._get_grad_norm(model, grad_norm=grad_norm))  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **more: Any) -> None:
        self._resilient.correct_mean()
        super()._maybe_log_save_evaluate(*args, **more)  # type: ignore[misc]

    def _evaluate(self, *args: Any, **more: Any) -> Any:
        self._resilient.before_evaluation()
        return super()._evaluate(*args, **more)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._resilient.examine()
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        folder = f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
        self._resilient.saved(Path(self._get_output_dir(trial)) / folder)  # type: ignore[attr-defined]

    def _finalize_training(self, *args: Any, **more: Any) -> Any:
        self._resilient.examine(is_end=True)
        self._resilient.correct_mean(is_end=True)
        return super()._finalize_training(*args, **more)  # type: ignore[misc]
