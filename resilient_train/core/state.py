"""The one list of all that rewinds. Not what was decided (knobs, quarantine, tick): that would undo the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from resilient_train.core import randomness
from resilient_train.core.copies import Stateful, restore_item
from resilient_train.core.tree import Share, Tree, copy_into, fits, is_sharded, local_part, to_original_device
from resilient_train.ground.errors import in_one_line, unusable
from resilient_train.ground.wording import log

LR_OF_GUARD = "lr_of_guard"  # a key of a group whose rates are the guard's: the lr that it set; rewinds with the group
Pairs = list[tuple[Any, Any]]  # of a tensor of the run, and a copy of it or of this rank's part


@dataclass
class Clock:
    """Counts updates: `step` the accepted ones, which rewinds; `tick` the attempted ones, which does not."""

    step: int = 0
    tick: int = 0


class RunState:
    """All that rewinds. Copy it only between two updates: accumulated gradients are not part of it."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Stateful],
        samples: Stateful,
        clock: Clock,
        *,
        device: torch.device,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model, self.optimizers, self.clock, self.device = model, list(optimizers), clock, device
        self.kept: dict[str, Stateful] = {}  # by the user
        self._stateful: dict[str, Stateful] = {"position": samples}
        self._stateful |= {f"schedule.{number}": schedule for number, schedule in enumerate(schedules)}
        if scaler is not None and scaler.is_enabled():
            self._stateful["scaler"] = _LossScale(scaler, device)

    @property
    def is_sharded(self) -> bool:
        return any(map(is_sharded, self.model.parameters()))

    def keep(self, name: str, item: Any) -> None:
        try:
            to_original_device(item.state_dict())  # which copies it
        except Exception as error:
            raise unusable(f"keep({name}=...)", f"its state cannot be copied: {in_one_line(error)}") from error
        self.kept[f"kept.{name}"] = item

    def restore(self, parts: Mapping[str, Tree]) -> None:
        """Restore a copy of what `live` returned, in place: tensors keep their addresses, gradients are dropped, and
        what the loop has added since (weights, buffers of modules with such weights) stays as it is.
        """
        copy_pairs(pairs := self.pairs(parts["weights"]))
        if len(pairs) < len(parts["weights"]):
            log.warning("weights that were renamed, resized or removed since step %d are not rewound", parts["clock"])
        for weight in self.model.parameters():
            weight.grad = None
        added = dict(self.model.named_parameters()).keys() - parts["weights"].keys()
        paths = tuple({name.rpartition(".")[0] for name in added})
        modules = dict(self.model.named_modules())
        buffers = {path: dict[str, Any](one._buffers) for path, one in modules.items() if path.startswith(paths)}
        for path, value in parts["buffers"].items():
            owner, _, name = path.rpartition(".")
            buffers.setdefault(owner, {})[name] = value
        _restore_tables([(module._buffers, buffers.get(path, {})) for path, module in modules.items()])
        for number, optimizer in enumerate(self.optimizers):
            restore_optimizer(optimizer, parts[f"optimizer.{number}"])
        self.clock.step = parts["clock"]
        for name, item in (self._stateful | self.kept).items():
            restore_item(item, parts[name])
        states = {name.removeprefix("random."): state for name, state in parts.items() if name.startswith("random.")}
        randomness.restore(states, self.device)  # last, because the calls above may draw random numbers

    def pairs(self, saved: Mapping[str, Tree]) -> Pairs:
        """Return the weights that a copy has, each with that copy."""
        live = self.model.named_parameters()
        return [(one, saved[name]) for name, one in live if name in saved and saved[name].shape == one.shape]

    def live(self) -> dict[str, Tree]:
        """Everything that rewinds, by part; the tensors are the run's own."""
        parts: dict[str, Tree] = {
            "weights": dict(self.model.named_parameters()),
            "buffers": {  # including those that a state_dict leaves out, and names that are None so far
                f"{path}.{name}" if path else name: buffer
                for path, module in self.model.named_modules()
                for name, buffer in module._buffers.items()
            },
            "clock": self.clock.step,
        }
        for number, optimizer in enumerate(self.optimizers):
            parts[f"optimizer.{number}"] = optimizer_tree(optimizer)
        parts |= {name: item.state_dict() for name, item in (self._stateful | self.kept).items()}
        return parts | {f"random.{name}": state for name, state in randomness.capture(self.device).items()}


class _LossScale:
    """The state of a GradScaler, left on its device: the scaler's own `state_dict` would wait for the device."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self._scaler = scaler
        if scaler._scale is None:  # else the scaler would make its tensors at its first use
            scaler._lazy_init_scale_growth_tracker(device)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scaler._scale, "growth_tracker": self._scaler._growth_tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        scaler: Any = self._scaler
        copy_into([scaler._scale, scaler._growth_tracker], [state["scale"], state["growth_tracker"]])


def _restore_tables(tables: Iterable[tuple[dict[Any, Any], Mapping[Any, Any]]]) -> None:
    """Restore each table of tensors: in place where the shapes are the same; keys that were added are removed."""
    pairs: Pairs = []
    for live, saved in tables:
        for key in live.keys() - saved.keys():
            del live[key]
        for key, value in saved.items():
            if is_pair(live.get(key), value):
                pairs.append((live[key], value))
            else:
                live[key] = to_original_device(value)
    copy_pairs(pairs)


def is_pair(live: Any, saved: Any) -> bool:
    if not isinstance(live, torch.Tensor) or not isinstance(saved, torch.Tensor | Share):
        return False
    return is_sharded(live) is isinstance(saved, Share) and fits(local_part(saved), local_part(live))


def copy_pairs(pairs: Pairs) -> None:
    copy_into([local_part(live) for live, _ in pairs], [local_part(saved) for _, saved in pairs])


def optimizer_tree(optimizer: Optimizer) -> Tree:
    """The moments by the number of their weight, the settings of every group, and what the class itself adds.

    `Optimizer.load_state_dict` casts moments to the dtype of their weights and could not restore fp32 moments of bf16
    weights, so the state is read and written directly. A class that overrides `state_dict` is asked for what it adds.
    """
    state = optimizer.state
    tree = {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "moments": {place: dict(state[weight]) for place, weight in _places(optimizer) if weight in state},
        "shared": {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)},
    }
    if type(optimizer).state_dict is not Optimizer.state_dict:
        own = optimizer.state_dict()
        tree["own"] = {key: value for key, value in own.items() if key not in ("state", "param_groups")}
    return tree


def restore_optimizer(optimizer: Optimizer, saved: Tree) -> None:
    """Restore what `optimizer_tree` returned, but for the rates of a loop that sets its own."""
    if "own" in saved:
        optimizer.load_state_dict({**optimizer.state_dict(), **to_original_device(saved["own"])})
    for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(to_original_device(saved["shared"]))
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=False):  # the loop may have added some
        own = {} if LR_OF_GUARD in group else {"lr": group["lr"]}
        for key in group.keys() - settings.keys() - {"params"}:  # which the thread of the writer reads
            del group[key]
        group.update(to_original_device(settings) | own)
    moments, tables = saved["moments"], []
    for place, weight in _places(optimizer):
        if place in moments:
            tables.append((optimizer.state[weight], moments[place]))
        else:  # the snapshot is older than the first update of this weight
            optimizer.state.pop(weight, None)
    _restore_tables(tables)


def _places(optimizer: Optimizer) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(weights_of(optimizer)))


def weights_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]
