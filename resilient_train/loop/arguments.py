"""The arguments of a guard, checked and converted to what the engine takes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from inspect import isgeneratorfunction
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, patch_environment
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, default_collate
from yaml import YAMLError

from resilient_train.core.checks import Check, Checks, ChecksConfig
from resilient_train.core.loss import Level
from resilient_train.core.policy import Policy, parse
from resilient_train.core.remedies import KNOWN
from resilient_train.core.tree import is_sharded
from resilient_train.core.updater import Schedule
from resilient_train.data import build
from resilient_train.data.history import BestLevel
from resilient_train.data.rows import Collate
from resilient_train.data.samples import Samples, Slicing
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.extensions import Extension, load
from resilient_train.ground.errors import ConfigError, in_one_line, named_type, unusable
from resilient_train.ground.files import conf, load_yaml
from resilient_train.ground.reader import ClipConfig, DiskConfig, checked, merged, option, read
from resilient_train.ground.wording import counted, log
from resilient_train.loop import rows_of_loader
from resilient_train.loop.schedule import CurveSchedule, LoopSchedule, ShadowSchedule
from resilient_train.processes.world import World

_FSDP1 = (
    "FullyShardedDataParallel keeps weights and gradients in flat pieces that cannot be guarded; FSDP2 is supported: "
    "call torch.distributed.fsdp.fully_shard on the blocks of the model and on the model, and give it without prepare"
)
_ITSELF = "makes its updates itself, so that none can be refused, and is not supported yet: use DDP or FSDP2 instead"
_ENGINES = {"DEEPSPEED": f"DeepSpeed {_ITSELF}", "MEGATRON_LM": f"Megatron-LM {_ITSELF}"}
_ENGINES |= {"XLA": "TPUs are not supported yet: use GPUs or CPUs"}
TRAINERS = (
    "a Hugging Face Trainer is guarded by resilient_train.hf.guard(trainer), Lightning's by "
    "callbacks=[resilient_train.lightning.Guarded()]"
)

_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "batch_size": (int | None, {"at_least": 1}),
    "clip": (float | None, {"above": 0}),
    "steps": (int | None, {"at_least": 0}),
}


def check_settings(**given: Any) -> None:
    """Raise if a number is of a wrong type or out of its limits; `given` has them by the names of the arguments."""
    for name, value in given.items():
        if name in _KINDS and not isinstance(value, ClipConfig):
            kind, limits = _KINDS[name]
            checked(name, value, kind, {**limits, "as_is": True})


def accelerator(given: Any, model: Any, accumulate: int = 1, scaler: Any = None) -> Any:
    """None is a loop of plain PyTorch, on the device of its model."""
    if not isinstance(given, Accelerator | None):
        expected = "expected an accelerate.Accelerator, or None for a loop of plain PyTorch"
        raise TypeError(f"accelerator: {expected}, got {named_type(given)}; {TRAINERS}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {named_type(model)}; {TRAINERS}")
    if given is not None:
        if accumulate > 1 or scaler is not None:
            name = "accumulate" if accumulate > 1 else "scaler"
            raise unusable(name, "is for a loop of plain PyTorch: the Accelerator has its own")
        return given
    weights = sorted(model.parameters(), key=lambda one: not one.requires_grad)  # frozen ones may be on another device
    made = PlacedAccelerator(weights[0].device if weights else torch.device("cpu"), accumulate)
    made.scaler = scaler if scaler is not None and scaler.is_enabled() else None
    return made


class PlacedAccelerator(Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """An Accelerator on the device of a model, in the processes that a launcher has started."""

    def __init__(self, device: torch.device, accumulate: int) -> None:
        self._placed = device
        if device.type == "cuda" and distributed.is_initialized():
            torch.cuda.set_device(device)  # where NCCL's collectives of objects put them
        # Accelerate would take the device whose number is the local rank. What it takes first is kept in the process.
        with patch_environment(ACCELERATE_TORCH_DEVICE=device):
            is_cpu = device.type == "cpu" and not PartialState._shared_state
            super().__init__(cpu=is_cpu, gradient_accumulation_steps=accumulate)

    @property
    def device(self) -> torch.device:
        return self._placed


def world(accelerator: Any) -> World:
    if (engine := str(accelerator.distributed_type.value)) in _ENGINES:
        raise ValueError(f"accelerator: {_ENGINES[engine]}")
    if engine == "FSDP" and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) == 1:
        raise ValueError(f"accelerator: {_FSDP1}")
    known, joined = accelerator.num_processes, distributed.get_world_size() if distributed.is_initialized() else 1
    if known < joined:
        what = f"torch.distributed has {joined} processes, and Accelerate knows {known}"
        raise ValueError(f"accelerator: {what}: start them with torchrun or accelerate launch")
    return World(accelerator)


def unwrapped(model: nn.Module, world: World) -> nn.Module:
    """Unwrap a model from what replicates it over processes, but not from torch.compile."""
    if any(type(one).__name__ == "FullyShardedDataParallel" for one in model.modules()):
        raise ValueError(f"model: {_FSDP1}")
    if type(model).__module__.startswith("deepspeed."):
        raise ValueError(f"model: {_ENGINES['DEEPSPEED']}")
    inner = getattr(model, "_orig_mod", model)
    replicated = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    synchronized = {id(weight) for one in replicated for weight in one.parameters()}
    is_prepared = any(map(is_sharded, model.parameters())) or all(
        id(one) in synchronized for one in model.parameters() if one.requires_grad
    )
    if world.size > 1 and str(world.accelerator.distributed_type.value).startswith("MULTI_") and not is_prepared:
        how = "give accelerator.prepare(model) or DistributedDataParallel(model)"
        raise ValueError(f"model: it is not prepared for {world.size} processes, each would train its own: {how}")
    # unwrap_model on a compiled DDP model would also strip DDP from the caller's model.
    bare: nn.Module = world.accelerator.unwrap_model(inner, keep_fp32_wrapper=True)
    if bare is not inner or not replicated:
        return model if bare is inner else bare
    # Networks that were prepared one by one: their weights have the names that they have in one process.
    bare = copy.copy(inner)
    bare._modules = inner._modules.copy()
    for name, one in inner.named_children():
        bare._modules[name] = world.accelerator.unwrap_model(getattr(one, "_orig_mod", one), keep_fp32_wrapper=True)
    return bare


def optimizers(given: Any, model: nn.Module) -> list[Optimizer]:
    """Unwrap one optimizer or several from Accelerate's wrappers, which would silently bypass the gate."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    unwrapped = [one.optimizer if isinstance(one, AcceleratedOptimizer) else one for one in several]
    known = {id(weight) for weight in model.parameters()}
    for one in unwrapped:
        name = type(one).__name__
        if not isinstance(one, Optimizer) or isinstance(one, LBFGS):  # which computes the loss again, past any gate
            expected = "expected a torch.optim.Optimizer but LBFGS, or a list of them"
            raise TypeError(f"optimizer: {expected}, got {named_type(one)}; {TRAINERS}")
        if unknown := sum(id(weight) not in known for group in one.param_groups for weight in group["params"]):
            what = f"{unknown} of the weights that {name} trains are not the model's, so they would not rewind"
            raise ValueError(f"optimizer: {what}: put all trained modules into one nn.Module, and give it as the model")
    return unwrapped


def batch_size(given: int | None, data: Any, world: World) -> int:
    own = None
    if is_loader(data):
        over_all = getattr(data, "total_batch_size", None)  # of a loader that Accelerate has prepared
        own = over_all // world.size if isinstance(over_all, int) else getattr(data, "batch_size", None)
        own = own if isinstance(own, int) and own > 0 else None
        given = given or own or 1
    if given is None:
        raise TypeError("batch_size: missing: rows per process and micro-batch")
    if own is not None and given != own:
        raise ConfigError("batch_size", given, f"the loader makes batches of {own} rows itself: leave batch_size out")
    return given


def is_loader(data: Any) -> bool:
    if hasattr(data, "next_update"):
        return False
    return isinstance(data, DataLoader) or not (hasattr(data, "__getitem__") or hasattr(data, "state_dict"))


def samples(
    given: Any, slicing: Slicing, world: World, seed: int, shuffle: bool, num_workers: int, collate: Collate | None
) -> Samples:
    if hasattr(given, "next_update"):
        return given  # type: ignore[no-any-return]
    if is_loader(given):
        is_function = callable(given) and not isinstance(given, Iterable) and not isgeneratorfunction(given)
        loader = functools.partial(_drawn, given) if is_function else given
        return rows_of_loader.samples_of(loader, world.least, slicing, seed, world.device)
    more: Any = {"seed": seed, "shuffle": shuffle, "num_workers": num_workers, "collate": collate or default_collate}
    return build.samples(given, slicing, world, name=type(given).__name__, **more)


def _drawn(function: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield function()


def steps_per_epoch(samples: Samples) -> int:
    slicing, loader = samples.slicing, getattr(samples, "loader", ())
    if samples.counts_batches:
        return -(-len(loader) // slicing.accumulation) or 1
    return -(-(samples.rows or len(loader)) // slicing.samples) or 1


def schedules(given: Any, optimizers: list[Optimizer]) -> list[Schedule]:
    """`given` is one for all or a list: None, a function `step -> factor`, or a torch scheduler."""
    several = list(given) if isinstance(given, list | tuple) else [given] * len(optimizers)
    return [_schedule(one, optimizer) for one, optimizer in zip(several, optimizers, strict=True)]


def _schedule(given: Any, optimizer: Optimizer) -> Schedule:
    stride = 1
    if isinstance(given, AcceleratedScheduler):
        is_alone = given.split_batches or not given.step_with_optimizer
        given, stride = given.scheduler, 1 if is_alone else int(PartialState().num_processes)
    if isinstance(given, LRScheduler):
        its_own = getattr(given, "optimizer", None)
        if getattr(its_own, "optimizer", its_own) is not optimizer:  # Accelerate wraps it
            several = "give a list with a schedule for each optimizer, in their order, None for a constant rate"
            raise ValueError(f"schedule: this {type(given).__name__} was made for another optimizer; {several}")
        return ShadowSchedule(given, optimizer, stride=stride)
    if isinstance(given, Schedule):
        return given
    if given is None:
        return LoopSchedule(optimizer)
    return CurveSchedule([group["lr"] for group in optimizer.param_groups], given, 0)


def disk(given: DiskConfig | int | None, *, resumes: bool) -> DiskConfig:
    """A run that resumes has to say how often its state is written: a kill would begin it again at step 0."""
    if given is None and resumes:
        raise unusable("resume", "needs disk=, such as disk=200: a checkpoint every 200 updates (0: only at the end)")
    return given if isinstance(given, DiskConfig) else DiskConfig(every=given or 0)


def check_data(samples: Samples, incident_log: IncidentLog, world: World) -> None:
    """Raise ConfigError if the data set has another number of rows than when the run began."""

    def compare() -> None:
        known = incident_log.data_rows
        if incident_log.has_saved and known not in (None, samples.rows):
            counts = f"it has {counted(samples.rows, 'row')}, and had {known:,}"
            why = "give the run its own data, or begin another run"
            raise unusable("data", f"the data set changed since the run began: {counts}: {why}")

    if samples.rows:
        world.on_main(compare)  # which raises an error of rank 0 on all ranks


def policy(given: Policy | Mapping[str, Any] | str | Path) -> Policy:
    if isinstance(given, Policy):
        return given
    load()  # the remedies of extensions are known then
    tree: Any = given
    if not isinstance(given, Mapping):
        path, hint = Path(given), "a custom policy is named by the path of its YAML file"
        try:
            tree = load_yaml(path) if path.suffix in (".yaml", ".yml") else option("recovery", str(given), hint)
        except (OSError, YAMLError) as error:
            raise ConfigError("recovery", path, f"cannot be read: {' '.join(str(error).split())}") from error
    try:
        return parse(tree)
    except ConfigError:  # a policy of the package may name what is not installed here
        if not any(tree == option("recovery", file.stem) for file in (conf() / "recovery").glob("*.yaml")):
            raise
    absent: set[str] = set()
    ladders = {cause: _without_absent(rungs, absent) or [] for cause, rungs in tree["ladders"].items()}
    log.info("recovery: no extension for %s: left out", ", ".join(sorted(absent)))
    return parse({**tree, "ladders": ladders})


def _without_absent(node: Any, absent: set[str]) -> Any:
    """Return a part of a ladder without remedies that are not installed, or None; their names are added to `absent`."""
    if isinstance(node, str):
        absent |= {node} - KNOWN.keys()
        return node if node in KNOWN else None
    if not isinstance(node, Mapping):
        return [known for one in node if (known := _without_absent(one, absent))] or None
    if "do" in node:
        known = _without_absent(node["do"], absent)
        return known and {**node, "do": known}
    (name,) = node
    return node if _without_absent(name, absent) else None


def checks(given: Any, expect: Sequence[int] = (), kinds: Iterable[type[Extension]] = ()) -> Any:
    """Convert the name of a set in the package, or settings over those of the default set; add steps to `expect`."""
    if isinstance(given, str):
        given = option("checks", given)
    if isinstance(given, Mapping):
        given = read_checks(merged(option("checks", "default"), given), kinds=kinds)
    return replace(given, expect=[*given.expect, *expect])


def backward(accelerator: Any) -> Callable[[torch.Tensor], None]:
    """Return the backward of the Accelerator: it divides the loss by the micro-batches of an update, which may be 1."""
    own, is_plain = accelerator.backward, accelerator.distributed_type == DistributedType.NO and not accelerator.scaler

    def run(loss: torch.Tensor) -> None:
        if is_plain and accelerator.gradient_accumulation_steps == 1:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            own(loss)

    return run


def checks_config(kinds: Iterable[type[Extension]] = ()) -> type[ChecksConfig]:
    """Return the dataclass of `checks`: what the core has, and what extensions add, also `kinds` of one guard."""
    further = [
        (name, settings, field(default_factory=settings))
        for kind in dict.fromkeys([*load(), *kinds])
        for name, settings in kind.settings.items()
    ]
    return make_dataclass("ChecksConfig", further, bases=(ChecksConfig,), kw_only=True)


def read_checks(tree: Any, key: str = "checks", kinds: Iterable[type[Extension]] = ()) -> Any:
    """Read the settings of all checks. Those that are shipped for an extension that is not there are left out."""
    config = checks_config(kinds)
    known = {one.name for one in fields(config)}
    if isinstance(tree, Mapping):
        shipped = option("checks", "default").keys() - known
        tree = {name: value for name, value in tree.items() if name not in shipped}
    return read(config, tree, key)


_OF_THE_CORE = ("level", "grad_limit", "jump", "episode", "refusals")


class Shielded:
    """A check of another package: an error in it turns it off, as it is no reason to end a run."""

    def __init__(self, check: Check) -> None:
        self._check = self._own = check

    def __getattr__(self, name: str) -> Any:
        check = self._own if name in ("state_dict", "persistent_state") else self._check  # a later process may mend it
        found = getattr(check, name)

        def asked(*given: Any, **named: Any) -> Any:
            try:
                return found(*given, **named)
            except Exception as error:  # on all ranks: they ask it with the same numbers
                log.error("the check %s failed, and is off from here: %s", type(check).__name__, in_one_line(error))
                self._check = Check()  # which says nothing
                return getattr(self._check, name)(*given, **named)

        return asked if callable(found) else found


def all_checks(config: Any, extensions: Sequence[Extension]) -> tuple[Checks, BestLevel]:
    """Make the checks of a run. The best level is asked by others, too."""
    best, level = BestLevel(config.jump), Level(config.jump)
    further: dict[str, Any] = {"best": best}
    for one in extensions:
        for name, check in one.checks(config).items():
            if name in (*further, *_OF_THE_CORE):
                raise unusable(f"extension {type(one).__name__}", f"there is another check with the name {name}")
            is_ours = type(check).__module__.startswith("resilient_train.")
            further[name] = check if is_ours else Shielded(check)
    return Checks(config, level, **further), best
