"""The cause as far as the signal tells it: what a diagnosis falls back on."""

from __future__ import annotations

from resilient_train.types import Anomaly, Cause, Diagnosis, Signal

_PROCESS_SIGNALS = {
    Signal.OUT_OF_MEMORY: "Use a smaller batch with more accumulation, or activation checkpointing.",
    Signal.HANG: "Look in train.log for where each rank stood: often one of them waits for data or for a collective.",
    Signal.CRASH: "Look at the last lines of the process that died: in train.log, or where a scheduler kept them.",
    Signal.DISK_FULL: "Make room on the disk of the run directory, or keep fewer checkpoints.",
    Signal.CHECKPOINT_FAILED: "Look at what kept the state from being written; its traceback is in train.log.",
    Signal.CHECKPOINT_DAMAGED: "Check the disk: a file is not what was written.",
}

_BY_SIGNAL: dict[Signal, tuple[Cause, str]] = {
    Signal.NONFINITE_BATCH: (
        Cause.DATA,
        "The batch itself holds NaN or infinite values: look for gaps, divisions and logarithms in "
        "how its rows are made.",
    ),
    Signal.NONFINITE_LOSS: (
        Cause.UNKNOWN,
        "The batch is finite and its loss is not: look in the forward pass for a logarithm, division, root or power "
        "that meets 0 or a negative value.",
    ),
    Signal.NONFINITE_GRAD: (
        Cause.UNKNOWN,
        "The loss is finite and its gradient is not: look for an operation with an infinite slope, such as sqrt or "
        "norm at 0, or atan2 at the origin.",
    ),
    Signal.NONFINITE_WEIGHTS: (
        Cause.CORRUPTION,
        "Weights became NaN or infinite although every update was finite: if it returns, suspect the hardware, or code "
        "that writes to weights between updates.",
    ),
    Signal.NONFINITE_OPTIMIZER: (
        Cause.OPTIMIZER,
        "The optimizer's moments are not finite: if it returns, raise its eps, or keep its state in float32.",
    ),
    Signal.GRAD_SPIKE: (
        Cause.UNKNOWN,
        "One gradient was far above anything recent: often a batch of outliers; if many follow, the learning rate is "
        "too high.",
    ),
    Signal.DIVERGENCE: (
        Cause.EXPLOSION,
        "The loss climbs and does not come back: lower the learning rate, warm up longer, or clip tighter.",
    ),
    Signal.WEIGHTS_JUMP: (
        Cause.CORRUPTION,
        "Weights moved farther than the optimizer can move them: if it returns, suspect the hardware, or code that "
        "writes to weights between updates.",
    ),
    Signal.OPTIMIZER_RANGE: (
        Cause.OPTIMIZER,
        "The optimizer's second moments are not what its gradients make them: if it returns, suspect the hardware, or "
        "code that writes to its state.",
    ),
    Signal.SCALE_COLLAPSE: (
        Cause.OVERFLOW,
        "Gradients overflow half precision at every loss scale: use bf16, or keep the layer that overflows in float32.",
    ),
    Signal.EXCEPTION: (
        Cause.UNKNOWN,
        "The step raised an exception: its traceback is in train.log.",
    ),
    Signal.RANK_MISMATCH: (
        Cause.CORRUPTION,
        "The ranks hold different weights: if it returns, suspect the hardware of those that are named, or code that "
        "changes weights on some ranks only; if they are to differ, turn checks.replicas off.",
    ),
    Signal.NOT_RECOVERED: (
        Cause.EXPLOSION,
        "Training is quiet again, but the loss is not back where it was: lower the learning rate, warm up longer, or "
        "clip tighter; a change that was made on purpose is declared with checks.expect.",
    ),
    **{signal: (Cause.PROCESS, advice) for signal, advice in _PROCESS_SIGNALS.items()},
}

_SPIKE_LANDED = (
    Cause.EXPLOSION,
    "The loss jumped and stayed there: lower the learning rate, warm up longer, or clip tighter.",
)
_SPIKE_REFUSED = (
    Cause.UNKNOWN,
    "One loss was far above anything recent: look at the rows of that batch; if many follow, the learning rate is too "
    "high.",
)


def by_rate(factor: float, step: int, *, is_sudden: bool) -> Diagnosis:
    """Return the cause of what follows on a learning rate that rose."""
    times = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
    since = f"{'at' if is_sudden else 'since'} step {step:,}"
    return Diagnosis(
        Cause.RATE,
        f"The learning rate rose x{times} {since}, by the schedule: look at its settings there; the samples are "
        "not to blame.",
    )


def by_signal(anomaly: Anomaly) -> Diagnosis:
    """Return the cause that a signal suggests by itself, and what to do about it."""
    if anomaly.signal is Signal.LOSS_SPIKE:
        return Diagnosis(*(_SPIKE_LANDED if anomaly.landed else _SPIKE_REFUSED))
    return Diagnosis(*_BY_SIGNAL[anomaly.signal])
