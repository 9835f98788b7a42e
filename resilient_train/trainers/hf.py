"""Guards a Trainer of transformers, or of any class derived from it, such as those of TRL.

    trainer = resilient_train.hf.guard(SFTTrainer(...), recovery="balanced")
    trainer.train()

Until `train` ends, the methods are replaced in which it fetches batches, makes a step, clips and saves. What a rewind
undoes is retried inside of the optimizer's step, so `global_step` and the place in the data never go back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate.utils import send_to_device

from resilient_train.core import randomness
from resilient_train.data.fed import Fed
from resilient_train.data.trees import rebuilt
from resilient_train.ground.errors import TrainError, named_type
from resilient_train.loop import arguments
from resilient_train.loop.rows_of_loader import unnumbered
from resilient_train.parts.run import Measured
from resilient_train.trainers.follower import OLDEST, Follower, refuse_unknown_options

T = TypeVar("T")


def guard(trainer: T, *, run_dir: str | Path | None = None, **options: Any) -> T:
    """Guard a trainer: from now on its `train` refuses, diagnoses, rewinds and cures. Incidents are in `run_dir`, by
    default in the trainer's `output_dir`, with `push_to_hub` next to it. `options`: those of `Guard` in `OPTIONS`.
    """
    is_known = hasattr(trainer, "get_batch_samples") and hasattr(trainer, "_finalize_training")
    if isinstance(trainer, type) or not is_known:
        what = f"got {named_type(trainer)} of {type(trainer).__module__.partition('.')[0]}; {arguments.TRAINERS}"
        raise TypeError(f"trainer: expected a transformers.Trainer, {OLDEST['transformers']} or newer, {what}")
    refuse_unknown_options("guard", options)
    given: Any = trainer
    if hasattr(given, "_resilient"):
        raise TrainError("this trainer is guarded already")
    arguments.world(given.accelerator)  # which refuses what cannot be guarded
    if given.args.n_gpu > 1:
        raise ValueError("trainer: DataParallel keeps copies that cannot be guarded: start it with torchrun")
    given.args.logging_nan_inf_filter = False  # it hides NaN, and waits for the device at every micro-batch
    # What lies in `output_dir` is uploaded with push_to_hub, and a journal does not belong there.
    output = Path(given.args.output_dir)
    usual = output.with_name(f"{output.name}_incidents") if given.args.push_to_hub else output / "resilient_train"
    options["run_dir"] = usual if run_dir is None else run_dir
    plain, given._resilient = given._inner_training_loop, options

    def guarded(*args: Any, **more: Any) -> Any:
        resumes = bool(more.get("resume_from_checkpoint", args[2] if len(args) > 2 else None))
        here = Guarding(given, options, resumes)
        try:
            return plain(*args, **more)
        finally:
            here.end()

    given._inner_training_loop = guarded
    return trainer


class _Place(NamedTuple):
    step: int
    epoch: float | None
    batches: int | None  # GRPO's count
    items: Any = None  # in the batches that were fetched with this one, by which their losses are divided
    share: int = 1  # how many of these there are


class Guarding(Follower):
    def __init__(self, trainer: Any, options: dict[str, Any], resumes: bool) -> None:
        super().__init__()
        self.trainer, self.options = trainer, options
        self.rows: list[Any] = []  # of the batches that were fetched, and are not run yet
        self.place = _Place(0, None, None)  # where the trainer was when it fetched them
        self.loss_before: torch.Tensor | None = None  # the trainer's sum of losses before the newest update
        self._resumes = resumes  # from a checkpoint of the trainer
        self._plain_step = trainer.training_step
        self._replayed: list[torch.Tensor] | None = None  # in a replay, the loss whose backward it makes itself
        self._replace(trainer, "get_train_dataloader", self._get_train_dataloader, always=True)
        self._replace(trainer, "get_batch_samples", self._get_batch_samples, always=True)
        self._replace(trainer, "training_step", self._training_step)
        self._completed: list[Any] = []  # completions of prompts, and the random numbers after them
        self._again: Iterator[Any] = iter(())  # the same, where an update is repeated
        own = ["_prepare_inputs", "_get_grad_norm", "_evaluate", "_save_checkpoint", "_finalize_training"]
        for name in own + ["_generate"] * hasattr(trainer, "_generate"):
            self._replace(trainer, name, getattr(self, name))

    def begin(self) -> None:
        trainer, args, accelerator = self.trainer, self.trainer.args, self.trainer.accelerator
        self.follow(
            accelerator,
            trainer.model_wrapped,
            [trainer.optimizer],
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            made=trainer.state.global_step,
            planned=trainer.state.max_steps,
            objective=Measured(
                self._measured, "the trainer's loss", "trainer", clip=self._clip_unseen, is_goal=not self.generates
            ),
            clip=args.max_grad_norm if args.max_grad_norm > 0 else None,
            is_saver=args.should_save,
            resume=self._resumes,
            **{"seed": args.seed, **self.options},
        )
        self._replace(accelerator, "backward", self._backward)
        self._replace(trainer.optimizer, "step", self._step)
        # Without these marks, torch's schedulers warn that no step was made.
        trainer.optimizer.step._wrapped_by_lr_sched = trainer.optimizer._opt_called = True

    @property
    def generates(self) -> bool:
        """Whether the trainer makes its inputs from prompts now and then, and keeps them, as GRPO does."""
        return hasattr(self.trainer, "_buffered_inputs")

    def healthy(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, without rows that are in quarantine, and note the indices of their rows."""
        for batch in batches:
            own, drawn = unnumbered(batch)
            healthy, rows = self.samples.healthy(own, *drawn)
            self.rows.append(rows)
            yield own if rows is drawn[0] else send_to_device(healthy, self.trainer.args.device)

    def _step(self, plain: Any, closure: Any = None) -> None:
        trainer, place = self.trainer, self._place()
        if (loss := self.land()) is not None:
            self._return_to(place)
            assert self.loss_before is not None
            # The trainer has added the loss of the refused run, and a NaN would stay in its sum.
            trainer._tr_loss.copy_(self.loss_before + loss.nan_to_num(0.0).to(self.loss_before.device))
        newest = self.guard.newest  # after an overflow in fp16 the trainer's schedule waits
        trainer.optimizer._is_overflow = newest is not None and newest.overflowed

    def _retry(self, batch: Any, number: int, fed: Fed) -> torch.Tensor:
        trainer, model, batches, self.number = self.trainer, self.trainer.model_wrapped, fed.batches or [], number
        if number == 0 and all(place.share == len(batches) for place in fed.places):
            # Some of its rows may be others now, perhaps on another rank only: all ranks count again together.
            items = trainer._get_num_items_in_batch(batches, trainer.args.device)
            fed.places = [fed.places[0]._replace(items=items)] * len(batches)
        place, is_last = fed.places[number], number == len(batches) - 1
        if number == 0 or place is not fed.places[number - 1]:  # the first that was fetched then
            self._return_to(place)
        trainer.current_gradient_accumulation_steps = place.share
        trainer.accelerator.gradient_state._set_sync_gradients(is_last)
        with nullcontext() if is_last else trainer.accelerator.no_sync(model=model):
            loss: torch.Tensor = self._computed(self._plain_step, model, batch, place.items) * place.share
        return loss

    def _measure_norm(self) -> torch.Tensor | None:
        trainer = self.trainer
        norm = trainer._clip_grad_norm(trainer.model_wrapped) if trainer.args.max_grad_norm > 0 else None
        trainer._get_grad_norm(trainer.model_wrapped, grad_norm=norm)
        return self.norm

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Put back the numbers and tables of metrics in which trainers such as those of TRL count in their loss."""
        own = vars(self.trainer)
        counted = {
            name: rebuilt(one, copy.copy)
            for name, one in own.items()
            if type(one) in (int, float) or (isinstance(one, dict) and name.endswith(("metrics", "logs")))
        }
        try:
            yield
        finally:
            own.update(counted)

    def _loss_of(self, model: Any, batch: Any, place: _Place) -> torch.Tensor:
        self._replayed = replayed = list[torch.Tensor]()
        self.trainer.current_gradient_accumulation_steps = place.share
        try:
            loss: torch.Tensor = self._plain_step(model, batch, place.items)
        finally:
            self._replayed = None
        return replayed[-1] if replayed else loss

    def _backward(self, plain: Any, loss: torch.Tensor, **more: Any) -> None:
        if self._replayed is None:
            plain(loss, **more)
        else:
            self._replayed.append(loss)

    def _place(self) -> _Place:
        state = self.trainer.state
        return _Place(state.global_step, state.epoch, getattr(self.trainer, "_step", None))

    def _return_to(self, place: _Place) -> None:
        self.trainer.state.global_step, self.trainer.state.epoch = place.step, place.epoch
        if place.batches is not None:
            self.trainer._step = place.batches

    # What the trainer's methods become.

    def _get_train_dataloader(self, plain: Any) -> Any:
        """Let the batches carry the indices of their rows, unless these are only prompts."""
        loader = plain()
        if not self.generates:
            self.number_rows(loader)
        return loader

    def _get_batch_samples(self, plain: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Take what the trainer fetches for one update; its losses are divided by the number of `items`."""
        if not self.is_following:
            self.begin()
        self.rows = []
        batches, items = plain(self.healthy(epoch_iterator), num_batches, device)
        self.place = self._place()._replace(items=items, share=len(batches))
        return batches, items

    def _training_step(self, plain: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if not self._is_open:
            self.loss_before = self.trainer._tr_loss.clone()
        batch = self.take(inputs, self.place, self.rows.pop(0))
        loss: torch.Tensor = self._computed(plain, model, batch, num_items_in_batch)
        self.note(loss * self.trainer.current_gradient_accumulation_steps)  # of which it is a share
        return loss

    def _prepare_inputs(self, plain: Any, inputs: Any) -> Any:
        """Prepare inputs, but complete prompts only once: what is repeated is scored again, as a score may have broken,
        where each update has completions of its own.
        """
        trainer, args = self.trainer, self.trainer.args
        if not (self.generates and trainer.model.training):
            return plain(inputs)
        fed, number = self.at_hand, self.number
        if is_new := number >= len(fed.prepared):
            self._completed, self._again = [], iter(())
            made = plain(inputs)
            fed.prepared.append((made, randomness.capture(args.device), self._completed))
            self.samples.keep(fed, made)
        made, after, completed = fed.prepared[number]
        if (
            not is_new
            and fed.prepared[0][2]
            and args.gradient_accumulation_steps == args.steps_per_generation * args.num_iterations
        ):
            self._again = iter(completed)
            with self._unseen():
                trainer._step = fed.places[0].batches + number
                made = plain(inputs)
        randomness.restore(after, args.device)  # generation has drawn from it
        return dict(made)

    def _generate(self, plain: Any, *given: Any, **more: Any) -> Any:
        if not self.trainer.model.training:
            return plain(*given, **more)
        device = self.trainer.args.device
        for made, after in self._again:
            randomness.restore(after, device)
            return rebuilt(made)
        made = plain(*given, **more)
        self._completed.append((rebuilt(made), randomness.capture(device)))  # in containers that the trainer changes
        return made

    def _get_grad_norm(self, plain: Any, model: Any, grad_norm: Any = None) -> Any:
        norm = plain(model, grad_norm=grad_norm)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.norm = torch.as_tensor(full, dtype=torch.float32)
        return self.norm if isinstance(norm, torch.Tensor) else norm

    def _evaluate(self, plain: Any, *args: Any, **more: Any) -> Any:
        self.examine()
        found = plain(*args, **more)
        if isinstance(loss := found.get("eval_loss"), float):
            self.guard.reporter.note_evaluation({"loss": loss})
        return found

    def _save_checkpoint(self, plain: Any, model: Any, trial: Any) -> None:
        self.examine()
        plain(model, trial)
        self.saved(Path(self.trainer._get_output_dir(trial)) / f"checkpoint-{self.trainer.state.global_step}")

    def _finalize_training(self, plain: Any, *args: Any, **more: Any) -> Any:
        self.examine(is_end=True)
        self.end()  # first: the trainer may load its best weights
        return plain(*args, **more)
