"""Guards the `fit` of a Lightning Trainer, with automatic optimization on one device or with DDP.

    trainer = L.Trainer(callbacks=[resilient_train.lightning.Guarded(recovery="balanced")])
    trainer.fit(module, loader)

Until `fit` ends, the callback replaces the methods in which Lightning runs a batch, backward and the optimizer's step.
What a rewind undoes is retried inside of that step, so `global_step`, the schedulers and the place in the data never go
back. The step drops the gradients: hooks that look at them find them before it, such as `on_before_optimizer_step`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from torchmetrics import Metric

from resilient_train.adapters.arguments import world
from resilient_train.adapters.follower import OPTIONS, Follower, TrainersSettings
from resilient_train.adapters.guard import Guard
from resilient_train.adapters.lightning_trainer import Logged, accelerator, forget_checkpoint, is_last_step, refuse
from resilient_train.adapters.rows_of_loader import NumberedBatch, number_rows, without_numbers
from resilient_train.data.fed import Fed, FedSamples
from resilient_train.data.samples import Slicing
from resilient_train.errors import TrainError
from resilient_train.state.randomness import RecordedStates
from resilient_train.update.objective import Measured

_ABSENT = object()


class Guarded(Callback):  # type: ignore[misc]  # mypy skips Lightning
    """Makes a Trainer's `fit` refuse, diagnose, rewind and cure."""

    def __init__(self, *, run_dir: str | Path | None = None, **options: Any) -> None:
        """`run_dir` is where incidents are written, by default a folder in the trainer's `default_root_dir`.

        `options` are those of `resilient_train.Guard`: recovery, checks, memory, verify_after, quarantine,
        data_changed, tracking, drill, seed.
        """
        if unknown := options.keys() - OPTIONS:
            raise TypeError(f"Guarded got an unknown option {min(unknown)!r}; there are {', '.join(sorted(OPTIONS))}")
        self._run_dir, self._options = run_dir, options
        self._fit: _Fit | None = None
        self._name = ""  # of the run directory that a checkpoint belongs to: a second run has its own

    def state_dict(self) -> dict[str, Any]:
        return {"run_dir": self._fit.run_dir.name if self._fit and self._fit.run_dir else ""}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._name = str(state_dict.get("run_dir", ""))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if sum(isinstance(callback, Guarded) for callback in trainer.callbacks) > 1:
            raise TrainError("this trainer has two Guarded callbacks: give it one")
        refuse(trainer, pl_module)
        self._fit = _Fit(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert self._fit is not None
        folder = Path(trainer.default_root_dir) / "resilient_train" if self._run_dir is None else self._run_dir
        if trainer.ckpt_path and self._name:
            folder = Path(folder).with_name(self._name)
        self._fit.begin({**self._options, "run_dir": folder})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None and is_last_step(trainer):
            self._fit.examine()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.restore()
            fit.close()


class _Fit:
    """What a guarded trainer needs during one call of `fit`."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._strategy, self._plugin = trainer.strategy, trainer.precision_plugin
        self._loop, self._automatic = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.automatic_optimization
        self._follower: Follower | None = None  # None before the training begins
        self._replaced: list[tuple[Any, str, Any]] = []  # what there was in each instance
        self._numbered: tuple[Any, Any] | None = None  # the data set whose rows have an index, and how to collate them
        self._loaders: list[Any] = []  # that were changed for this
        self._rows: list[int] = []  # of the newest batch
        self._is_open = False  # an update has begun, and made no step yet
        self._has_gradients = False  # one of its micro-batches ran backward
        self._is_quiet = False  # nothing is logged
        self._times, self._number = 0, 0  # updates that were prepared, and the micro-batch of a replay
        self._logged: Logged | None = None  # before the newest update
        self._output: dict[str, Any] | None = None  # of its last batch, if it was retried
        self._examined = (-1, False)  # the newest examination: updates until then, and whether it was that of the end
        self._metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        self._wrap()

    # Beginning and end.

    def _wrap(self) -> None:
        # Plain functions: a copy of the module or of a callback must not copy what is here.
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        run, convert, validate = self._automatic.run, self._plugin.convert_input, self._loop.val_loop.run
        end, loaders = fit_loop.on_run_end, fit_loop._load_combined_loader_states
        backward, save, note = self._strategy.backward, trainer.save_checkpoint, self._module.log
        self._replace(self._automatic, "run", lambda *given: self._run(run, *given))
        self._replace(self._strategy, "backward", lambda *given, **more: self._backward(backward, *given, **more))
        self._replace(self._plugin, "optimizer_step", lambda *given, **more: self._step(*given, **more))
        self._replace(self._plugin, "clip_grad_by_norm", lambda *given: self._clip(*given))
        self._replace(self._plugin, "convert_input", lambda batch: convert(self._unnumbered(batch)))
        self._replace(self._module, "log", lambda *given, **more: None if self._is_quiet else note(*given, **more))
        self._replace(self._loop.val_loop, "run", lambda: self._validate(validate))
        self._replace(trainer, "save_checkpoint", lambda *given, **more: self._save(save, *given, **more))
        self._replace(fit_loop, "on_run_end", lambda: self._end(end))
        self._replace(fit_loop, "_load_combined_loader_states", lambda: self._number_rows(loaders))

    def _replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        vars(owner)[name] = new

    def begin(self, options: dict[str, Any]) -> None:
        """Make the guard: the model is on its device, and optimizers and loader are made."""
        trainer, settings = self._trainer, TrainersSettings()
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError("Guarded: training_step(dataloader_iter) is not supported yet: take a batch")
        if len(trainer.optimizers) != 1:
            raise ValueError(f"Guarded: expected configure_optimizers to return one, got {len(trainer.optimizers)}")
        loader = trainer.fit_loop._combined_loader.flattened[0]
        size = int(getattr(getattr(loader, "batch_sampler", loader), "batch_size", None) or 1)
        slicing = Slicing(size, trainer.accumulate_grad_batches, trainer.global_rank, trainer.world_size)
        dataset, collate = self._numbered or (None, None)
        as_fetched = None if collate is None else lambda rows: self._transferred(collate(rows))
        made = accelerator(trainer)
        samples = FedSamples(
            slicing,
            dataset=dataset,
            collate=as_fetched,
            updates=trainer.global_step,
            least=world(made).least,
        )
        by_norm = trainer.gradient_clip_algorithm != "value"
        guard = Guard(
            *(made, self._strategy.model, trainer.optimizers[0]),
            data=samples,
            batch_size=size,
            schedule=settings,
            objective=Measured(self._measured, "training_step", key="module"),
            clip=(trainer.gradient_clip_val or None) if by_norm else None,
            resume=bool(trainer.ckpt_path),
            **options,
        )
        guard.clock.step = trainer.global_step
        averages = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]  # of WeightAveraging
        guard.keep(**{f"average_{number}": one for number, one in enumerate(averages) if one is not None})
        planned = trainer.estimated_stepping_batches
        self._follower = Follower(
            *(guard, samples, settings, self._retry, self._measure_norm),
            planned=int(planned) if planned < sys.maxsize else sys.maxsize,
        )

    @property
    def run_dir(self) -> Path | None:
        return None if self._follower is None else self._follower.guard.reporter.place.directory

    def _end(self, plain: Callable[[], None]) -> None:
        """End the guard before a callback takes over in `on_train_end`, for example with averages of the weights."""
        self.examine(is_end=True)
        self.close()
        plain()

    def close(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    def restore(self) -> None:
        """Put back everything that was replaced."""
        for owner, name, before in reversed(self._replaced):
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        for loader in self._loaders:
            without_numbers(loader)

    # Batches.

    def _number_rows(self, plain: Callable[[], None]) -> None:
        """Let the batches of the one loader carry the indices of their rows, before it is iterated."""
        combined = self._trainer.fit_loop._combined_loader
        is_alone = len(combined.flattened) == 1 and combined.iterables is combined.flattened[0]
        if is_alone and not self._trainer.reload_dataloaders_every_n_epochs:
            self._loaders = combined.flattened[:]
            self._numbered = number_rows(*self._loaders)
        plain()

    def _unnumbered(self, batch: Any) -> Any:
        if isinstance(batch, NumberedBatch):
            self._rows = [*batch.rows]
            return batch.batch
        return batch

    def _transferred(self, batch: Any) -> Any:
        """Do with rows that were fetched again what Lightning does with a batch."""
        batch = self._module._on_before_batch_transfer(self._plugin.convert_input(batch), dataloader_idx=0)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)

    # One update.

    def _run(self, plain: Callable[..., Any], optimizer: Any, index: int, kwargs: Any) -> Any:
        """Run a micro-batch; the last one of an update with the optimizer's step."""
        follower = self._follower
        assert follower is not None
        batch, rows = follower.samples.healthy(kwargs["batch"], self._rows)
        if self._is_open and index % self._trainer.accumulate_grad_batches == 0:
            self._leave_out()  # the rest of its epoch was skipped
        if is_first := not self._is_open:
            follower.feed([batch], [rows] if rows else []).number = index
            self._is_open, self._has_gradients, self._output = True, False, None
            self._logged = Logged(self._trainer, self._metrics)
        else:
            follower.feed_more(batch, rows)
        kwargs = OrderedDict(kwargs, batch=follower.next_batch())
        if is_first:
            follower.note(torch.zeros((), device=self._strategy.root_device))  # for a training_step without a loss
        output = plain(optimizer, index, kwargs)
        if self._is_open and not self._trainer.fit_loop._should_accumulate():
            self._leave_out()  # the module made no step
        return output if self._output is None else self._output

    def _backward(self, plain: Callable[..., Any], loss: torch.Tensor, *given: Any, **more: Any) -> Any:
        assert self._follower is not None
        result = plain(loss, *given, **more)
        self._has_gradients = True
        self._follower.note(loss * self._trainer.accumulate_grad_batches)  # of which it is a share
        return result

    def _step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **more: Any) -> Any:
        """Take the place of the optimizer's step."""
        follower = self._follower
        assert follower is not None
        follower.norm = None
        result = self._plugin._wrap_closure(model, optimizer, closure)
        if not self._has_gradients:
            self._leave_out()  # as training_step returned None
            return result
        try:
            loss = follower.step()
        finally:
            self._look_at_incidents()
        if loss is not None and not loss.isfinite():  # it was left out
            assert self._logged is not None
            self._logged.restore()
            self._output = {}
        self._is_open, self._is_quiet, self._logged = False, False, None
        return result

    def _leave_out(self) -> None:
        assert self._follower is not None
        self._follower.leave_out()
        self._is_open, self._logged = False, None

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients as Lightning does, and note their norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self._plugin.main_params(optimizer), clip_val)
        if self._follower is not None:
            self._follower.norm = norm.float()

    def _retry(self, batch: Any, number: int, fed: Fed) -> torch.Tensor:
        """Run forward and backward of a micro-batch that a rewind has undone."""
        assert self._follower is not None
        assert fed.batches is not None
        is_last, index = number == len(fed.batches) - 1, fed.number + number
        logged = self._logged if fed is self._follower.fed else None  # of the others Lightning has written it
        self._is_quiet = logged is None
        if logged is not None:
            if number == 0:
                logged.restore()
            self._loop._results.batch, self._loop._results.batch_size = batch, None
        kwargs = self._loop._build_kwargs(OrderedDict(), batch, index)
        closure = self._automatic._make_closure(kwargs, self._trainer.optimizers[0], index)
        with _block_parallel_sync_behavior(self._strategy, block=not is_last):
            closure()
        result = closure.consume_result()
        if logged is not None and is_last:
            self._output = {} if result.loss is None else result.asdict()
        loss = torch.zeros((), device=self._strategy.root_device) if result.loss is None else result.loss
        shares: int = self._trainer.accumulate_grad_batches
        return loss * shares

    def _measure_norm(self) -> torch.Tensor | None:
        assert self._follower is not None
        self._follower.norm = None
        self._plugin._after_closure(self._module, self._trainer.optimizers[0])
        return self._follower.norm

    def _measured(self, model: Any, batch: Any) -> Any:
        """Return the loss of a batch, for a replay."""
        assert self._follower is not None
        seeds = self._follower.guard.seeds
        assert isinstance(seeds, RecordedStates)
        if self._times != seeds.times:
            self._times, self._number = seeds.times, 0
        index = self._follower.samples.at(seeds.start).number + self._number
        self._number += 1
        before, was_quiet, self._is_quiet = Logged(self._trainer, self._metrics), self._is_quiet, True
        try:
            with self._plugin.train_step_context():
                output = model.training_step(*self._loop._build_kwargs(OrderedDict(), batch, index).values())
        finally:
            self._is_quiet = was_quiet
            before.restore()
        return ClosureResult.from_training_step_output(output).closure_loss

    # Lightning's checkpoints.

    def examine(self, *, is_end: bool = False) -> None:
        """Look at the whole state between two updates, unless that was done since the last one."""
        follower = self._follower
        if follower is None or not self._trainer.training:
            return
        if self._is_open:
            if not is_end:
                return
            self._leave_out()
        is_end = is_end or is_last_step(self._trainer)
        if self._examined in ((follower.guard.clock.tick, True), (follower.guard.clock.tick, is_end)):
            return
        before = Logged(self._trainer, self._metrics)
        follower.examine(is_end=is_end)
        self._is_quiet = False
        before.restore()
        self._examined = (follower.guard.clock.tick, is_end)
        self._look_at_incidents()

    def _validate(self, plain: Callable[[], Any]) -> Any:
        """Examine the state before an epoch of validation: afterwards the model is not in training mode."""
        if self._trainer.validating:  # not in the sanity check before training
            self._trainer.training = True
            self.examine()
            self._trainer.validating = True
        return plain()

    def _save(self, plain: Callable[..., None], filepath: Any, *given: Any, **more: Any) -> None:
        """Examine the state before it is saved, and note the file, in case that its state turns out to be bad."""
        self.examine()
        plain(filepath, *given, **more)
        if self._follower is not None:
            self._follower.saved(Path(filepath))

    def _look_at_incidents(self) -> None:
        """Let Lightning forget checkpoints that turned out to be bad."""
        assert self._follower is not None
        for path in self._follower.rename_damaged(is_main=self._trainer.is_global_zero):
            for callback in self._trainer.checkpoint_callbacks:
                forget_checkpoint(callback, str(path))
