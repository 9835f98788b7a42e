"""Guards the `fit` of a Lightning Trainer, on one device or with DDP.

    trainer = L.Trainer(callbacks=[resilient_train.lightning.Guarded(recovery="balanced")])
    trainer.fit(module, loader)

Until `fit` ends, the callback replaces the methods in which Lightning runs a batch, backward and the optimizer's step.
What a rewind undoes is retried inside of that step, so `global_step`, the schedulers and the place in the data never go
back. The step drops the gradients: hooks that look at them find them before it, such as `on_before_optimizer_step`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from resilient_train.ground.errors import TrainError
from resilient_train.trainers.follower import refuse_bad_options, run_dir_of
from resilient_train.trainers.lightning_fit import Fit


class Guarded(Callback):  # type: ignore[misc]  # mypy skips Lightning
    """Makes a Trainer's `fit` refuse, diagnose, rewind and cure."""

    def __init__(self, *, run_dir: str | Path | None = None, **options: Any) -> None:
        """`options` are those of `Guard` in `follower.OPTIONS`; `run_dir` is usually a folder in `default_root_dir`."""
        refuse_bad_options("Guarded", options)
        self._run_dir, self._options = run_dir, options
        self._fit: Fit | None = None
        self._name = ""  # of the run directory that a checkpoint belongs to: a second run has its own

    def state_dict(self) -> dict[str, Any]:
        if (fit := self._fit) is not None and fit.is_following:
            self._name = fit.guard.reporter.directory.name
        return {"run_dir": self._name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._name = str(state_dict.get("run_dir", ""))

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
        if trainer.ckpt_path and self._name:
            folder = run_dir_of(Path(folder), self._name)
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
    if not isinstance(trainer, Trainer):  # such as one of the package pytorch_lightning, whose classes are others
        raise TypeError(f"Guarded: expected a lightning.pytorch.Trainer, got one of {type(trainer).__module__}")
    strategy, plugin = trainer.strategy, trainer.precision_plugin
    # DeepSpeed's strategy is derived from that of DDP, as is Megatron's.
    is_engine = any(kind.__name__.startswith(("DeepSpeed", "Megatron")) for kind in type(strategy).__mro__)
    is_known = isinstance(strategy, DDPStrategy | SingleDeviceStrategy) and not is_engine
    if not is_known or strategy.root_device.type == "xla":
        what = type(strategy).__name__
        raise ValueError(f"Guarded: {what} is not supported yet: use one device, or strategy='ddp'")
    if not module.automatic_optimization:
        raise ValueError("Guarded: manual optimization is not supported: guard its loop with resilient_train.Guard")
    if any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        raise ValueError("Guarded: StochasticWeightAveraging does not rewind: use EMAWeightAveraging, which does")
    if getattr(plugin, "scaler", None) is not None:
        raise ValueError("Guarded: 16-mixed is not supported yet, as its GradScaler steps by itself: use bf16-mixed")
