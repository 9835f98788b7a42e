"""Compares a loaded state with the run that is to resume from it, before anything of the run is changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from resilient_train.state.sharded import UnreadTensor
from resilient_train.state.tree import Tree

_NUMPY_WORDS = 624
_OPTIONAL = {"drawn"}  # counts that earlier versions did not write
_SHAPED_OTHERWISE = {"Adafactor", "LBFGS", "Muon"}  # torch's optimizers with moments of other shapes than the weight


def explain_mismatch(
    live: Mapping[str, Tree], saved: Mapping[str, Tree], model: nn.Module, optimizers: Sequence[Optimizer]
) -> str:
    """Say in one line why a loaded state does not fit the parts of the run; empty if it does."""
    return next(_mismatches(live, saved, model, optimizers), "")


def _mismatches(
    live: Mapping[str, Tree], saved: Mapping[str, Tree], model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[str]:
    """Yield a line for each mismatch. Only the first is used: every check relies on those before it having passed."""
    for odd in sorted(live.keys() ^ saved.keys(), key=str):
        yield f"only one of the two has {odd!s:.80}"
    if type(saved["clock"]) is not int or saved["clock"] < 0:
        yield "its number of steps is not valid"
    for part in ("weights", "buffers"):
        if not isinstance(saved[part], dict):
            yield f"it has no {part}"
    for name in sorted(live["weights"].keys() - saved["weights"].keys()):
        yield f"it lacks the weight {name}"
    for name in sorted(saved["weights"].keys() - live["weights"].keys(), key=str):
        yield f"it has a weight {name!r:.80}, which the model does not have"
    for name, weight in live["weights"].items():
        yield from _in_tensor(name, weight, saved["weights"][name])
    modules, persistent = dict(model.named_modules()), model.state_dict(keep_vars=True).keys()
    for name, buffer in saved["buffers"].items():
        if not isinstance(name, str) or name.rpartition(".")[0] not in modules:
            yield f"it has a buffer {name!r:.80}, which the model does not have"
        if buffer is not None and not isinstance(buffer, torch.Tensor):
            yield f"{name} is not a tensor"
        if buffer is not None and live["buffers"].get(name) is not None and name in persistent:  # others are caches
            yield from _in_tensor(name, live["buffers"][name], buffer)
    for number, optimizer in enumerate(optimizers):
        for why in _in_optimizer(live[f"optimizer.{number}"], saved[f"optimizer.{number}"], optimizer):
            yield f"{type(optimizer).__name__}: {why}"
    for name in live:
        if name.startswith("random."):
            if not _is_generator_state(name.removeprefix("random."), live[name], saved[name]):
                yield f"the state of the generator {name.removeprefix('random.')} is not valid"
        elif name not in ("weights", "buffers", "clock") and not name.startswith("optimizer."):
            yield from _in_other(name, live[name], saved[name])


def _in_tensor(name: str, live: torch.Tensor, saved: Any) -> Iterator[str]:
    if not isinstance(saved, torch.Tensor | UnreadTensor):
        yield f"{name} is not a tensor"
    if saved.shape != live.shape or saved.dtype is not live.dtype:
        yield f"{name} is {saved.dtype} {list(saved.shape)} there and {live.dtype} {list(live.shape)} here"


def _in_optimizer(live: Tree, saved: Any, optimizer: Optimizer) -> Iterator[str]:
    if not isinstance(saved, dict) or saved.keys() != live.keys() or not isinstance(saved["shared"], dict):
        yield "it has the state of another optimizer"
    groups, moments = saved["groups"], saved["moments"]
    if not isinstance(groups, list) or len(groups) != len(live["groups"]) or not isinstance(moments, dict):
        yield "it has other parameter groups"
    for here, there in zip(live["groups"], groups, strict=True):
        if not isinstance(there, dict) or here.keys() - there.keys():
            yield "a parameter group lacks settings"
        for key, value in here.items():
            if not _is_like(value, there[key]):
                yield f"{key} of a parameter group is not a {type(value).__name__}"
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    kind = type(optimizer)
    is_plain = kind.__module__.startswith("torch.optim") and kind.__name__ not in _SHAPED_OTHERWISE
    for place, values in moments.items():
        if type(place) is not int or not 0 <= place < len(weights) or not isinstance(values, dict):
            yield "it has moments of a weight that the optimizer does not have"
        if not is_plain:
            continue
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor | UnreadTensor)]
        shapes = (torch.Size(), torch.Size((1,)), weights[place].shape)
        if any(one.shape not in shapes for one in tensors):
            yield f"the moments of weight {place} have another shape than the weight"
        if not all(one.dtype.is_floating_point or one.dtype.is_complex for one in tensors):
            yield f"the moments of weight {place} do not have a floating-point dtype"
        if any(isinstance(value, str | bytes | dict | list | tuple) for value in values.values()):
            yield f"the moments of weight {place} are not numbers"


def _is_like(here: Any, there: Any) -> bool:
    if isinstance(here, bool) or here is None or isinstance(there, bool) or there is None:
        return True  # a setting that was not given is None, whatever its type is otherwise
    if isinstance(here, int | float):
        return isinstance(there, int | float | torch.Tensor)
    return isinstance(here, torch.Tensor) or type(here) is type(there)


def _is_generator_state(name: str, live: Any, saved: Any) -> bool:
    """Try the state on a new generator of the same kind."""
    try:
        if name == "python":
            random.Random().setstate(saved)
        elif name == "numpy":
            generator = np.random.RandomState()
            generator.set_state(saved)
            # numpy does not check the position, and would read memory beyond the words.
            return bool(0 <= generator.get_state(legacy=False)["state"]["pos"] <= _NUMPY_WORDS)
        elif name == "torch":
            torch.Generator().set_state(saved)
        else:
            return isinstance(saved, torch.Tensor) and saved.shape == live.shape and saved.dtype is live.dtype
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError, OverflowError, IndexError):
        return False
    return True


def _in_other(name: str, live: Any, saved: Any) -> Iterator[str]:
    if type(saved) is not type(live):
        yield f"{name} is a {type(saved).__name__} there and a {type(live).__name__} here"
    if isinstance(live, dict):
        version, known = saved.get("permutation", 1), live.get("permutation")
        if known is not None and version != known:
            yield f"its position is in an order of rows of version {version}, and this release has version {known}"
        for key in (key for key, one in live.items() if type(one) is int and (key in saved or key not in _OPTIONAL)):
            if type(saved.get(key)) is not int or saved[key] < 0:
                yield f"{key} of {name} is not a whole number of at least 0"
