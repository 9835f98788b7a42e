"""What is said of an incident and of a run as a whole. `sentences` describes the templates."""

from __future__ import annotations

# An incident. Its values are those of `wording.about`.
_NOTICED = "{signal:signal}< on {ranks:ranks}>"
_REACHED = (
    "<reached=let_through?, let through><reached=now?, in the weights already>"
    "<reached=earlier?, in the weights since step {first}>"
)
_DRILL = "<, on purpose (drill: {drill})>"
_SIGN = f"step {{step}}: {_NOTICED} ({{signal}})<reached=not?, refused before it reached the weights>{_REACHED}{_DRILL}"
_CAUSE = "cause {cause}< ({blamed:say})>"
_DONE = (
    "<gave_up?gave up: {why:say}><!gave_up?{remedies:list}><took?, in {seconds:,.2f} s><!gave_up?; {lost:step} lost>"
)
_HANDLED = f"{_CAUSE}; {_DONE}<!gave_up?; {{outcome:outcome}}>"
_OUTCOME = (
    "{outcome:outcome}<; the same fault {further:more time}><outcome=recovered?; {healthy:healthy step} since>"
    "<outcome=unrecovered?; {not_over:say}><outcome=gave_up?; {why:say}>"
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
  at {{opened:time}}, tick {{tick}}
{_BODY}
<  what failed of it: {{symptom:culprit}}>
  {{inputs:lines}}
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
    "further": "step {now}: incident {id}; the same fault {further:more time}",
    "sign": f"{_SIGN}<; {{evidence:say}}>",
    "handled": _HANDLED,
    "tag": f"{_SIGN}; {_HANDLED}",
}

# A row of the table in MLflow.
ROW = {
    "#": "{id}",
    "when": "{opened:day}",
    "step": "{step}",
    "what": f"{_NOTICED}<reached=not?, refused>{_REACHED}{_DRILL}",
    "cause": "{cause}<: {where:list}>",
    "remedy": "<gave_up?gave up: {why:say}><!gave_up?{remedies:list}>",
    "outcome": "{outcome:outcome}",
    "cost": "{lost:step} lost<, {seconds:,.2f} s>",
}

PARTS = {
    "culprit": "{op}< in {module}>, {file}:{line:id}<, {phase}>",
    "blamed_rows": "{rows:few}",
    "got": "{op} got {values:pairs}",
    "arm": "  {remedies:list}: later loss {loss:.4g}, {anomalies:update} refused<won?, chosen>",
    "nothing_done": "nothing was done",
    "being_handled": "being handled",
    "as_it_is": "as it is<rewound?, from step {step}>",
    "not_saved": "no state could be saved from then on",
    "recurred_to_the_end": "it recurred until the end, and no remedy was enough",
    "loss_not_back": "the loss did not come back to where it was",
    "this_incident": _INCIDENT,
    "never_over": f"after {_INCIDENT} {{not_over:say}}.",
    "given_up": f"{_NOTICED}, {{why:say}}",
}

# A run: is it all right? Values: `review.about`.
_WHERE = (
    "<state=completed?{step:step}><state=ended?left without guard.close() ><state=closed?closed >"
    "<!state=completed?at step {at}><!state=completed? of {steps}><returned?, returned to step {step}>"
)
_COSTS = (
    "<!total?no incidents><total?{total:incident} ({causes:counts})><, {others:counts}>"
    "<, {more:more update} skipped for the same reason><quiet?, no repeat since>."
    "< {undone} of {tick:update} refused or undone.>"
)
_IN_ALL = f"In all, {_COSTS}"
_SO_FAR = "<!state=completed? so far>"
_ODD = "The evaluation is not finite ({odd:pairs})"
_RESULTS = "<state=completed? Recent loss {final_loss:.4g}.><state=completed? Evaluation: {eval:pairs}.>"
_WELL = f"{_WHERE}; {_COSTS}{_RESULTS}"
HEADLINES = {
    "clean": f"<odd?{_ODD}><!odd?All is well>{_SO_FAR}",
    "recovered": f"<odd?{_ODD}><!odd?Recovered>{_SO_FAR}",
    "recovering": "Recovering",
    "observed": "Observed only",
    "unrecovered": "Not recovered, needs attention",
    "no_progress": (
        "The loss <fell?hardly fell><!fell?did not fall> (it began at {first_loss:.4g} and ended at {final_loss:.4g})"
    ),
    "above_best": "Ended above the level of steps {from:id} to {to:id} ({loss:.4g}, now {final_loss:.4g})",
    "gave_up": "Gave up, needs attention",
    "preempted": "Stopped on request",
    "killed": "Killed (no exit message)",
    "failed": "Failed",
}
DETAILS = {
    "clean": _WELL,
    "recovered": _WELL,
    "recovering": f"{_WHERE}; {{last:this_incident}} is open until the run has stayed healthy. {_IN_ALL}",
    "observed": f"{_WHERE}; {_COSTS} The last was {{last:this_incident}}.",
    "unrecovered": f"{_WHERE};< {{last:never_over}}> {_IN_ALL}",
    "no_progress": f"{_WHERE}; {_COSTS}",
    "above_best": f"{_WHERE}; {_COSTS}",
    "gave_up": f"{_WHERE}<: {{last:given_up}}>. {_IN_ALL}",
    "preempted": f"{_WHERE}; {_COSTS}",
    "killed": f"{_WHERE}. {_IN_ALL}",
    "failed": f"{_WHERE}<: {{why}}>. {_IN_ALL}",
}
AGAIN = "needed a second remedy"  # in place of the outcome, once all is over

# What to do about a run that is not all right, where the advice of its incidents does not say so.
_POLICY = "read in the report what was tried, then try another policy or a lower learning rate"
TO_DO = {
    "unrecovered": _POLICY,
    "gave_up": _POLICY,
    "no_progress": "check the learning rate, the data and the objective",
    "above_best": "look at what changed after these steps: the learning rate, the data or the objective",
    "failed": "fix the error that ended it, and start it again",
    "killed": "start it again",
}

# What still differs from the configuration, by the name of the knob or the remedy.
ACTIVE = {
    "lr": "learning rate x{lr:.3g}",
    "clip": "gradient clip x{clip:.3g}",
    "eps": "epsilon x{eps:.3g}",
    "decay": "weight decay x{decay:.3g}",
    "ceiling": "learning rate capped at {ceiling:rate}",
    "share": "updates of at most {share:.3g} of the weights",
    "norm": "gradients clipped to a norm of {norm:.3g}",
    "higher_precision": "full precision for {higher_precision:step}",
    "mends_eps": "epsilon raised where it rounds to 0 in its dtype",
    "quarantined": "{quarantined:few} in quarantine",
    "micro_batch": "micro-batches of {micro_batch:row}",
}
PATCHED = "patched: `{op}`, `{file}:{line:id}`"
# What is left of a run: label and words.
LEFT = {
    "active": ("still active<over? at the end>", "{active}"),
    "skipped": ("skipped", "{skipped:sample}"),
    "weights": ("weights", "{weights}"),
    "best": ("best evaluation", "{best:checkpoint}"),
    "last_good": ("last good checkpoint", "{last_good:checkpoint}"),
    "newest": ("newest checkpoint", "{newest:checkpoint}"),
    "none": ("newest checkpoint", "none"),
}

RUN = {
    "on_purpose": "<, {drilled} of {total:incident} on purpose (drill)>",
    "start_refused": "The last start was refused",
    "before_that": "{refused}. Before that, ",
    "checkpoint": "{path} (step {step}<, {metrics:pairs}><kind=candidate?, not yet verified>)",
    "asked": "{advice:sentences}<several? ({incident:incident})>",
    "all_drilled": "nothing to change: all incidents are on purpose (drill)",
    "to_do": "to do: {what}",
    "to_change": "to change: {what}",
    "more_to_change": "to change: {count} more",
    "more": "{count} more",
    "nothing_written": "nothing of this is written: with run_dir there is a report, and a way to resume",
    "completed": "completed {steps:step} in {seconds:duration}",
    "running": " Running, {process}.",
    "lines_left_out": "{file}: {count:line} damaged and left out",
    "older": "{count:incident} before these",
    "then": "< {things:thing} to change.>< Running, {process}.>< The same command {next:say}.>",
    # What the same command does.
    "resumes": "the same command< with {how}> resumes",
    "the_command": "the same command {next:say}",
    "trainer_resumes": (
        "starts again; the trainer resumes by `resume_from_checkpoint=True`, Lightning's by `ckpt_path`"
    ),
    "resumes_from": "resumes from step {step}",
    "starts_over": "begins at step 0 again",
    "trains_longer": "trains longer if `run.steps` is raised",
    "starts_new": "starts a new run in the next free directory<; with {how} this one {onward:say}>",
    "resumes_if_longer": "resumes if more steps or epochs are planned",
    "is_refused": "is refused while this run is at work; if its process is gone, it {onward:say}",
    "exits": "exits with 0; raise `run.steps` to train longer",
    "gives_up_again": "says so again at once and ends with 3; with a changed configuration it {onward:say}",
    "to_see": "to see it, start (it answers after half a minute)\n  {command}",
    "open": "<served?and><!served?to see it,> open\n  {url}",
    "and_more": "And {count} more.",
}

# The description in MLflow.
NOTE = """\
**{headline}.**< **Do:** {things}><calm? Nothing to change.> {details}

<![The incidents of the run, by cause, over its ticks]({strip})

><titles?**What went wrong, and what was done**, the newest first

| {titles} |
{rule}|
{rows:raw}

><And {older} before them, in `{report}`.

>{left:raw}- **The same command** {next}.
<titles?- **Full report**: `{report}` among the artifacts. Numbers link to traces.
>- **The Step axis** of the charts is the tick: attempted updates, lost ones included.
"""
