"""Whether a state that comes from outside is one of this run, before anything of the run is touched."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from resilient_train.state.tree import Tree

_NUMPY_WORDS = 624
_LATER = {"drawn"}  # counts that earlier versions did not write
_SHAPED_OTHERWISE = {"Adafactor", "LBFGS", "Muon"}  # of torch's optimizers, which keep moments of other shapes


def explain_mismatch(
    live: Mapping[str, Tree], saved: Mapping[str, Tree], model: nn.Module, optimizers: Sequence[Optimizer]
) -> str:
    """Say in one line what does not fit, or nothing where all does; `live` are the parts of the run as it is."""
    if odd := sorted(live.keys() ^ saved.keys(), key=str):
        return f"{odd[0]!s:.80} is in one of the two only"
    if type(saved["clock"]) is not int or saved["clock"] < 0:
        return "its count of steps is none"
    found = _weights(live["weights"], saved["weights"]) or _buffers(live["buffers"], saved["buffers"], model)
    for number, optimizer in enumerate(optimizers):
        name = f"optimizer.{number}"
        found = found or _optimizer(live[name], saved[name], optimizer)
    for name in live:
        if name.startswith("random."):
            found = found or _generator(name.removeprefix("random."), live[name], saved[name])
        elif name not in ("weights", "buffers", "clock") and not name.startswith("optimizer."):
            found = found or _other(name, live[name], saved[name])
    return found


def _weights(live: Mapping[str, torch.Tensor], saved: Any) -> str:
    if not isinstance(saved, dict):
        return "it has no weights"
    lacking, unknown = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys(), key=str)
    if lacking or unknown:
        what = f"lacks the weight {lacking[0]}" if lacking else f"has a weight {unknown[0]!r:.80}, which is not here"
        return f"it {what}"
    return next((why for name in live if (why := _tensor(name, live[name], saved[name]))), "")


def _tensor(name: str, live: torch.Tensor, saved: Any) -> str:
    if not _is_tensor(saved):
        return f"{name} is no tensor"
    if saved.shape != live.shape or saved.dtype is not live.dtype:
        return f"{name} is {saved.dtype} {list(saved.shape)} there and {live.dtype} {list(live.shape)} here"
    return ""


def _is_tensor(saved: Any) -> bool:
    """A tensor, or one that several ranks have written and nobody has read yet."""
    return isinstance(saved, torch.Tensor) or hasattr(saved, "read")


def _buffers(live: Mapping[str, Any], saved: Any, model: nn.Module) -> str:
    """Those that a state_dict leaves out are caches, which may grow."""
    if not isinstance(saved, dict):
        return "it has no buffers"
    modules, lasting = dict(model.named_modules()), model.state_dict(keep_vars=True).keys()
    for name, value in saved.items():
        if not isinstance(name, str) or name.rpartition(".")[0] not in modules:
            return f"it has a buffer {name!r:.80}, which is not here"
        if value is not None and not isinstance(value, torch.Tensor):
            return f"{name} is no tensor"
        here = live.get(name)
        if here is not None and value is not None and name in lasting and (why := _tensor(name, here, value)):
            return why
    return ""


def _optimizer(live: Tree, saved: Any, optimizer: Optimizer) -> str:
    kind = type(optimizer).__name__
    if not isinstance(saved, dict) or saved.keys() != live.keys():
        return f"{kind}: it has the state of another optimizer"
    groups, moments = saved["groups"], saved["moments"]
    if not isinstance(groups, list) or len(groups) != len(live["groups"]) or not isinstance(moments, dict):
        return f"{kind}: it has other parameter groups"
    for here, there in zip(live["groups"], groups, strict=True):
        if not isinstance(there, dict) or (odd := here.keys() - there.keys()):
            return f"{kind}: a parameter group lacks {min(odd) if isinstance(there, dict) else 'everything'}"
        if odd := [key for key, value in here.items() if not _is_like(value, there[key])]:
            return f"{kind}: {odd[0]} of a parameter group is no {type(here[odd[0]]).__name__}"
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    is_plain = type(optimizer).__module__.startswith("torch.optim") and kind not in _SHAPED_OTHERWISE
    for place, kept in moments.items():
        if type(place) is not int or not 0 <= place < len(weights) or not isinstance(kept, dict):
            return f"{kind}: it has moments of a weight that is not here"
        tensors = [value for value in kept.values() if _is_tensor(value)]
        numbers, shape = (torch.Size(), torch.Size((1,))), weights[place].shape
        if is_plain and any(one.shape not in (*numbers, shape) for one in tensors):
            return f"{kind}: the moments of weight {place} are of another shape than the weight"
        if is_plain and not all(one.dtype.is_floating_point or one.dtype.is_complex for one in tensors):
            return f"{kind}: the moments of weight {place} are no fractions"
        if is_plain and any(isinstance(value, str | bytes | dict | list | tuple) for value in kept.values()):
            return f"{kind}: the moments of weight {place} are no numbers"
    return "" if isinstance(saved["shared"], dict) else f"{kind}: it has the state of another optimizer"


def _is_like(here: Any, there: Any) -> bool:
    if isinstance(here, bool) or here is None or isinstance(there, bool) or there is None:
        return True  # a switch that was not set is None, and so is a number
    if isinstance(here, int | float):
        return isinstance(there, int | float | torch.Tensor)
    return isinstance(here, torch.Tensor) or type(here) is type(there)


def _generator(name: str, live: Any, saved: Any) -> str:
    """Try it on a generator that nobody needs."""
    try:
        if name == "python":
            random.Random().setstate(saved)
        elif name == "numpy":
            tried = np.random.RandomState()
            tried.set_state(saved)
            if not 0 <= tried.get_state(legacy=False)["state"]["pos"] <= _NUMPY_WORDS:  # it would read beyond them
                return f"the state of the generator {name} is none"
        elif name == "torch":
            torch.Generator().set_state(saved)
        elif not isinstance(saved, torch.Tensor) or saved.shape != live.shape or saved.dtype is not live.dtype:
            return f"the state of the generator {name} is none"
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError, OverflowError, IndexError):
        return f"the state of the generator {name} is none"
    return ""


def _other(name: str, live: Any, saved: Any) -> str:
    if type(saved) is not type(live):
        return f"{name} is a {type(saved).__name__} there and a {type(live).__name__} here"
    if isinstance(live, dict) and (
        odd := [key for key, one in live.items() if type(one) is int and not _whole(saved, key)]
    ):
        return f"{odd[0]} of {name} is no whole number"
    return ""


def _whole(saved: Mapping[Any, Any], key: Any) -> bool:
    return (key in _LATER and key not in saved) or (type(saved.get(key)) is int and saved[key] >= 0)
