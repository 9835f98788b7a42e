"""From a checked configuration to a run that is ready for its first update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import default_collate

from resilient_train.adapters.guard import Guard
from resilient_train.app.config import targets
from resilient_train.app.config.schema import Config
from resilient_train.checkpoint import weights
from resilient_train.checkpoint.resume import Resume
from resilient_train.data import build as data
from resilient_train.data.evaluation import IterableEvaluation, MapEvaluation
from resilient_train.data.rows import Collate
from resilient_train.data.samples import Slicing
from resilient_train.drills import Drill, parse
from resilient_train.errors import ConfigError, in_one_line
from resilient_train.ranks import sharding
from resilient_train.ranks.world import World
from resilient_train.record.incident_log import IncidentLog
from resilient_train.recover import policy
from resilient_train.state.randomness import Purpose, mix, seed_all
from resilient_train.state.sharded import own_class
from resilient_train.tracking.store import locate
from resilient_train.update.objective import Measured
from resilient_train.update.schedule import CurveSchedule, Schedule, ShadowSchedule
from resilient_train.update.updater import parameter_groups
from resilient_train.wording import log


@dataclass
class Run:
    """Everything the loop works with."""

    config: Config
    world: World
    model: nn.Module  # as prepared by Accelerate
    bare_model: nn.Module  # the user's own
    objective: Measured
    guard: Guard
    evaluation: MapEvaluation | IterableEvaluation | None
    strategy: str = ""  # how the model is spread over the processes, where it is
    stop: Callable[[], bool] = lambda: False
    evaluated: dict[str, float] | None = None
    evaluated_at: int | None = None  # step
    has_begun: bool = False  # an update was made

    def evaluates_at(self, step: int) -> bool:
        """Say whether an evaluation is due after so many steps, on the way."""
        return bool(self.config.run.eval_every) and step % self.config.run.eval_every == 0

    def owes_evaluation(self, step: int) -> bool:
        """Say whether the previous process ended before the evaluation that was due."""
        return step > 0 and self.evaluates_at(step) and self.evaluated_at != step

    def state_dict(self) -> dict[str, Any]:
        """What does not rewind, and is there again after a resume."""
        return {"evaluated": self.evaluated, "evaluated_at": self.evaluated_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.evaluated, self.evaluated_at = state["evaluated"], state["evaluated_at"]

    def close(self) -> None:
        """Let go of worker processes."""
        self.guard.let_go()
        if self.evaluation is not None:
            self.evaluation.close()

    def __str__(self) -> str:
        count = sum(weight.numel() for weight in self.bare_model.parameters())
        sliced = self.guard.slicing
        factors = [(sliced.batch_size, "rows"), (sliced.accumulation, "micro-batches"), (sliced.world, "processes")]
        told = [f"{number} {what}" for number, what in factors if number > 1] or ["1 row"]
        cut = " x ".join(told) + (f" = {sliced.samples} rows" if len(told) > 1 else "")
        strategy = self.strategy or ("copied to all processes (DDP)" if self.world.size > 1 else "")
        spread = f", {strategy}" if strategy else ""
        return f"{own_class(self.bare_model).__name__} with {_spoken(count)} weights, {cut} to an update{spread}"


def assemble(
    config: Config,
    world: World,
    incidents: IncidentLog | None = None,
    resume: Resume | None = None,
    stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
) -> Run:
    """Build everything a configuration names; incidents are written into `incidents`. `stop` is asked before updates.

    `beat` is called whenever the run gets further.
    """
    incidents = incidents or IncidentLog(None)
    seed = config.run.seed
    seed_all(mix(Purpose.INITIAL_WEIGHTS, seed), world.device)
    objective = Measured(_objective(config.objective, world.device), config.objective["_target_"])
    slicing = Slicing(config.data.batch_size, config.accelerate.gradient_accumulation_steps, world.rank, world.size)
    collate = _collate(config.data.collate)
    rows = targets.build("data.train", config.data.train)
    drill = _drill(config, incidents)
    samples = data.samples(
        rows if drill is None else drill.wrapped(rows),
        config.data,
        slicing,
        seed=seed,
        collate=collate,
        pin_memory=world.device.type == "cuda",
    )
    evaluation = None
    if config.data.eval and config.data.eval.get("_target_"):
        dataset = targets.build("data.eval", config.data.eval)
        evaluation = data.evaluation(dataset, config.data, slicing, seed=seed, collate=collate)
    model = _model(config)
    strategy = _spread(model, config, world)
    optimizers = _optimizers(config.optimizer, model)
    schedules = [_schedule(config.schedule, optimizer) for optimizer in optimizers]
    if config.accelerate.compile:
        model.compile()  # in place: torch.compile() would put _orig_mod. before every name
    prepared = world.prepared(model, optimizers, is_sharded=bool(strategy))
    guard = Guard(
        world.accelerator,
        prepared,
        optimizers,
        data=samples,
        batch_size=config.data.batch_size,
        steps=config.run.steps,
        schedule=schedules,
        objective=objective,
        recovery=config.recovery,
        checks=config.checks,
        clip=config.clip,
        memory=config.checkpoint.memory,
        verify_after=config.checkpoint.verify_after,
        seed=seed,
        quarantine=config.data.quarantine,
        data_changed=config.run.data_changed,
        disk=config.checkpoint.disk,
        drill=drill,
        incidents=incidents,
        resume=resume or False,
        stop=stop,
        beat=beat,
    )
    run = Run(
        config=config,
        world=world,
        model=prepared,
        bare_model=model,
        objective=objective,
        guard=guard,
        evaluation=evaluation,
        strategy=strategy,
        stop=stop,
    )
    guard.remember("run", run)
    return run


def validate(config: Config, changed: Collection[str], home: Path) -> None:
    """Refuse what a start would refuse, as far as that can be said without building a model and data.

    `changed` are the keys that a run is configured otherwise by than it was.
    """
    policy.parse(config.recovery)
    parse(config.drill, steps=config.run.steps)
    if (source := config.run.init_from) is not None and "run.init_from" in changed and not Path(source).exists():
        raise ConfigError("run.init_from", source, "there is no such file or directory")
    if config.tracking.kind != "none":
        locate(config.tracking.uri, home)


def _model(config: Config) -> nn.Module:
    model = targets.build("model", config.model)
    if not isinstance(model, nn.Module):
        raise targets.described("model", config.model, model, "a torch.nn.Module, or a function that returns one,")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ConfigError("model._target_", config.model["_target_"], "gave a model without trainable weights")
    if config.run.init_from is not None:
        weights.load_into(model, Path(config.run.init_from))
    return model


def _spread(model: nn.Module, config: Config, world: World) -> str:
    """Do with the blocks of a model what is asked for; say how it is spread over the processes, if it is."""
    asked = config.accelerate
    if asked.activation_checkpointing:
        log.info("%s", sharding.recompute(model, asked.blocks))
    if not asked.fsdp:
        return ""
    if world.size == 1:
        log.info("accelerate.fsdp: there is one process, which holds everything")
        return ""
    return sharding.shard(model, asked.blocks, world.device, world.size)


def _drill(config: Config, incidents: IncidentLog) -> Drill | None:
    faults, history = parse(config.drill, steps=config.run.steps), incidents.run_history
    fired, details = history.note_drill_fired, history.note_drill_details
    return Drill(faults, has_fired=history.has_fired, fired=fired, about=details) if faults else None


def _objective(node: dict[str, Any], device: torch.device) -> Any:
    if inspect.isclass(targets.find("objective._target_", node.get("_target_"))):
        node = {**node, "_partial_": False}  # an object whose __call__ is the objective
    objective = targets.build("objective", node)
    if not callable(objective):
        raise targets.described("objective", node, objective, "a callable (model, batch) -> loss")
    if isinstance(objective, nn.Module):
        if any(weight.requires_grad for weight in objective.parameters()):
            why = "has weights of its own, which nobody would train: put them into the model"
            raise ConfigError("objective._target_", node["_target_"], why)
        objective = objective.to(device)
    try:
        inspect.signature(objective).bind("model", "batch")
    except TypeError as error:
        why = f"cannot be called as (model, batch) -> loss: {error}"
        raise ConfigError("objective._target_", node["_target_"], why) from error
    except ValueError:
        pass  # some built-ins do not tell their signature
    return objective


def _collate(named: Any) -> Collate:
    if named is None:
        return default_collate
    if isinstance(named, str):
        collate = targets.find("data.collate", named)
    else:
        collate = targets.build("data.collate", named)
    if not callable(collate):
        raise ConfigError("data.collate", named, f"is a {type(collate).__name__}: a callable (rows) -> batch is wanted")
    return collate  # type: ignore[no-any-return]


def _optimizers(node: dict[str, Any], model: nn.Module) -> list[Optimizer]:
    """Build one optimizer over parameter groups, or whatever a function of the model returns."""
    no_decay = node.get("no_decay") or []
    node = {key: value for key, value in node.items() if key != "no_decay"}
    target = targets.check("optimizer", node, given=1)
    given = model if _first_parameter(target) == "model" else parameter_groups(model, no_decay=no_decay)
    built = targets.build("optimizer", node, given)
    optimizers = list(built) if isinstance(built, list | tuple) else [built]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise targets.described("optimizer", node, optimizer, "a torch.optim.Optimizer")
    return optimizers


def _schedule(node: dict[str, Any], optimizer: Optimizer) -> Schedule:
    warmup_steps = node.get("warmup_steps", 0)
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ConfigError("schedule.warmup_steps", warmup_steps, "must be a whole number of at least 0")
    target = targets.find("schedule._target_", node.get("_target_"))
    if not (callable(target) and "warmup_steps" in _parameters(target)):
        node = {key: value for key, value in node.items() if key != "warmup_steps"}
    targets.check("schedule", node, given=1)
    factory = targets.build("schedule", {**node, "_partial_": True})
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            "schedule._target_", node["_target_"], "moves the rate lr, which this optimizer does not have"
        )
    if target is ReduceLROnPlateau:
        raise ConfigError("schedule._target_", node["_target_"], "follows a metric, not the step, and is not supported")
    moves_groups = (inspect.isclass(target) and issubclass(target, LRScheduler)) or _first_parameter(
        target
    ) == "optimizer"
    try:
        if moves_groups:
            return ShadowSchedule(optimizer, factory, warmup_steps)
        schedule = CurveSchedule([group["lr"] for group in optimizer.param_groups], factory, warmup_steps)
        schedule.settings(0)
        return schedule
    except Exception as error:
        raise ConfigError("schedule._target_", node["_target_"], f"failed with {in_one_line(error)}") from error


def _first_parameter(target: Any) -> str | None:
    return next(iter(_parameters(target)), None)


def _parameters(target: Any) -> list[str]:
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return []


def _spoken(count: int) -> str:
    return f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count:,}"
