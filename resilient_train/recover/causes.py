"""The cause that a signal suggests by itself, with advice: used when a diagnosis finds nothing better."""

from __future__ import annotations

from resilient_train.types import Anomaly, Cause, Diagnosis, Signal

_ADVICE: dict[Cause, dict[Signal, str]] = {
    Cause.DATA: {
        Signal.NONFINITE_BATCH: (
            "The batch itself holds NaN or infinite values: look for gaps, divisions and logarithms in the code that "
            "makes its rows."
        ),
    },
    Cause.UNKNOWN: {
        Signal.NONFINITE_LOSS: (
            "The batch is finite and its loss is not: look in the forward pass for a logarithm, division, root or "
            "power that meets 0 or a negative value."
        ),
        Signal.NONFINITE_GRAD: (
            "The loss is finite and its gradient is not: look for an operation with an infinite slope, such as sqrt "
            "or norm at 0, or atan2 at the origin."
        ),
        Signal.GRAD_SPIKE: (
            "One gradient was far above anything recent: often a batch of outliers; if many follow, the learning rate "
            "is too high."
        ),
        Signal.EXCEPTION: (
            "Code raised an exception that it does not raise with other batches: handle that case, or mend the rows."
        ),
    },
    Cause.CORRUPTION: {
        Signal.NONFINITE_WEIGHTS: (
            "Weights became NaN or infinite although every update was finite: if it returns, suspect the hardware, or "
            "code that writes to weights between updates."
        ),
        Signal.WEIGHTS_JUMP: (
            "Weights moved farther than the optimizer can move them: if it returns, suspect the hardware, or code "
            "that writes to weights between updates."
        ),
        Signal.RANK_MISMATCH: (
            "The ranks hold different weights: if it returns, suspect the hardware of those that are named, or code "
            "that changes weights on some ranks only; if they should differ, turn checks.replicas off."
        ),
    },
    Cause.OPTIMIZER: {
        Signal.NONFINITE_OPTIMIZER: (
            "The optimizer's moments are not finite: if it returns, raise its eps, or keep its state in float32."
        ),
        Signal.OPTIMIZER_RANGE: (
            "The optimizer's second moments do not follow from its gradients: if it returns, suspect the hardware, or "
            "code that writes to its state."
        ),
    },
    Cause.EXPLOSION: {
        Signal.DIVERGENCE: (
            "The loss climbs and does not come back down: lower the learning rate, warm up longer, or clip tighter."
        ),
        Signal.NOT_RECOVERED: (
            "Training is stable again, but the loss is not back where it was: lower the learning rate, warm up "
            "longer, or clip tighter; declare a deliberate change with checks.expect."
        ),
    },
    Cause.RATE: {
        Signal.NO_PROGRESS: (
            "The learning rate is too high from the start: lower it by the factor that the run has found, or warm up "
            "longer."
        ),
    },
    Cause.OVERFLOW: {
        Signal.SCALE_COLLAPSE: (
            "Gradients overflow half precision at every loss scale: use bf16, or keep the layer that overflows in "
            "float32."
        ),
    },
    Cause.PROCESS: {
        Signal.OUT_OF_MEMORY: "Use a smaller batch with more accumulation, or activation checkpointing.",
        Signal.HANG: "train.log says where each rank was: often one of them waits for data or for a collective.",
        Signal.CRASH: (
            "See the last lines of the process that died: on its terminal, where the scheduler keeps its output, or in "
            "the train.log of a run of the command."
        ),
        Signal.DISK_FULL: "Make room on the disk of the run directory, or keep fewer checkpoints.",
        Signal.CHECKPOINT_FAILED: "Find what kept the state from being written; its traceback is in the log.",
        Signal.CHECKPOINT_DAMAGED: "Check the disk: a file differs from what was written.",
    },
}
_BY_SIGNAL = {signal: Diagnosis(cause, one) for cause, advice in _ADVICE.items() for signal, one in advice.items()}
_SPIKE_LANDED = "The loss jumped and stayed there: lower the learning rate, warm up longer, or clip tighter."
_SPIKE_REFUSED = (
    "One loss was far above anything recent: look at the rows of that batch; if many follow, the learning rate is too "
    "high."
)


def by_rate(factor: float, step: int, *, is_sudden: bool) -> Diagnosis:
    """Return the diagnosis of an anomaly that followed a rise of the learning rate."""
    times = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
    since = f"{'at' if is_sudden else 'since'} step {step:,}"
    return Diagnosis(
        Cause.RATE,
        f"The learning rate rose x{times} {since}: look at the schedule, and at what else sets the rate there; the "
        "samples are not to blame.",
    )


def by_signal(anomaly: Anomaly) -> Diagnosis:
    """Return the diagnosis that a signal suggests by itself."""
    if anomaly.signal is not Signal.LOSS_SPIKE:
        return _BY_SIGNAL[anomaly.signal]
    return Diagnosis(Cause.EXPLOSION, _SPIKE_LANDED) if anomaly.landed else Diagnosis(Cause.UNKNOWN, _SPIKE_REFUSED)
