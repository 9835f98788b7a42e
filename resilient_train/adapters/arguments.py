"""What people bring to a guard, fitted to what the rooms take."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, default_collate

from resilient_train.adapters.place import Place, place
from resilient_train.adapters.rates import schedules
from resilient_train.adapters.speech import log_to_stderr, warn_if_unused
from resilient_train.checkpoint.writer import DiskConfig
from resilient_train.data import build
from resilient_train.data.rows import Collate, change, fingerprint
from resilient_train.data.samples import Samples, Slicing
from resilient_train.data.sequential import LoaderSamples
from resilient_train.errors import ConfigError, TrainError, named_type, require_finite, unusable
from resilient_train.ranks.world import World
from resilient_train.record.incident_log import IncidentLog
from resilient_train.record.quarantine import Quarantine, Quarantined
from resilient_train.recover import policy as policies
from resilient_train.recover.policy import Policy
from resilient_train.state.ring import MemoryConfig
from resilient_train.state.sharded import is_sharded
from resilient_train.update.clip import ClipConfig
from resilient_train.update.objective import Measured
from resilient_train.watch import config as checks_config
from resilient_train.watch.config import ChecksConfig
from resilient_train.wording import log

__all__ = ["Place", "log_to_stderr", "place", "schedules", "warn_if_unused"]


def world(accelerator: Any) -> World:
    """Take the processes as the loop's Accelerator has joined them."""
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator: expected an accelerate.Accelerator, got {named_type(accelerator)}")
    if (engine := str(accelerator.distributed_type.value)) in _ENGINES:
        raise ValueError(f"accelerator: {_ENGINES[engine]}")
    return World(accelerator)


_FSDP1 = (
    "FullyShardedDataParallel keeps weights and gradients in flat pieces that cannot be guarded; FSDP2 is supported: "
    "call torch.distributed.fsdp.fully_shard on the blocks of the model and on the model, and give it without prepare"
)
_ITSELF = "makes its updates itself, where none can be refused, and is not supported yet: use DDP or FSDP2 instead"
_ENGINES = {"DEEPSPEED": f"DeepSpeed {_ITSELF}", "MEGATRON_LM": f"Megatron-LM {_ITSELF}"}
_ENGINES |= {"XLA": "TPUs are not supported yet: use GPUs or CPUs"}
_WRAPPERS = {"torch.distributed.fsdp.fully_sharded_data_parallel": _FSDP1, "deepspeed.": _ENGINES["DEEPSPEED"]}


def bare(model: Any, world: World) -> nn.Module:
    """Take a model out of what Accelerate and torch.compile wrapped around it: its weights have their own names."""
    unwrapped = called(model, world)
    return getattr(unwrapped, "_orig_mod", unwrapped)


def called(model: Any, world: World) -> nn.Module:
    """Take a model out of what replicates it, as it is called: compiled, where it is.

    With several processes it has to be replicated.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {named_type(model)}")
    for kind in {base for one in model.modules() for base in type(one).__mro__}:
        for package, why in _WRAPPERS.items():
            if kind.__module__.startswith(package):
                raise ValueError(f"model: {why}")
    replicates = world.size > 1 and str(world.accelerator.distributed_type.value).startswith("MULTI_")
    is_one = any(map(is_sharded, model.parameters())) or isinstance(
        getattr(model, "_orig_mod", model), DistributedDataParallel
    )
    if replicates and not is_one:
        why = "each process would train a model of its own: give what accelerator.prepare(model) returns"
        raise ValueError(f"model: it is not prepared for {world.size} processes, so {why}")
    # Of a compiled model that is replicated, Accelerate's would leave the replicas out of the training loop's as well.
    inner = getattr(model, "_orig_mod", model)
    unwrapped: nn.Module = world.accelerator.unwrap_model(inner, keep_fp32_wrapper=True)
    return model if unwrapped is inner else unwrapped


def own_weights(model: nn.Module) -> frozenset[str] | None:
    """The weights that each rank has for itself, of a model that is replicated else; None: it is not replicated."""
    replicated = getattr(model, "_orig_mod", model)
    if not isinstance(replicated, DistributedDataParallel):
        return None
    return frozenset(replicated.parameters_to_ignore)


def objective(given: Any) -> Measured | None:
    """Take a callable `(model, batch) -> loss`, or nothing where the loop makes the loss."""
    if given is None or isinstance(given, Measured):
        return given
    if not callable(given):
        raise TypeError(f"objective: expected a callable (model, batch) -> loss, got {named_type(given)}")
    return Measured(given, getattr(given, "__qualname__", type(given).__name__), key="objective")


def optimizers(given: Any, model: nn.Module) -> list[Optimizer]:
    """Take one optimizer or several, out of Accelerate's wrappers: there a gate is silently ignored."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    if not several:
        raise ValueError("optimizer: the list is empty")
    unwrapped = [one.optimizer if isinstance(one, AcceleratedOptimizer) else one for one in several]
    for one in unwrapped:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer or a list of them, got {named_type(one)}")
        if _needs_closure(one):
            why = "its step computes the loss again, several times an update, which no gate can refuse"
            raise TypeError(f"optimizer: {type(one).__name__} is not supported: {why}")
    known = {id(weight) for weight in model.parameters()}
    for one in unwrapped:
        strangers = sum(id(weight) not in known for group in one.param_groups for weight in group["params"])
        if strangers:
            what = f"{strangers} of the weights that {type(one).__name__} trains are not the model's"
            why = (
                "they would not rewind: put all modules that are trained into one nn.Module, and give that as the model"
            )
            raise ValueError(f"optimizer: {what}, so {why}")
    return unwrapped


def _needs_closure(optimizer: Optimizer) -> bool:
    """Say whether `step()` cannot be called without one; None is the closure of all others."""
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.default is inspect.Parameter.empty and one.kind in plain for one in arguments)


def given(optimizers: Iterable[Optimizer], **more: Any) -> dict[str, Any]:
    """What a person compares loops by: what is plain of it."""
    first = next(iter(optimizers))
    group: dict[str, Any] = first.param_groups[0] if first.param_groups else {}
    rate = group.get("initial_lr", group.get("lr"))
    told = {"optimizer": type(first).__name__, "lr": rate if rate is None else float(rate), **more}
    return {name: str(one) if isinstance(one, Path) else one for name, one in told.items() if isinstance(one, _PLAIN)}


_PLAIN = (str, int, float, Path)


def batch_size(given: int | None, data: Any, world: World) -> int:
    """Take the number of rows in a batch; loaders bring their own."""
    own = None
    if is_foreign(data):
        over_all = getattr(data, "total_batch_size", None)  # of a loader that Accelerate has prepared
        own = over_all // world.size if isinstance(over_all, int) else getattr(data, "batch_size", None)
        own = own if isinstance(own, int) and own > 0 else None
        if given is None:
            return own or 1
    if given is None:
        raise TypeError("batch_size: missing: rows per process and micro-batch")
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise unusable("batch_size", f"{given!r} is no whole number of at least 1")
    if own is not None and given != own:
        raise ConfigError("batch_size", given, f"the loader makes batches of {own} rows itself: leave batch_size out")
    return given


def is_foreign(data: Any) -> bool:
    """Say whether these are batches of somebody else's loader rather than rows of a data set."""
    if hasattr(data, "next_update"):
        return False
    return isinstance(data, DataLoader) or not (hasattr(data, "__getitem__") or hasattr(data, "state_dict"))


def samples(
    given: Any,
    slicing: Slicing,
    *,
    seed: int,
    shuffle: bool,
    num_workers: int,
    collate: Collate | None,
    device: torch.device,
) -> tuple[Samples, str | None]:
    """Put a cursor into a data set, or take a loader as it is and say what that costs."""
    if hasattr(given, "next_update"):
        return given, None
    if is_foreign(given):
        if not isinstance(given, Iterable):
            raise TypeError(f"data: expected a data set or a loader, got {named_type(given)}")
        told = "data: this loader is not ours and does not rewind: after a rewind come the batches that come next"
        return LoaderSamples(given, slicing, seed=seed, device=device), told
    if isinstance(given, str | bytes):
        raise TypeError(f"data: expected a data set or a loader, got {named_type(given)}")
    name = type(given).__name__
    config = build.DataConfig({"_target_": name}, slicing.batch_size, None, shuffle, num_workers)
    try:
        fitted = build.samples(
            *(given, config, slicing),
            seed=seed,
            collate=collate or default_collate,
            pin_memory=device.type == "cuda",
        )
    except ConfigError as error:  # worded for a configuration; here the argument is called data
        value = error.value if error.key.endswith("num_workers") else name
        raise ConfigError("num_workers" if value is not name else "data", value, error.why) from error
    return fitted, None


def steps(given: int | None) -> int | None:
    """Take a number of updates, or none."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
        raise unusable("steps", f"{given!r} is no number of updates, from 0")
    return given


def steps_per_epoch(samples: Samples, slicing: Slicing) -> int:
    """How many updates it takes to see all the data once."""
    counted: Any = getattr(samples, "loader", None) or getattr(samples, "dataset", ())
    try:
        count = samples.rows or len(counted)
    except TypeError:
        why = "this data has no len(), so the length of one is not known: use guard.batches(n)"
        raise TrainError(f"epochs: {why}") from None
    return -(-count // (slicing.accumulation if isinstance(samples, LoaderSamples) else slicing.samples)) or 1


def clipping(given: ClipConfig | float | None) -> ClipConfig:
    """Take a whole configuration, a norm, or nothing: no clipping."""
    if isinstance(given, ClipConfig):
        return given
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or not given > 0):
        raise unusable("clip", f"{given!r} is no number above 0, the norm to clip gradients to")
    return ClipConfig(max_norm=given, max_value=None)


def keepable(name: str, item: Any, *, has_begun: bool) -> None:
    """Raise where something cannot rewind along."""
    lacks = [verb for verb in ("state_dict", "load_state_dict") if not callable(getattr(item, verb, None))]
    if lacks:
        raise TypeError(
            f"keep({name}=...): a {type(item).__name__} has no {' and no '.join(lacks)}, so it cannot rewind"
        )
    if has_begun:
        raise TrainError(f"keep({name}=...): the run has begun, and its first state is kept without it: keep it before")


def disk(given: DiskConfig | int | None) -> DiskConfig:
    """Take a whole configuration, or a number of updates; nothing: no checkpoints before the end."""
    if isinstance(given, DiskConfig):
        return given
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
        raise unusable("disk", f"{given!r} is no number of updates, from 0")
    return DiskConfig(every=given or 0)


def same_data(samples: Samples, incidents: IncidentLog, world: World, given: str, *, key: str) -> bool:
    """Refuse to resume on data that changed under its name, unless that is accepted; say whether it is.

    `key` is what the setting is called where it was given.
    """
    if given not in ("refuse", "accept"):
        raise ConfigError(key, given, "is not refuse or accept")
    if not samples.rows:
        return False

    def changed() -> str:
        dataset = samples.dataset  # type: ignore[attr-defined]
        sample = incidents.run_history.data_sample
        how = change(sample, dataset) if sample is not None else ""
        if how and incidents.run_history.has_saved and given == "refuse":
            why = f"{how}: give the run its own data, or begin another run; {key}=accept resumes with the data as it is"
            raise unusable("data", f"the data set changed since the run began: {why}")
        return how

    if how := world.on_main(changed):
        log.warning("data: the data set changed since the run began, and is taken as it is: %s", how)
        incidents.run_history.data_sample = None  # it is sampled again
    return bool(how)


def quarantine(
    given: str | Path | None,
    samples: Samples,
    directory: Path | None,
    world: World,
    *,
    key: str,
    data_may_differ: bool = False,
) -> Quarantine:
    """Recall which rows the run has in quarantine, take up a list that is given, and keep the data free of them.

    `key` is what the place is called where the list was given.
    """
    if given is not None and not samples.rows:
        raise ConfigError(key, given, "names rows by their index, and the rows of this data have none")
    if not samples.rows:
        return Quarantine(None, dict)

    listed = Quarantine(None, dict)

    def recalled() -> tuple[dict[int, Quarantined], int]:
        nonlocal listed
        dataset = samples.dataset  # type: ignore[attr-defined]
        listed = Quarantine(directory, lambda: fingerprint(dataset), data_may_differ=data_may_differ)
        if given is not None:
            listed.load(Path(given), key)
        return dict(listed.rows), listed.given

    rows, given_rows = world.on_main(recalled)  # what it complains of there is raised everywhere
    listed.adopt(rows)
    listed.given = given_rows
    samples.quarantine(rows)
    return listed


def policy(given: Policy | Mapping[str, Any] | str | Path) -> Policy:
    """Take a policy, its tree, the name of one that comes with the package, or a YAML file."""
    if isinstance(given, Policy):
        return given
    return policies.parse(given) if isinstance(given, Mapping) else policies.named(str(given))


def check(run_dir: str | Path | None, /, **given: Any) -> None:
    """Refuse what a guard cannot work with, by the name of the argument: NaN, infinities, checkpoints to nowhere."""
    if run_dir is None and disk(given["disk"]).every:
        raise unusable("disk", "needs a run_dir: checkpoints are written there")
    expect("memory", given["memory"], MemoryConfig)
    for name, value in given.items():
        is_config = isinstance(value, ClipConfig | MemoryConfig | DiskConfig | ChecksConfig)
        require_finite(name, asdict(value) if is_config else value)


def expect(name: str, given: Any, kind: type) -> None:
    """Raise where an argument is neither of a kind nor None."""
    if not isinstance(given, kind | None):
        raise TypeError(f"{name}: expected a {kind.__name__}, got {named_type(given)}")


def checks(given: ChecksConfig | Mapping[str, Any] | str) -> ChecksConfig:
    """Take checks, all their values, or the name of a set that comes with the package."""
    if isinstance(given, ChecksConfig):
        return given
    if not isinstance(given, Mapping | str):
        raise TypeError(f"checks: expected the name of a set of checks, got {named_type(given)}")
    return checks_config.named(given) if isinstance(given, str) else checks_config.checks_from(dict(given))


def hold_on_to_memory(device: torch.device) -> None:
    """Keep glibc from giving memory back after every backward, to take it again page by page: 4 ms of a 110 ms step.

    It adapts its thresholds to the largest block that was ever given back, up to this size.
    """
    if device.type == "cpu":
        torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)


def cautions(
    samples: Samples, disk: DiskConfig, memory: MemoryConfig | None, waits: Iterable[str], *, has_objective: bool
) -> Iterator[str]:
    """Say what a loop does without. `waits` are optimizers that the gate has to wait for."""
    if 0 < samples.rows < samples.slicing.samples:
        many = f"an update takes {samples.slicing.samples:,} rows, and the data set has {samples.rows:,}"
        yield f"data: {many}: each update takes rows more than once"
    if disk.every and memory is not None and not memory.every:
        yield "checkpoints come from snapshots in memory, and there are none: one is left at the end"
    if waiting := " and ".join(waits):
        yield f"{waiting}: not fused, so each step waits for the device; use fused=True where it is to be had"
    if not has_objective:
        yield "guard.update cannot replay a step, so diagnosis is limited; pass objective= for the full one"
