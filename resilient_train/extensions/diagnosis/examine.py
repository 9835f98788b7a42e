"""One batch under the microscope, outside of any run: what every layer puts out, and the operation that breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from resilient_train.core.mark import Marks
from resilient_train.core.randomness import Seeds
from resilient_train.core.tree import leaves
from resilient_train.data.trees import rebuilt
from resilient_train.extensions.diagnosis import rows, verdict
from resilient_train.extensions.diagnosis.frames import Layers, Output, floating, statistics
from resilient_train.extensions.diagnosis.replay import Replay
from resilient_train.extensions.diagnosis.verdict import Observations
from resilient_train.ground.types import Diagnosis
from resilient_train.ground.wording import blamed, say
from resilient_train.parts.modes import Attributes
from resilient_train.parts.run import nonfinite

_TITLES = ("layer", "class", "output", "from", "to", "not finite", "gradient there")


@dataclass(frozen=True)
class Examined:
    """What one forward and backward of a batch showed. `print` it, or take it apart."""

    loss: float
    grad_norm: float
    batch: tuple[Mapping[str, Any], ...]  # the ranges of its tensors
    layers: tuple[Output, ...]  # what they put out, in the order of the forward
    gradients: tuple[Output, ...]  # what arrived there, in the order of the backward
    weights: Mapping[str, float]  # the norm of each weight's gradient
    diagnosis: Diagnosis | None  # of what is not finite: operation, line and advice, as far as they are known
    remarks: tuple[str, ...]

    @property
    def is_healthy(self) -> bool:
        return isfinite(self.loss) and isfinite(self.grad_norm)

    def __str__(self) -> str:
        arrived = {one.layer: one for one in self.gradients}
        table: list[tuple[str, ...]] = [_TITLES]
        for one in self.layers:
            there = arrived[one.layer].range if one.layer in arrived else {}
            columns = _shape(one.range), *_ends(one.range), str(one.range["nonfinite"] or "")
            table.append(
                (one.layer or "the model", one.kind, *columns, " to ".join(filter(None, _ends(there))) + _broken(there))
            )
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}"]
        lines += [f"batch: {_shape(one)}, {' to '.join(_ends(one))}{_broken(one)}" for one in self.batch]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        if self.diagnosis is not None:
            where = f" ({say(blamed(self.diagnosis)[:1])})" if self.diagnosis.culprit is not None else ""
            lines += [f"cause {self.diagnosis.cause}{where}", f"advice: {say(self.diagnosis.advice)}"]
        is_quiet = self.is_healthy and not self.remarks and self.diagnosis is None
        return "\n".join([*lines, *self.remarks, *["nothing here is out of order"] * is_quiet])


def examine(model: nn.Module, objective: Callable[[Any, Any], Any], batch: Any) -> Examined:
    """Run forward and backward of one batch under the microscope; model, gradients and random numbers are restored.

    `objective` is called as `(model, batch)` and returns the loss, or the loss and metrics. It runs three times.
    Its precision is that of the model: give what `accelerator.prepare` returned.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    batch = rebuilt(batch, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)

    def measured(network: nn.Module, given: Any) -> Tensor:
        answer = objective(network, given)
        loss: Tensor = answer[0] if isinstance(answer, tuple) else answer
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError("the objective has to return a scalar tensor with a graph, the loss, or (loss, metrics)")
        return loss.reshape(())

    replay = Replay(
        model,
        measured,
        Tensor.backward,
        Marks(model),
        Attributes(model),
        drop_gradients=model.zero_grad,
        trained=weights,
        over_ranks=lambda grads: torch.tensor(sqrt(sum(float(one.double().square().sum()) for one in grads))),
        seeds=Seeds(0, 0, device),
        device=device,
        is_patched=lambda file, line, op: False,
    )
    layers = Layers(getattr(model, "_orig_mod", model))
    first = replay.of([batch], 0, watching=layers)
    seen = replay.under_microscope([batch], 0)
    bad_fields = rows.nonfinite_fields(batch)
    is_healthy, origin = isfinite(first.loss) and isfinite(first.norm), seen.origin
    diagnosis = None
    if not is_healthy:
        facts = Observations(reproduced=True, batch_is_bad=bool(bad_fields), size=first.norm)
        if origin is not None:
            facts = origin.noted(facts)
        rules = verdict.ERRORS if first.raised else verdict.NOT_FINITE
        facts = replace(facts, error=first.raised)
        diagnosis = verdict.rule_for(rules, facts).answer(facts)
    remarks = [f"the batch: {say([one])}" for one in bad_fields]
    remarks += [say([one]) for one in nonfinite(first.by_layer)]
    return Examined(
        first.loss,
        first.norm,
        batch=statistics(floating(leaves(batch))),
        layers=tuple(layers.outputs),
        gradients=tuple(layers.gradients),
        weights=first.by_layer,
        diagnosis=diagnosis,
        remarks=tuple(remarks),
    )


def _shape(found: Mapping[str, Any]) -> str:
    return f"{found['shape']} {found['dtype']}"


def _ends(found: Mapping[str, Any]) -> list[str]:
    return [f"{found[end]:.4g}" if end in found else "" for end in ("min", "max")]


def _broken(found: Mapping[str, Any]) -> str:
    return f", {found['nonfinite']:,} not finite" if found.get("nonfinite") else ""
