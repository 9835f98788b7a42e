"""What a model is trained for: functions `(model, batch) -> (loss, metrics)`.

Metrics are detached tensors on the device. Every check is about shapes, dtypes and keys: reading a value on the host
would stall the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from resilient_train.errors import unusable

Model = Callable[..., Any]
Outcome = tuple[Tensor, dict[str, Tensor]]

_INPUTS = ("pixel_values", "inputs", "x", "image")
_TARGETS = ("labels", "label", "y", "target")
_IGNORED = -100  # torch's and transformers' mark for a position without a target

_misfit = partial(unusable, "objective")  # the user chose model, data and objective: they do not fit together


def classification(model: Model, batch: Any, label_smoothing: float = 0.0) -> Outcome:
    """Cross-entropy of the model's scores [batch, classes] against class numbers [batch]."""
    inputs, labels = _pair(batch, "classification")
    if labels.is_floating_point():
        raise _misfit(
            f"classification needs integer class labels, got {_describe(labels)}; choose objective=regression"
        )
    logits = _logits(model(inputs), "classification").float()
    if labels.ndim == logits.ndim and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if logits.ndim < 2 or labels.shape != logits.shape[:1] + logits.shape[2:]:
        raise _misfit(
            f"classification needs scores [batch, classes] and labels [batch], "
            f"got scores of shape {list(logits.shape)} and labels of shape {list(labels.shape)}"
        )
    loss = F.cross_entropy(logits, labels.long(), label_smoothing=label_smoothing)
    return loss, {"accuracy": (logits.detach().argmax(1) == labels).float().mean()}


def regression(model: Model, batch: Any) -> Outcome:
    """Mean squared error; [batch] and [batch, 1] count as the same shape, nothing else is broadcast."""
    inputs, targets = _pair(batch, "regression")
    both = _logits(model(inputs), "regression"), targets
    predicted, targets = (one.squeeze(-1).float() if one.ndim > 1 else one.float() for one in both)
    if predicted.shape != targets.shape:
        raise _misfit(
            f"regression needs a prediction of its targets' shape, "
            f"got {list(predicted.shape)} for targets of shape {list(targets.shape)}"
        )
    return F.mse_loss(predicted, targets), {"mae": (predicted - targets).detach().abs().mean()}


def language_model(model: Model, batch: Any) -> Outcome:
    """Cross-entropy of the next token, in fp32, over rows of token ids [batch, time].

    A batch is the ids, a tuple that begins with them, or a mapping with `input_ids` and optionally `labels`
    (transformers' way: aligned with the ids, shifted here, -100 where there is no target) and `attention_mask`
    (0 where there is no target). The model sees the ids alone, so padding belongs on the right, where a causal model
    never looks. A batch without any target has loss 0 rather than 0/0.
    """
    if isinstance(batch, Mapping):
        ids = _entry(batch, ("input_ids",), "language_model")
    else:
        ids = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(ids, Tensor):
        raise _misfit(f"language_model needs a tensor of token ids, got {type(ids).__name__}")
    if ids.is_floating_point() or ids.is_complex():
        raise _misfit(
            f"language_model needs integer token ids, got {_describe(ids)}; "
            "choose objective=classification or regression"
        )
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise _misfit(f"language_model needs rows [batch, time] of at least 2 tokens, got shape {list(ids.shape)}")

    labels = ids.long()
    if isinstance(batch, Mapping):
        labels = labels if batch.get("labels") is None else batch["labels"].long()
        if batch.get("attention_mask") is not None:
            labels = labels.masked_fill(batch["attention_mask"] == 0, _IGNORED)
    if labels.shape != ids.shape:
        raise _misfit(
            f"language_model needs labels of the ids' shape {list(ids.shape)}, got {list(labels.shape)}: "
            "it shifts them itself"
        )
    targets = labels[:, 1:].flatten()
    logits = _logits(model(ids[:, :-1]), "language_model").float()
    if logits.ndim != 3 or logits.shape[:2] != ids[:, :-1].shape:
        raise _misfit(
            f"language_model needs logits [batch, time, vocab] for ids of shape {list(ids[:, :-1].shape)}, "
            f"got {list(logits.shape)}"
        )
    total = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=_IGNORED, reduction="sum")
    return total / (targets != _IGNORED).sum().clamp(min=1), {}


def model_loss(model: Model, batch: Any) -> Outcome:
    """The loss that the model computes itself, as transformers' models do when the batch holds labels."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss: Any = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = output[0] if isinstance(output, tuple | list) and output else None
        loss = getattr(output, "loss", loss)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        keys = f" (keys {', '.join(map(str, batch))})" if isinstance(batch, Mapping) else ""
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else "no loss"
        raise _misfit(
            f"model_loss needs one loss from the model, got {found} in its {type(output).__name__}: "
            f"does the batch{keys} hold labels? objective=language_model needs none"
        )
    return loss.float().reshape(()), {}


def _pair(batch: Any, objective: str) -> tuple[Any, Tensor]:
    if isinstance(batch, Mapping):
        inputs, targets = _entry(batch, _INPUTS, objective), _entry(batch, _TARGETS, objective)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = batch
    else:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise _misfit(f"{objective} needs a batch (inputs, targets) or a mapping, got a {type(batch).__name__}{size}")
    if not isinstance(targets, Tensor):
        raise _misfit(f"{objective} needs a tensor of targets, got {type(targets).__name__}")
    return inputs, targets


def _entry(batch: Mapping[Any, Any], names: tuple[str, ...], objective: str) -> Any:
    for name in names:
        if name in batch:
            return batch[name]
    raise _misfit(f"{objective} needs a batch with {' or '.join(names)}, got the keys {', '.join(map(str, batch))}")


def _logits(output: Any, objective: str) -> Tensor:
    scores = getattr(output, "logits", output)
    if not isinstance(scores, Tensor):
        raise _misfit(f"{objective} needs a tensor or .logits from the model, got a {type(output).__name__}")
    return scores


def _describe(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} of shape {list(values.shape)}"
