"""Guards the `fit` of a Lightning Trainer, on one device or with DDP.

    trainer = L.Trainer(callbacks=[resilient_train.lightning.Guarded(recovery="balanced")])
    trainer.fit(module, loader)

Until `fit` ends, the callback replaces the methods in which Lightning runs a batch, backward and the optimizer's step.
What a rewind undoes is retried inside of that step, so `global_step`, the schedulers and the place in the data never go
back. The step drops the gradients: hooks that look at them find them before it, such as `on_before_optimizer_step`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from resilient_train.data.fed import UNKNOWN, Fed
from resilient_train.ground.errors import TrainError
from resilient_train.loop.arguments import PlacedAccelerator
from resilient_train.loop.rows_of_loader import unnumbered
from resilient_train.parts.run import Measured
from resilient_train.trainers.follower import Follower, refuse_unknown_options


class Place(NamedTuple):
    progress: list[dict[str, Any]]  # counts of steps, which are `global_step`, of batches and of epochs
    share: int  # batches of an update, which a GradientAccumulationScheduler changes
    batch: int = 0  # the number of the batch in its epoch


class Logged:
    """What was logged so far, and the module's lists: a batch that runs again counts once."""

    def __init__(self, trainer: Any) -> None:
        self._results, self._connector = trainer.fit_loop.epoch_loop._results, trainer._logger_connector
        self._entries = {key: dict(vars(entry)) for key, entry in self._results.items()}  # of tensors never changed
        self._hook = self._connector._current_fx
        own = vars(trainer.lightning_module)
        tables = own, *(one for one in own.values() if type(one) is dict)
        self._lists = [(one, len(one)) for table in tables for one in table.values() if type(one) is list]

    def restore(self) -> None:
        for key in self._results.keys() - self._entries.keys():
            del self._results[key]
        for key, entry in self._entries.items():
            vars(self._results[key]).update(entry)
        self._connector._current_fx = self._hook
        for one, count in self._lists:
            del one[count:]


class Fit(Follower):
    def __init__(self, trainer: Any, module: Any) -> None:
        super().__init__()
        self._trainer, self._module = trainer, module
        self._strategy, self._plugin = trainer.strategy, trainer.precision_plugin
        self._loop = loop = trainer.fit_loop.epoch_loop
        self._inner = loop.automatic_optimization
        self._drawn = UNKNOWN  # of the newest batch
        self._has_gradients = False  # a micro-batch of the newest update ran backward
        self._is_quiet = False  # nothing is logged
        self._logged: Logged | None = None  # before the newest update, until that has landed
        self._output: dict[str, Any] | None = None  # of the last batch of the newest update, if it was retried
        self._replace(self._inner, "run", self._run)
        self._replace(self._inner, "_make_closure", self._make_closure)
        self._replace(self._strategy, "backward", self._backward)
        self._replace(self._plugin, "optimizer_step", self._step)
        self._replace(self._plugin, "clip_grad_by_norm", self._clip)
        self._replace(self._plugin, "convert_input", lambda plain, batch: plain(self._unnumbered(batch)), always=True)
        self._replace(self._module, "log", self._log)
        self._replace(self._loop.val_loop, "run", self._validate)
        self._replace(trainer, "save_checkpoint", self._save)
        self._replace(trainer.fit_loop, "on_run_end", self._end)
        self._replace(trainer.fit_loop, "_load_combined_loader_states", self._number_rows, always=True)

    def begin(self, options: dict[str, Any]) -> None:
        trainer, optimizers = self._trainer, self._trainer.optimizers
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError("Guarded: training_step(dataloader_iter) is not supported yet: take a batch")
        if not optimizers:
            raise ValueError("Guarded: configure_optimizers returned no optimizer: there is nothing to guard")
        averages = [getattr(one, "_average_model", None) for one in trainer.callbacks]
        if (collate := self._collate) is not None:
            self._collate = lambda rows: self._transferred(collate(rows))
        if trainer.world_size > 1:  # which Lightning's own launcher leaves out
            os.environ.setdefault("LOCAL_WORLD_SIZE", str(trainer.num_devices))
        loaders = trainer.fit_loop._combined_loader.flattened
        by_norm = trainer.gradient_clip_algorithm != "value"
        self.follow(
            PlacedAccelerator(self._strategy.root_device, 1),
            self._strategy.model,
            optimizers,
            batch_size=int(getattr(getattr(loaders[0], "batch_sampler", loaders[0]), "batch_size", None) or 1),
            accumulation=trainer.accumulate_grad_batches,
            made=trainer.global_step,
            planned=trainer.estimated_stepping_batches,
            objective=Measured(self._measured, "training_step", "module", clip=self._clip_unseen),
            clip=(trainer.gradient_clip_val or None) if by_norm else None,
            is_saver=trainer.is_global_zero,
            resume=bool(trainer.ckpt_path),
            kept={f"average_{number}": one for number, one in enumerate(averages) if one is not None},
            **options,
        )

    def _end(self, plain: Any) -> None:
        """End the guard before a callback takes over in `on_train_end`, for example with averages of the weights."""
        self.examine(is_end=True)
        self.close()
        plain()

    def _number_rows(self, plain: Any) -> None:
        combined = self._trainer.fit_loop._combined_loader
        is_alone = len(combined.flattened) == 1 and combined.iterables is combined.flattened[0]
        if is_alone and not self._trainer.reload_dataloaders_every_n_epochs:
            self.number_rows(combined.flattened[0])
        plain()

    def _unnumbered(self, batch: Any) -> Any:
        own, self._drawn = unnumbered(batch)
        return own

    def _transferred(self, batch: Any) -> Any:
        """Do with rows that were fetched again what Lightning does with a batch."""
        batch = self._module._on_before_batch_transfer(self._plugin.convert_input(batch), dataloader_idx=0)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)

    def _run(self, plain: Any, *given: Any) -> Any:
        optimizer, index, kwargs = given
        if self._is_open and index % self._trainer.accumulate_grad_batches == 0:
            self.leave_out()  # the rest of its epoch was skipped
        output = plain(optimizer, index, self._fed(index, kwargs))
        if self._is_open and not self._trainer.fit_loop._should_accumulate():
            self.leave_out()  # the module made no step
        return output if self._output is None else self._output

    def _fed(self, index: int, kwargs: Any) -> Any:
        batch, rows = self.samples.healthy(kwargs["batch"], *self._drawn)
        if not self._is_open:
            self._has_gradients, self._output = False, None
            self._logged = Logged(self._trainer)
        kwargs = OrderedDict(kwargs, batch=self.take(batch, self._place()._replace(batch=index), rows))
        self.note(self._zero())  # for a training_step without a loss
        return kwargs

    def _backward(self, plain: Any, loss: torch.Tensor, *given: Any, **more: Any) -> Any:
        result = plain(loss, *given, **more)
        self._has_gradients = True
        self.note(loss * self._trainer.accumulate_grad_batches)  # of which it is a share
        return result

    def _make_closure(self, plain: Any, *given: Any) -> Any:
        made = plain(*given)
        run = made.closure

        def closure() -> Any:
            answer = self._computed(run)
            if isinstance(answer, torch.Tensor):  # of another batch
                self._has_gradients = True
                self.note(answer)
                answer = ClosureResult(answer)
            return answer

        made.closure = closure
        return made

    def _step(self, plain: Any, optimizer: Any, model: Any, closure: Callable[[], Any], **more: Any) -> Any:
        self.norm = None
        result = self._plugin._wrap_closure(model, optimizer, closure)
        if self._has_gradients:
            self._end_update()
        else:
            self.leave_out()  # as training_step returned None
        return result

    def _end_update(self) -> None:
        place = self._place()
        if (loss := self.land()) is not None:
            self._return_to(place)
            if not loss.isfinite():  # it was left out
                assert self._logged is not None
                self._logged.restore()
                self._output = {}
        self._is_quiet, self._logged = False, None

    def _log(self, plain: Any, *given: Any, **more: Any) -> None:
        if not self._is_quiet:
            plain(*given, **more)

    def _clip(self, plain: Any, optimizer: Any, clip_val: float) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self._plugin.main_params(optimizer), clip_val)
        self.norm = norm.float()

    def _retry(self, batch: Any, number: int, fed: Fed) -> torch.Tensor:
        place, is_last = fed.places[number], number == len(fed.places) - 1
        logged = self._logged if fed is self.fed else None  # of the others Lightning has written it
        self._is_quiet = logged is None
        self._return_to(place)
        if logged is not None:
            if number == 0:
                logged.restore()
            self._loop._results.batch, self._loop._results.batch_size = batch, None
        kwargs = self._loop._build_kwargs(OrderedDict(), batch, place.batch)
        closure = self._inner._make_closure(kwargs, self._trainer.optimizers[0], place.batch)
        with _block_parallel_sync_behavior(self._strategy, block=not is_last):
            closure()
        result = closure.consume_result()
        if logged is not None and is_last:
            self._output = {} if result.loss is None else result.asdict()
        return self._zero() if result.loss is None else result.loss * self._trainer.accumulate_grad_batches

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), device=self._strategy.root_device)

    def _measure_norm(self) -> torch.Tensor | None:
        self.norm = None
        self._plugin._after_closure(self._module, self._trainer.optimizers[0])
        return self.norm

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        logged, was_quiet, self._is_quiet = Logged(self._trainer), self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = was_quiet
            logged.restore()

    def _loss_of(self, model: Any, batch: Any, place: Place) -> Any:
        kwargs = self._loop._build_kwargs(OrderedDict(), batch, place.batch)
        owner = self._strategy if model is self._strategy.model else model  # it runs the step in the forward of DDP
        with self._plugin.train_step_context():
            output = owner.training_step(*kwargs.values())
        return ClosureResult.from_training_step_output(output, place.share).closure_loss

    def _place(self) -> Place:
        return Place([one.state_dict() for one in self._counts], self._trainer.accumulate_grad_batches)

    @property
    def _counts(self) -> tuple[Any, ...]:
        return self._inner.optim_progress, self._loop.batch_progress, self._trainer.fit_loop.epoch_progress

    def _return_to(self, place: Place) -> None:
        for one, state in zip(self._counts, place.progress, strict=True):
            one.load_state_dict(state)
        self._trainer.accumulate_grad_batches = place.share

    def examine(self, *, is_end: bool = False) -> None:
        """Look at the whole state between two updates."""
        if not self._trainer.training or (self._is_open and not is_end):
            return
        if self._is_open:
            self.leave_out()
        logged = Logged(self._trainer)
        super().examine(is_end=is_end)
        self._is_quiet = False
        logged.restore()

    def _validate(self, plain: Any) -> Any:
        """Examine the state before an epoch of validation: afterwards the model is not in training mode."""
        if self._trainer.validating:  # not in the sanity check before training
            self._trainer.training = True
            self.examine()
            self._trainer.validating = True
        return plain()

    def _save(self, plain: Any, filepath: Any, *given: Any, **more: Any) -> None:
        self.examine()
        plain(filepath, *given, **more)
        self.saved(Path(filepath))


class Guarded(Callback):  # type: ignore[misc]  # mypy skips Lightning
    """Makes a Trainer's `fit` refuse, diagnose, rewind and cure."""

    def __init__(self, *, run_dir: str | Path | None = None, **options: Any) -> None:
        """`options` are those of `Guard` in `follower.OPTIONS`; `run_dir` is usually a folder in `default_root_dir`."""
        refuse_unknown_options("Guarded", options)
        self._run_dir, self._options = run_dir, options
        self._fit: Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin before the optimizers are configured, which may ask for the number of steps, and so for the loader."""
        if stage != "fit":
            return
        if sum(isinstance(callback, Guarded) for callback in trainer.callbacks) > 1:
            raise TrainError("this trainer has two Guarded callbacks: give it one")
        refuse(trainer, pl_module)
        self._fit = Fit(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert self._fit is not None
        folder = Path(trainer.default_root_dir) / "resilient_train" if self._run_dir is None else self._run_dir
        self._fit.begin({**self._options, "run_dir": folder})

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.end()


def refuse(trainer: Any, module: Any) -> None:
    plugin, kind = trainer.precision_plugin, type(trainer.strategy)
    if kind not in (DDPStrategy, SingleDeviceStrategy):  # but those of pytorch_lightning, or derived as DeepSpeed's are
        what = f"{kind.__module__}.{kind.__name__} is not supported yet"
        raise ValueError(f"Guarded: {what}: use one device, or strategy='ddp', of the package lightning")
    if not module.automatic_optimization:
        raise ValueError("Guarded: manual optimization is not supported: guard its loop with resilient_train.Guard")
    if any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        raise ValueError("Guarded: StochasticWeightAveraging does not rewind: use EMAWeightAveraging, which does")
    if getattr(plugin, "scaler", None) is not None:
        raise ValueError("Guarded: 16-mixed is not supported yet, as its GradScaler steps by itself: use bf16-mixed")
