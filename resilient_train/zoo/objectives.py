"""What a model is trained for: functions `(model, batch) -> (loss, metrics)`.

Metrics stay on the device, detached. Only shapes, dtypes and keys are checked: reading a value stalls the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from resilient_train.ground.errors import ConfigError, unusable

Model = Callable[..., Any]
Outcome = tuple[Tensor, dict[str, Tensor]]

_INPUTS = ("pixel_values", "inputs", "x", "image")
_TARGETS = ("labels", "label", "y", "target")
_IGNORED = -100  # torch's and transformers' mark for a position without a target


def classification(model: Model, batch: Any, label_smoothing: float = 0.0) -> Outcome:
    """Cross-entropy of the model's scores [batch, classes] against class numbers [batch]."""
    inputs, labels = _pair(batch, "classification")
    if labels.is_floating_point():
        raise _misfit("classification", "integer class labels", labels)
    scores = _scores(model(inputs), "classification")
    loss = F.cross_entropy(scores, labels.long(), label_smoothing=label_smoothing)
    return loss, {"accuracy": (scores.detach().argmax(1) == labels).float().mean()}


def regression(model: Model, batch: Any) -> Outcome:
    """Mean squared error; [batch] and [batch, 1] count as the same shape, nothing else is broadcast."""
    inputs, targets = _pair(batch, "regression")
    both = _scores(model(inputs), "regression"), targets.float()
    predicted, targets = (one.squeeze(-1) if one.ndim > 1 else one for one in both)
    if predicted.shape != targets.shape:
        raise _misfit("regression", f"a prediction of its targets' shape {list(targets.shape)}", predicted)
    return F.mse_loss(predicted, targets), {"mae": (predicted - targets).detach().abs().mean()}


def language_model(model: Model, batch: Any) -> Outcome:
    """Cross-entropy of the next token, in fp32, over rows of token ids [batch, time].

    A batch is the ids, a tuple that begins with them, or a mapping with `input_ids` and optionally `labels` (aligned
    with the ids, -100 where there is no target) and `attention_mask` (0 where there is none). The model sees the ids
    alone, so padding belongs on the right. A batch without any target has loss 0 rather than 0/0.
    """
    entries: Mapping[Any, Any] = {}
    if isinstance(batch, Mapping):
        entries, ids = batch, _entry(batch, ("input_ids",), "language_model")
    else:
        ids = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim != 2:
        raise _misfit("language_model", "integer token ids [batch, time]", ids)
    ids = ids.long()
    labels = ids if entries.get("labels") is None else entries["labels"].long()
    if labels.shape != ids.shape:
        raise _misfit("language_model", f"labels of the ids' shape {list(ids.shape)}", labels)
    if entries.get("attention_mask") is not None:
        labels = labels.masked_fill(entries["attention_mask"] == 0, _IGNORED)
    targets = labels[:, 1:].flatten()
    scores = _scores(model(ids[:, :-1]), "language_model")
    total = F.cross_entropy(scores.flatten(0, 1), targets, ignore_index=_IGNORED, reduction="sum")
    return total / (targets != _IGNORED).sum().clamp(min=1), {}


def model_loss(model: Model, batch: Any) -> Outcome:
    """The loss that the model computes itself, as transformers' models do when the batch holds labels."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list):
        loss = output[0]
    else:
        loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise _misfit("model_loss", "one loss from the model (does the batch hold labels?)", output)
    return loss.float().reshape(()), {}


def _pair(batch: Any, objective: str) -> tuple[Any, Tensor]:
    if isinstance(batch, Mapping):
        return _entry(batch, _INPUTS, objective), _entry(batch, _TARGETS, objective)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise _misfit(objective, "a batch (inputs, targets) or a mapping", batch)
    return batch[0], batch[1]


def _entry(batch: Mapping[Any, Any], names: tuple[str, ...], objective: str) -> Any:
    found = [batch[name] for name in names if name in batch]
    if not found:
        raise unusable("objective", f"{objective} needs a batch with {' or '.join(names)}, got {', '.join(batch)}")
    return found[0]


def _scores(output: Any, objective: str) -> Tensor:
    scores = getattr(output, "logits", output)
    if not isinstance(scores, Tensor):
        raise _misfit(objective, "a tensor or .logits from the model", output)
    return scores.float()


def _misfit(objective: str, needed: str, got: Any) -> ConfigError:
    found = f"{got.dtype} of shape {list(got.shape)}" if isinstance(got, Tensor) else f"a {type(got).__name__}"
    return unusable("objective", f"{objective} needs {needed}, got {found}")
