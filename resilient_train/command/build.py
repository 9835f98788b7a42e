"""From a checked configuration to a run, and its loop, read from top to bottom."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import default_collate

from resilient_train.command.config import Config, compose
from resilient_train.core.randomness import Purpose, mix, preserved, seed_all
from resilient_train.core.updater import Schedule
from resilient_train.data import build as data
from resilient_train.data.build import Evaluation
from resilient_train.data.rows import Collate
from resilient_train.data.samples import Slicing
from resilient_train.durable import store as weights
from resilient_train.durable.resume import Resume
from resilient_train.extensions import load
from resilient_train.ground.errors import ConfigError, in_one_line, unusable
from resilient_train.ground.reader import checked, find
from resilient_train.ground.wording import counted, duration, log
from resilient_train.loop.guard import Guard
from resilient_train.loop.reporter import Place
from resilient_train.loop.schedule import CurveSchedule, ShadowSchedule
from resilient_train.parts.run import Measured
from resilient_train.processes.world import World, recompute, shard


@dataclass
class Run:
    config: Config
    world: World
    model: nn.Module  # as prepared by Accelerate
    bare_model: nn.Module  # the user's own
    objective: Measured
    guard: Guard
    evaluation: Evaluation | None
    stop: Callable[[], bool]  # asked before each update
    beat: Callable[[], None]  # called whenever the run makes progress
    evaluated_at: int | None = None  # step

    def evaluates_at(self, step: int) -> bool:
        return bool(self.config.run.eval_every) and step % self.config.run.eval_every == 0

    def state_dict(self) -> dict[str, Any]:
        """Return what does not rewind, and is restored by a resume."""
        return {"evaluated": self.guard.reporter.evaluated, "evaluated_at": self.evaluated_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.guard.reporter.evaluated, self.evaluated_at = state["evaluated"], state["evaluated_at"]

    def close(self) -> None:
        self.guard.let_go()
        if self.evaluation is not None:
            self.evaluation.close()

    def __str__(self) -> str:
        count = sum(weight.numel() for weight in self.bare_model.parameters())
        rows = counted(self.guard.samples.slicing.samples, "row")
        return f"{type(self.bare_model).__name__} with {count:,} weights, {rows} to an update"


def assemble(
    config: Config,
    world: World,
    home: Place,
    resume: Resume | bool = False,
    stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
) -> Run:
    """Build everything that a configuration names, for a run that writes to `home`."""
    seed = config.run.seed
    seed_all(mix(Purpose.INITIAL_WEIGHTS, seed), world.device)
    objective = objective_of(config, world.device)
    slicing = Slicing(config.data.batch_size, config.accelerate.gradient_accumulation_steps, world.rank, world.size)
    collate = collate_of(config)
    rows = compose.build("data.train", config.data.train)
    configured = [kind for kind in load() if kind.node]
    if config.drill.get("faults") and not any(kind.node == "drill" for kind in configured):
        raise unusable("drill", "no extension for drills is installed")
    extensions = [kind.configured(getattr(config, kind.node), config.run.steps) for kind in configured]
    for one in extensions:
        rows = one.wrapped(rows)
    samples = data.samples(
        *(rows, slicing, world),
        seed=seed,
        collate=collate,
        shuffle=config.data.shuffle,
        num_workers=config.data.num_workers,
        name=config.data.train["_target_"],
        key="data.train._target_",
    )
    evaluation = None
    if config.data.eval and config.data.eval.get("_target_"):
        dataset = compose.build("data.eval", config.data.eval)
        evaluation = data.Evaluation(dataset, config.data, slicing, seed=seed, collate=collate)
    model = model_of(config)
    is_sharded = config.accelerate.fsdp and world.size > 1
    if config.accelerate.activation_checkpointing:
        log.info("%s", recompute(model, config.accelerate.blocks))
    if is_sharded:
        log.info("%s", shard(model, config.accelerate.blocks, world.device, world.size))
    elif config.accelerate.fsdp:
        log.info("accelerate.fsdp: there is one process, which holds everything")
    optimizers = _optimizers(config.optimizer, model)
    schedules = [_schedule(config.schedule, optimizer) for optimizer in optimizers]
    if config.accelerate.compile:
        model.compile()  # in place: torch.compile() would prefix every name with _orig_mod.
    if is_sharded:  # and so not to be wrapped in DDP
        prepared = world.accelerator.prepare_model(model, evaluation_mode=True)
    else:
        prepared, *_ = world.accelerator.prepare(model, *optimizers)
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
        disk=config.checkpoint.disk,
        extensions=extensions,
        home=home,
        resume=resume,
        stop=stop,
        beat=beat,
    )
    run = Run(config, world, prepared, model, objective, guard, evaluation, stop, beat)
    guard.remember("run", run)
    return run


def model_of(config: Config) -> nn.Module:
    model = compose.build("model", config.model)
    if not isinstance(model, nn.Module):
        raise compose.wrong_kind("model", config.model, model, "a torch.nn.Module, or a function that returns one")
    if config.run.init_from is not None:
        weights.load_into(model, Path(config.run.init_from))
    return model


def objective_of(config: Config, device: torch.device) -> Measured:
    node = config.objective
    if inspect.isclass(find("objective._target_", node.get("_target_"))):
        node = {**node, "_partial_": False}  # an object whose __call__ is the objective
    objective = compose.build("objective", node)
    if not callable(objective):
        raise compose.wrong_kind("objective", node, objective, "a callable (model, batch) -> loss")
    if isinstance(objective, nn.Module):
        if any(weight.requires_grad for weight in objective.parameters()):
            why = "has weights of its own, which would not be trained: put them into the model"
            raise ConfigError("objective._target_", node["_target_"], why)
        objective = objective.to(device)
    try:
        with suppress(ValueError):  # some built-ins have no signature
            inspect.signature(objective).bind("model", "batch")
    except TypeError as error:
        why = f"cannot be called as (model, batch) -> loss: {error}"
        raise ConfigError("objective._target_", node["_target_"], why) from error
    return Measured(objective, node["_target_"])


def collate_of(config: Config) -> Collate:
    node = config.data.collate
    if node is None:
        return default_collate
    collate = find("data.collate", node) if isinstance(node, str) else compose.build("data.collate", node)
    if not callable(collate):
        raise ConfigError("data.collate", node, "is no callable (rows) -> batch")
    return collate  # type: ignore[no-any-return]


def _optimizers(node: dict[str, Any], model: nn.Module) -> list[Optimizer]:
    """Build one optimizer over parameter groups, or call a function of the model that returns one or several."""
    no_decay = node.get("no_decay") or []
    node = {key: value for key, value in node.items() if key != "no_decay"}
    target = compose.check_target("optimizer", node, given=1)
    takes_model = next(iter(inspect.signature(target).parameters), None) == "model"
    built = compose.build("optimizer", node, model if takes_model else parameter_groups(model, no_decay=no_decay))
    optimizers = list(built) if isinstance(built, list | tuple) else [built]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise compose.wrong_kind("optimizer", node, optimizer, "a torch.optim.Optimizer")
    return optimizers


def _schedule(node: dict[str, Any], optimizer: Optimizer) -> Schedule:
    warmup_steps = checked("schedule.warmup_steps", node.get("warmup_steps", 0), int, {"at_least": 0})
    key, path = "schedule._target_", node.get("_target_")
    without = {key: value for key, value in node.items() if key != "warmup_steps"}
    target = compose.check_target("schedule", without, given=1)
    parameters = list(inspect.signature(target).parameters)
    if "warmup_steps" not in parameters:
        node = without
    factory = compose.build("schedule", {**node, "_partial_": True})
    if target is ReduceLROnPlateau:
        raise ConfigError(key, path, "follows a metric, not the step, and is not supported")
    is_torchs = inspect.isclass(target) and issubclass(target, LRScheduler)
    try:
        if is_torchs or parameters[:1] == ["optimizer"]:
            return ShadowSchedule(factory(optimizer), optimizer, warmup_steps)
        schedule = CurveSchedule([group["lr"] for group in optimizer.param_groups], factory, warmup_steps)
        schedule.settings(0)
        return schedule
    except Exception as error:
        raise ConfigError(key, path, f"failed with {in_one_line(error)}") from error


def parameter_groups(model: nn.Module, *, no_decay: Sequence[str]) -> list[dict[str, Any]]:
    """`no_decay` has patterns of names; `1d` stands for biases and norms, which have fewer than two dimensions."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            is_exempt = any((rule == "1d" and weight.ndim < 2) or fnmatch(name, rule) for rule in no_decay)
            groups[1 if is_exempt else 0]["params"].append(weight)
    return [group for group in groups if group["params"]]


def train(run: Run) -> None:
    """Make updates until `run.steps` of them are accepted, or a request to stop; evaluate meanwhile and at the end."""
    settings, guard = run.config.run, run.guard
    run.model.train()
    for batch in guard.batches():
        attempted = guard.step(batch)
        run.beat()
        if not attempted:
            continue  # gradients accumulate, or an incident dropped the update
        if guard.newest and guard.newest.accepted and guard.newest.step % settings.log_every == 0:
            report(run)
        if run.evaluates_at(guard.attempted_step) and guard.settle():
            report(run)
            evaluate_and_report(run)
    report(run)
    if not guard.stopped and run.evaluated_at != guard.clock.step:
        evaluate_and_report(run)


def report(run: Run) -> None:
    if (values := run.guard.report()) is None:
        return
    step, steps = values["step"], run.config.run.steps
    own = {name.removeprefix("train/"): one for name, one in values.items() if name.startswith("train/")}
    more = "".join(f"  {name} {one:.4g}" for name, one in own.items() if math.isfinite(one))
    left_s = 1e-3 * values.get("step_ms", 0.0) * (steps - step)
    numbers = f"loss {values['loss']:.4f}{more}  grad {values['grad_norm']:.3g}  lr {values['lr']:.2e}"
    log.info("step %d/%d  %s  %s left", step, steps, numbers, duration(left_s))
    run.guard.reporter.show(values)


def evaluate_and_report(run: Run) -> None:
    """Evaluate, if there is an evaluation set; a request to stop may end it early."""
    if run.evaluation is None or not (found := evaluate(run)):
        return
    run.evaluated_at = run.guard.clock.step
    run.guard.evaluated(found)
    results = "  ".join(f"{name} {value:.4g}" for name, value in found.items())
    log.info("evaluation after step %d: %s", run.guard.clock.step, results)


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Return the mean over all rows and ranks of the loss and of the objective's metrics; {} if it was stopped."""
    assert run.evaluation is not None
    sums: dict[str, torch.Tensor] = {}  # of each metric and of the rows that have it
    run.model.eval()
    with preserved(run.world.device):  # training continues with the random numbers as if there was no evaluation
        for batch, weight in run.evaluation.batches():
            run.beat()
            if run.world.size == 1 and run.stop():  # several processes would each stop at another batch
                run.model.train()
                run.guard.stop_now()  # the run is not complete without its evaluation
                return {}
            loss, metrics = run.objective(run.model, run.world.on_device(batch))
            for name, value in {"loss": loss, **metrics}.items():
                part = torch.as_tensor(value, dtype=torch.float32, device=run.world.device)
                sums[name] = sums.get(name, 0) + weight * torch.stack([part, torch.ones_like(part)])
    run.model.train()
    run.guard.reporter.start_lap()  # the time of a step does not include an evaluation
    return run.world.weighted_means({name: one.tolist() for name, one in sums.items()})
