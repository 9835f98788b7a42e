"""The one place that names everything a run is.

What is captured here rewinds. What a person or a policy decided (knobs, quarantine, history, the tick) is not
here on purpose: a rewind would undo the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from resilient_train.state import randomness
from resilient_train.state.tree import Tree, copied, copy_into, home, sha256


class Stateful(Protocol):
    """What a schedule, a cursor and whatever a user wants to rewind along have in common."""

    def state_dict(self) -> Any:
        """Return everything needed to go on from here."""

    def load_state_dict(self, state: Any) -> Any:
        """Go back to a state."""


@dataclass
class Clock:
    """Counts updates: `step` the accepted ones, which rewinds; `tick` the attempted ones, which never goes back."""

    step: int = 0
    tick: int = 0


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment, by part: a copy that nothing else holds."""

    parts: Mapping[str, Tree]


class RunState:
    """Weights, buffers, optimizers, schedule, scaler, random numbers, position, clock and what the user keeps.

    Capture at the boundary between two updates only: accumulated gradients are not part of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Stateful],
        samples: Stateful,
        clock: Clock,
        *,
        device: torch.device,
        scaler: Stateful | None = None,
    ) -> None:
        self.model, self.optimizers, self.clock, self.device = model, list(optimizers), clock, device
        self._stateful: dict[str, Stateful] = {"position": samples}
        self._stateful |= {f"schedule.{number}": schedule for number, schedule in enumerate(schedules)}
        if scaler is not None:
            self._stateful["scaler"] = scaler

    def keep(self, name: str, item: Stateful) -> None:
        """Let something else rewind along, such as an average of the weights."""
        self._stateful[f"kept.{name}"] = item

    def capture(self) -> Snapshot:
        """Copy everything."""
        return Snapshot(copied(self.live()))

    def restore(self, snapshot: Snapshot) -> None:
        """Put everything back, in place: tensors keep their addresses. Gradients, if there are any, are dropped."""
        parts = snapshot.parts
        if parts.keys() != self.live().keys():
            odd = ", ".join(sorted(parts.keys() ^ self.live().keys()))
            raise ValueError(f"the snapshot is of another run: {odd} in one of them only")
        for name, tensors in (("weights", self._weights()), ("buffers", self._buffers())):
            copy_into(list(tensors.values()), [parts[name][key] for key in tensors])
        for weight in self.model.parameters():
            weight.grad = None
        for number, optimizer in enumerate(self.optimizers):
            _restore_optimizer(optimizer, parts[f"optimizer.{number}"])
        self.clock.step = parts["clock"]
        for name, item in self._stateful.items():
            item.load_state_dict(copied(parts[name]))
        for name in [name for name in parts if name.startswith("random.")]:  # last: what came before may have drawn
            randomness.restore(name.removeprefix("random."), parts[name], self.device)

    def sha256(self) -> str:
        """Digest of everything that rewinds."""
        return sha256(self.live())

    def weights_sha256(self) -> str:
        """Digest of the trainable weights: tied ones once, each under its first name and in its own dtype."""
        return sha256({name: weight for name, weight in self._weights().items() if weight.requires_grad})

    def live(self) -> dict[str, Tree]:
        """Every part by name, sharing its tensors with the run."""
        parts: dict[str, Tree] = {"weights": self._weights(), "buffers": self._buffers(), "clock": self.clock.step}
        for number, optimizer in enumerate(self.optimizers):
            parts[f"optimizer.{number}"] = _optimizer_tree(optimizer)
        parts |= {name: item.state_dict() for name, item in self._stateful.items()}
        return parts | {f"random.{name}": state for name, state in randomness.capture(self.device).items()}

    def frozen(self) -> list[str]:
        """Name the weights that training does not change."""
        return [name for name, weight in self._weights().items() if not weight.requires_grad]

    def _weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_buffers())  # also those a state_dict leaves out


def _optimizer_tree(optimizer: Optimizer) -> Tree:
    """Moments by place of their parameter, the settings of every group, and what a class of its own adds to them.

    `Optimizer.load_state_dict` casts moments to the dtype of their weights, so it could not bring back fp32
    moments of bf16 weights: the state is read and written directly. Only for what a class adds by a `state_dict` of
    its own, that method is asked.
    """
    state = optimizer.state
    tree = {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "moments": {
            place: dict(optimizer.state[weight]) for place, weight in _places(optimizer) if weight in optimizer.state
        },
        "shared": {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)},
    }
    if _has_own_state_dict(optimizer):
        own = optimizer.state_dict()
        tree["own"] = {key: value for key, value in own.items() if key not in ("state", "param_groups")}
    return tree


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    return type(optimizer).state_dict is not Optimizer.state_dict


def _restore_optimizer(optimizer: Optimizer, saved: Tree) -> None:
    if _has_own_state_dict(optimizer):
        optimizer.load_state_dict({**optimizer.state_dict(), **copied(saved["own"])})
    for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(copied(saved["shared"]))
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        weights = group["params"]
        group.clear()
        group.update(copied(settings), params=weights)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for place, weight in _places(optimizer):
        moments = saved["moments"].get(place)
        if moments is None:  # the snapshot is older than the first update of this weight
            optimizer.state.pop(weight, None)
            continue
        live = optimizer.state[weight]
        for key in [key for key in live if key not in moments]:
            del live[key]
        for key, value in moments.items():
            here = live.get(key)
            if isinstance(value, torch.Tensor) and isinstance(here, torch.Tensor) and _alike(here, value):
                targets.append(here)
                sources.append(value)
            else:
                live[key] = _at_home(value)
    copy_into(targets, sources)


def _places(optimizer: Optimizer) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(weight for group in optimizer.param_groups for weight in group["params"]))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, home(other))


def _at_home(value: Any) -> Any:
    """A copy where the original was: a snapshot may lie in the host's memory."""
    value_copied = copied(value)
    return value_copied.to(home(value)) if isinstance(value, torch.Tensor) else value_copied
