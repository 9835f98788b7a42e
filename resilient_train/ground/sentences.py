"""What is said of a run and its incidents, by the kind of the fact. `wording` fills the sentences in.

`{name}` is a value of the fact and `{name:spec}` its format: one of numbers, as in `{loss:.4g}`; `times` of a factor;
`rows`, `ranks`, `names` of a list; `place` of a line of code; `say`, `list`, `lines`, `sentences` of facts inside of a
fact; the kind of another sentence, which is filled in with the value; any other word is a unit, as in `{count:update}`.
A part in `<...>` is left out if one of its values is missing, empty, false or 0. One in `<name?...>` is shown if that
value is there, one in `<!name?...>` if it is not, one in `<name=word?...>` if it is that word.
"""

from __future__ import annotations

from typing import NamedTuple

from resilient_train.ground.types import ACCEPTED, OBSERVE, Outcome, Signal

# An incident. Its values are those of `wording.about`.
_NOTICED = "{signal:signal}< on {ranks:ranks}>"
_REACHED = "<reached=now?, in the weights already><reached=earlier?, in the weights since step {first} at the earliest>"
_SIGN = f"step {{step}}: {_NOTICED} ({{signal}})<reached=not?, refused before it reached the weights>{_REACHED}"
_CAUSE = "cause {cause}< ({blamed:say})>"
_DONE = (
    "<gave_up?gave up: {why:say}><!gave_up?{remedies:list}><took?, in {seconds:,.2f} s><!gave_up?; {lost:step} lost>"
)
_OUTCOME = (
    "{outcome:outcome}<; the same fault {further:more time}><outcome=unrecovered?; {not_over:say}><gave_up?; {why:say}>"
)
_BODY = f"""\
  {{evidence:say}}
  {_CAUSE}; {_DONE}
  {{arms:lines}}
<  advice: {{advice:sentences}}>"""
_INCIDENT = f"incident {{id}} ({_NOTICED}, step {{step}}<, and {{further:more time}}>)"

INCIDENT = {
    "printed": f"! incident {{id}}, {_SIGN}\n{_BODY}",
    "block": f"""\
incident {{id}}, {_SIGN}
  at {{at:time}}, tick {{tick}}
{_BODY}
  outcome: {_OUTCOME}""",
    "final": f"""\
gave up at {_SIGN}
<meant?  if step {{first}} changes something on purpose, run again with expect=[{{first:id}}]>
  {{evidence:say}}
  {_CAUSE}
  why: {{why:say}}
  last good weights: <{{last_good}}><!last_good?none were written>
<  what to try next: {{advice:sentences}}>""",
    "outcome": f"incident {{id}}: {_OUTCOME}",
    "line": f"incident {{id}}<, {{at:day}}>, {_SIGN}; {_CAUSE}; {_DONE}<!gave_up?; {{outcome:outcome}}>",
}

PARTS = {
    "culprit": "{op}< in {module}>, {file}:{line:id}<, {phase}>",
    "blamed_rows": "{rows:few}",
    "arm": "  <lowered?learning rate x{rate}><!lowered?as it is><rewound? from step {since}>: later loss {loss:.4g}, {anomalies:update} refused<won?, chosen>",
    "nothing_done": "nothing was done",
    "not_saved": "no state could be saved from then on",
    "recurred_to_the_end": "it recurred until the end, and no remedy was enough",
    "loss_not_back": "the loss did not return to where it was",
    "this_incident": _INCIDENT,
    "never_over": f"{_INCIDENT} {{not_over:say}}",
    "given_up": f"{_NOTICED} at step {{step}}; {{why:say}}",
}

# A run: is it all right? Values: `story.about`.
_WHERE = "<state=completed?{step:step}><state=ended?left without guard.close() ><state=closed?closed ><!state=completed?at step {step}><!state=completed? of {steps}>"
_COSTS = "<!total?no incidents><total?{total:incident} ({causes:counts})><, {others:counts}>.< {undone} of {tick:update} refused or undone.>"
_RESULTS = "<state=completed? Recent loss {final_loss:.4g}.><state=completed? Evaluation: {eval:pairs}.>"
DETAILS = f"{_WHERE}<: {{because}}>; {_COSTS}{_RESULTS}"
_ODD = "The evaluation is not finite ({odd:pairs})"
_SO_FAR = "<!state=completed? so far>"
_POLICY = "Read what was tried, then try another policy or a lower learning rate"


class Verdict(NamedTuple):
    headline: str
    because: str = ""
    to_do: str = ""  # where the advice of its incidents does not say so


VERDICTS = {
    "well": Verdict(f"<odd?{_ODD}><!odd?All is well>{_SO_FAR}"),
    "unjudged": Verdict(
        "Whether a lower learning rate does better was not looked at",
        to_do="Compare with a run at a tenth of the learning rate",
    ),
    "recovered": Verdict(f"<odd?{_ODD}><!odd?Recovered>{_SO_FAR}"),
    "recovering": Verdict("Recovering", "{last:this_incident} is open until the run has stayed healthy"),
    "observed": Verdict("Observed only"),
    "unrecovered": Verdict("Not recovered, needs attention", "<after {last:never_over}>", _POLICY),
    "no_progress": Verdict(
        "The loss made no progress (it began at {first_loss:.4g} and ended at {final_loss:.4g})",
        to_do="Check the learning rate, the data and the objective",
    ),
    "above_best": Verdict(
        "Ended above the level of steps {from:id} to {to:id} ({loss:.4g}, now {final_loss:.4g})",
        to_do="Look at what changed after these steps: the learning rate, the data or the objective",
    ),
    "gave_up": Verdict("Gave up, needs attention", "<{last:given_up}>", _POLICY),
    "preempted": Verdict("Stopped on request"),
    "killed": Verdict("Killed (no exit message)", to_do="Start it again"),
    "failed": Verdict("Failed", "<{why}>", "Fix the error that ended it, and start it again"),
}

# What still differs from the configuration, by the name of the knob or the remedy.
ACTIVE = {
    "lr": "learning rate x{lr:.3g}",
    "clip": "gradient clip x{clip:.3g}",
    "ceiling": "learning rate capped at {ceiling:rate}",
    "share": "updates of at most {share:.3g} of the weights",
    "mends_eps": "epsilon raised where it rounds to 0 in its dtype",
    "quarantined": "{quarantined:few} in quarantine",
    "micro_batch": "micro-batches of {micro_batch:row}",
}
PATCHED = "patched: `{op}`, `{file}:{line:id}`"
# What is left of a run, in order.
LEFT = {
    "active": "still active<over? at the end>: {active}",
    "weights": "weights: {weights}",
    "newest": "newest checkpoint: {newest:checkpoint}",
}

RUN = {
    "start_refused": "The last start failed",
    "before_that": "{refused}. Before that, ",
    "axis": "the axis Step of the charts is the tick: attempted updates, lost ones included",
    "checkpoint": "{path} (step {step}<kind=candidate?, not yet verified>)",
    "asked": "{advice:sentences}<several? ({incident:incident})>",
    "to_do": "to do: {what}",
    "more": "{count} more",
    "unwritten": "{verdict}: {steps:step}, {total:incident}; with run_dir there is a review, and a way to resume",
    "completed": "completed {steps:step}; this process took {seconds:duration}",
    "running": " Running, {process}.",
    "older": "{count:incident} before these",
    "then": "< {things:thing} to change.>< Running, {process}.>",
    # What the same command does.
    "resumes": "the same command< with {how}> resumes",
    "to_see": "to see it,< start (it answers after half a minute)\n  {command}\nand> open\n  {url}",
}

SIGNALS = {
    Signal.NONFINITE_BATCH: "the batch is not finite",
    Signal.NONFINITE_LOSS: "the loss is not finite",
    Signal.NONFINITE_GRAD: "a gradient is not finite",
    Signal.NONFINITE_WEIGHTS: "a weight is not finite",
    Signal.NONFINITE_OPTIMIZER: "the optimizer's state is not finite",
    Signal.LOSS_SPIKE: "the loss jumped",
    Signal.GRAD_SPIKE: "the gradient norm jumped",
    Signal.DIVERGENCE: "the loss is worse than it was",
    Signal.WEIGHTS_JUMP: "the weights jumped",
    Signal.OPTIMIZER_RANGE: "the optimizer's state is out of its range",
    Signal.SCALE_COLLAPSE: "the loss scale collapsed",
    Signal.EXCEPTION: "an exception was raised",
    Signal.OUT_OF_MEMORY: "the device ran out of memory",
    Signal.HANG: "the step hung",
    Signal.CRASH: "the process died",
    Signal.DISK_FULL: "the disk is full",
    Signal.CHECKPOINT_FAILED: "a checkpoint could not be written",
    Signal.CHECKPOINT_DAMAGED: "a checkpoint is damaged",
    Signal.RANK_MISMATCH: "the ranks differ",
    Signal.NOT_RECOVERED: "the loss is not back where it was",
    Signal.NO_PROGRESS: "the loss has plateaued; a lower learning rate may help",
}

OUTCOMES = {
    None: "open",
    Outcome.RECOVERED: "recovered",
    Outcome.RECURRED: "came back",
    Outcome.UNRECOVERED: "not recovered",
    Outcome.GAVE_UP: "gave up",
    Outcome.OBSERVED: "observed only",
}

# What was noticed, in numbers. Several facts are joined by semicolons.
EVIDENCE = {
    "text": "{text}",  # of an exception, the system or the user
    "measured": "loss {loss:.4g}, gradient norm {norm:.4g}",
    "loss_outside": "loss {loss:.4g} where {low:.4g} to {high:.4g} was usual<stays?, and it stays>",
    "refused_often": "{count:update} were refused within a few steps",
    "norm_outside": "gradient norm {norm:.4g} where at most {largest:.4g} was usual",
    "off_level": "the last losses ({count}) average {mean:.4g} where {level:.4g} was usual at step {step}",
    "off_since_rate": "the last losses ({count}) average {mean:.4g} where {level:.4g} was usual before the learning rate rose x{times:.3g}",
    "plateau": "the last losses ({count}) average {mean:.4g} <falls?and fall><thrown?after the first updates had thrown it up><stands?and do not fall>, where it began with {first:.4g}<, and the weights still change by {travel:.2g} of their norm in 25 updates>",
    "scale_fell": "the loss scale fell to {scale:.3g}",
    "not_finite": "not finite: {name} holds {value:g}< and {more} more>, of {count:tensor}",
    "weight_jumped": "weights jumped: {name} <long?length><!long?max |w|> {before:.4g} -> {now:.4g} where {updates:update} can reach {bound:.4g}",
    "statistics_out": "running statistics jumped: `{name}` max {before:.3g} -> {now:.3g}",
    "weight_huge": "weights jumped: {name} max |w| {before:.4g} -> {now:.4g}, the model's largest was {largest:.4g}",
    "moments_shrank": "second moments shrank: {name} sums to {before:.4g} -> {now:.4g} where {updates} updates leave {least:.4g} at least",
    "replicas_differ": "replicas differ: {ranks:ranks} of {size}",
    "decided_differently": "{ranks:ranks} decided differently",
    "settings_differ": "{ranks:ranks} have different settings",
    "row_failed": "row {row:id} cannot be put into a batch: {error}",
    "bad_batch": "the batch holds values that are not finite",
    "hangs": "no {phase} was finished for {seconds:.0f} s; it hangs in {where}",
    "died": "the previous process died after step {step}<skipped?, and the one before that at the same samples: they are skipped>",
    "damaged": "{name} {why}",
    "not_written": "the checkpoint of step {step} could not be written: {why}",
    "smaller_batch": "{why}; micro-batches of {rows:row} from now on",
    "lost_gpu": "{error}: this process cannot use the GPU any more<; samples at which {times} processes in a row end are skipped>",
}

# What is wrong with a row.
ROWS = {
    "row_raises": "{where:place} raises {error}, and for hardly any of a hundred others",
    "row_breaks": "{where:place} breaks on such values, and on hardly any of a hundred others",
    "row_not_finite": "{field}< at {at:id}> is {value:g}<, and {more} more>",
    "row_far": "{field}< at {at:id}> is {value:.3g}, where {others} other rows stay within ±{usual:.3g}",
    "row_far_below": "{field}< at {at:id}> is {value:.3g}, where nearly all of {others} other rows are at least {usual:.4g} from 0",
    "other_rank_failed": "another rank could not make its batches",
    "no_loss": "no finite loss in {where:place} for such targets",
}

_WRITES = "if it returns, suspect the hardware, or code that writes to"
_BY_NO_UPDATE = f"which no update can have done: expect=[{{step:id}}] declares it if it is meant; {_WRITES} weights between updates."
_CALMER = "lower the learning rate, warm up longer, or clip tighter"

# What a person can do about it: sentences, one after the other.
ADVICE = {
    "or_fix_line": "Or fix the line<: {how:say}><!how?.>",
    # What a signal suggests by itself.
    Signal.NONFINITE_BATCH: "The batch holds NaN or infinite values: look at what makes its rows.",
    Signal.NONFINITE_LOSS: "The batch is finite and its loss is not: look for a logarithm, division, root or power that meets 0 or less.",
    Signal.NONFINITE_GRAD: "The loss is finite and its gradient is not: look for an infinite slope, such as that of sqrt or norm at 0.",
    Signal.LOSS_SPIKE: "One loss was far above anything recent: look at the rows of that batch; if many follow, lower the rate.",
    Signal.GRAD_SPIKE: "One gradient was far above anything recent: look for outliers; if many follow, lower the learning rate.",
    Signal.EXCEPTION: "This batch raises and others do not: handle that case, or fix the rows.",
    Signal.NONFINITE_WEIGHTS: f"Weights, or what is kept with them, became NaN or infinite although every update was finite: {_WRITES} them.",
    Signal.WEIGHTS_JUMP: f"Weights moved farther than the optimizer can move them: {_WRITES} weights between updates.",
    Signal.RANK_MISMATCH: f"The ranks hold different weights: {_WRITES} weights on some ranks; if they should, turn off replicas.",
    Signal.NONFINITE_OPTIMIZER: "The optimizer's moments are not finite: if it returns, raise its eps, or keep its state in float32.",
    Signal.OPTIMIZER_RANGE: (f"The optimizer's second moments do not follow from its gradients: {_WRITES} its state."),
    Signal.DIVERGENCE: f"The loss climbs and does not return: {_CALMER}.",
    Signal.NOT_RECOVERED: f"The loss is stable, but not back where it was: {_CALMER}; declare a deliberate change with expect=[STEP].",
    Signal.NO_PROGRESS: "The learning rate is too high from the start: lower it by the factor that the trial found, or warm up longer.",
    Signal.SCALE_COLLAPSE: "Gradients overflow half precision at every loss scale: use bf16, or keep the layer that does in float32.",
    Signal.OUT_OF_MEMORY: "Use a smaller batch with more accumulation, or activation checkpointing.",
    Signal.HANG: "train.log says where each rank was: often one of them waits for data or for a collective.",
    Signal.CRASH: "See the last lines of the process that died, on its terminal or in its log (train.log, if it was the command).",
    Signal.DISK_FULL: "Make room on the disk of the run directory, or keep fewer checkpoints.",
    Signal.CHECKPOINT_FAILED: "Find what kept the state from being written: the log has a traceback.",
    Signal.CHECKPOINT_DAMAGED: "Check the disk: a file differs from what was written.",
    # More that is known.
    "spike_landed": f"The loss jumped and stayed there: {_CALMER}; declare a deliberate change with expect=[STEP].",
    "rate_rose": "The learning rate <is_sudden?jumped><!is_sudden?rose> x{times:times} <is_sudden?from step {before} to><!is_sudden?since step> {step}: look at the schedule, and at what else sets it there; the samples are not to blame.",
    "passed_on_replay": "The batch passed on replay. If this recurs, suspect the hardware, or code outside of the model.",
    "not_replayed": "The update could not be replayed: {why:say}.",
    "climbed": "Gradients or losses climbed to {times:.3g} times their usual before it broke: lower the learning rate.< It broke first in {where:place}.>",
    "every_batch_breaks": "Every batch breaks at the weights that the last updates have made: lower the learning rate. It broke first in {where:place}.",
    "batch_not_finite": "The batch holds values that are not finite: <{failure:say}><!failure?none of its rows was seen to hold them when fetched again>.",
    "rows_fail": "Every batch with {rows:rows} fails; the operation could not be identified: look at {rows:it}, or remove {rows:it}.",
    "reproducible": "Reproducible with this batch, but <{failure:say}><!failure?no operation of the forward or backward was seen to make it>.",
    "singular": "{where:place} {family:wrong}: {family:fix}.",
    "makes_nonfinite": "{where:place} makes values that are not finite of what it is given: mask them before it.",
    "is_given": "{where:place} is given values that are not finite by the program itself, as a constant or from code outside of torch, and they reach the loss: mask those elements before, or give them another value.",
    "overflows": "{where:place} makes more than its type can hold: scale or clamp its input, or compute it in a wider type.",
    "follows_patch": "{where:place} fails on values from {patched:place}, which is already patched; fix that line first.",
    "seen_with": "Seen with {rows:rows}.",
    "then_raised": "What follows from it raised {error}",
    "raised": "{where:place} raised {error}: keep what it is given within its domain, or catch it there.",
    "rows_raised": "With {rows:rows} an update raised {error}: fix or remove such rows, or fix the line.",
    "batches_raise": "<everywhere?This batch, and others of its size, raise><!everywhere?The batch raises> {error}: handle that in your code.",
    "bad_rows": "{rows:Rows}: {why:say}; fix or remove {rows:it}.",
    "ordinary_rows": "Look at {rows:rows}: the batch is ordinary without {rows:it}.",
    "this_batch_only": "Only this batch does it, and no row of it alone: if many follow, lower the learning rate.",
    "other_batches_too": "Other batches do the same: if the task was changed, declare it with expect=[STEP]; else lower the rate.",
    "not_compared": "Reproducible with this batch; no other rows could be tried.",
    "eps_lost": "eps={eps:g} of {optimizer} is 0 in {dtype}: raise it, or keep weights and moments in float32.",
    "weight_not_finite": f"`{{name}}` is {{now:g}}< at {{at:id}}>, {_BY_NO_UPDATE}",
    "weight_moved": f"`{{name}}` went from {{before:.3g}} to {{now:.3g}}< at {{at:id}}>, {_BY_NO_UPDATE}",
    "again_after_rewind": "It happened again at the same place after a rewind.",
    "died_twice": "Look at {rows:rows}: the process ended there twice.",
    "all_rows": "Look at {rows:rows}: their incidents say why. The last:",
    "ranks_decide": "The ranks decided differently: look for code, data or settings that differ between ranks, such as another version of a file on another host, or a state that only some ranks change.",
    "on_purpose": "{what:say}: taken as a change on purpose; to declare it: expect=[{step:id}]",
    # Several incidents together.
}

# Operations that are singular somewhere: where, and what to do about it.
_BEFORE = "mask those elements before it (after it their gradient stays NaN)"
_EPSILON = f"{_BEFORE}, or add an epsilon inside that is not tiny next to usual values (else values or slopes are huge)"
SINGULAR = {
    "log": ("is infinite at 0 and NaN below", f"{_BEFORE}, clamp its input from below, or work with logits"),
    "div": (
        "is not finite where its denominator is 0",
        f"{_BEFORE}, or keep the denominator above a size that is usual for it (a tiny epsilon makes huge quotients)",
    ),
    "sqrt": ("has an infinite slope at 0 and is NaN below", _EPSILON),
    "pow": (
        "is NaN for a negative base with a fractional exponent, and infinite, or steep, at 0 for exponents below 1",
        f"{_BEFORE}, or clamp the base from below",
    ),
    "norm": ("has no slope at 0", "add an epsilon inside, or mask rows of zeros before it (their slope is NaN later)"),
    "std": (
        "has an infinite slope where all values are equal",
        "add an epsilon to the variance, or give the layer a larger eps",
    ),
    "acos": ("is infinite, or steep, at -1 and 1 and NaN beyond", "clamp its input to just inside of -1 and 1"),
    "softmax": ("is NaN where all of a row is -inf", "leave one place of each row unmasked, or mask the result"),
    "binary_cross_entropy": ("is infinite, or steep, at chances of 0 and 1", "use binary_cross_entropy_with_logits"),
    "mean": ("is 0 / 0 over no elements", "leave out what is empty"),
    "linalg": ("is ill-conditioned here", "add a small multiple of the identity, or use a form that needs no inverse"),
    "loss": ("is not finite for these targets", "look at targets that are empty, too long, or all ignored"),
}

# Why a run gave up.
GAVE_UP = {
    "no_remedy": "the policy has no remedy for the cause {cause}",
    "in_a_row": "{count:consecutive update} were refused (limit {limit})",
    "ladder_exhausted": "the ladder for {cause} has no rung left, {count:rung} did not help",
    "none_applies": "none of the remedies for {cause} can be applied here",
    "refused_in_window": "the budget of {count:refused update} within {window:update} is used up",
    "incidents_in_window": "the budget of {count:incident} within {window:update} is used up",
    "nothing_left": "the policy has nothing left",
    "data_broken": "the data set is broken: {bad} of its {rows:row} are bad, and the budget allows for {allowed}",
}

# Changes that were taken as on purpose, or after which earlier losses are no measure.
CHANGES = {
    "risen_at_verified": "the loss rose from {was:.4g} to {now:.4g} with any samples, at verified weights too",
    "fell": "the loss fell from {was:.4g} to {now:.4g} as the loop wrote to the weights",
    "rose_again": "the loss rose from {was:.4g} to {now:.4g} at step {step}, after a rewind as before it, with other samples and a tenth of the rate",
}

# Remedies. Settings that their sentence does not name follow in brackets.
REMEDIES = {
    "rewind": "<rewound?rewound to step {rewound_to} (verified)><!rewound?not rewound: no verified snapshot><older?><steps?>",
    "skip": "skipped<!updates? the suspect samples>< {updates:update} of data>",
    "quarantine": "quarantined< {rows:rows}>",
    "repeat": "retried the update",
    "report": "reported only",
    "reset_moments": "reset the optimizer's moments",
    "lower_lr": "learning rate<!factor? lowered>< x{factor}>< with {rewarm:step} of warm-up><lasting?>",
    "limit_lr": "learning rate capped< at {to:rate}><leapt_to? and falling with the schedule>",
    "tighten_clip": "gradient clip< x{factor}>",
    "limit_update": "updates limited< to {share} of the weights' norm>",
    "mend_eps": "epsilon raised: it rounds to 0 in its dtype",
    "armor": "patched<!symptom? that line>< {symptom:culprit}, too>",
    OBSERVE: "only observed",
    "go_on": "<!restarted?the run was resumed>< from step {rewound_to}><restarted?no checkpoint: restarted at step 0>",
    "fall_back": "fell back to the previous one",
    "try_again": "training continues, and saving is retried",
    "smaller_batch": "smaller micro-batches, more of them to an update",
    "end": "the process was ended",
    ACCEPTED: "taken as a change on purpose",
}

SENTENCES: dict[str, str] = {**EVIDENCE, **ROWS, **ADVICE, **GAVE_UP, **CHANGES, **PARTS, **RUN}
