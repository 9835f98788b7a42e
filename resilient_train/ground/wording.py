"""Facts into words: fills in the templates of `sentences`, for an incident with what is known of it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from resilient_train.ground.sentences import INCIDENT, OUTCOMES, REMEDIES, SENTENCES, SIGNALS, SINGULAR
from resilient_train.ground.types import Action, Cause, Diagnosis, Facts, Incident, Outcome, Signal, fact

log = logging.getLogger("resilient_train")
IN_FILE_ONLY = {"in_file_only": True}  # too long for a terminal

_MAY_BE_MEANT = {Signal.LOSS_SPIKE, Signal.DIVERGENCE, Signal.NOT_RECOVERED, Signal.WEIGHTS_JUMP}
_NOT_ABOUT_WEIGHTS = {
    *(Signal.EXCEPTION, Signal.OUT_OF_MEMORY, Signal.HANG, Signal.CRASH),
    *(Signal.DISK_FULL, Signal.CHECKPOINT_FAILED, Signal.CHECKPOINT_DAMAGED, Signal.NO_PROGRESS),
}

# ----------------------------------------------------------------------------------------------------- facts into words

_OPTIONAL = re.compile(r"<(?:(!?)(\w+)(?:=(\w+))?\?)?([^<>]*)>")
_FIELD = re.compile(r"\{(\w+):?([^{}]*)\}")
_NAME = re.compile(r"[{<!](\w+)[:}?=]")


def say(facts: Iterable[Mapping[str, Any]], between: str = " ") -> str:
    """Return the sentences of some facts and remedies; of a kind that is not known, the kind and its values."""
    return between.join(map(_sentence, facts))


def _sentence(known: Mapping[str, Any]) -> str:
    if (template := SENTENCES.get(known.get("fact", ""))) is not None:
        with suppress(LookupError, TypeError, ValueError, AttributeError):  # of another version
            return fill(template, known)
    kind, *rest = known  # a remedy, perhaps of the user's: a dotted name
    template = REMEDIES.get(known[kind], f"{{{kind}}}")
    said = _NAME.findall(template)
    more = [name for name in rest if name not in said and known[name] is not None]
    settings = ", ".join(f"{_amount(name.replace('_', ' '))} {_amount(known[name])}" for name in more)
    return fill(template, known) + (f" ({settings})" if more else "")


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Fill in a template as `sentences` describes them."""

    def optional(part: re.Match[str]) -> str:
        negated, name, wanted, text = part.groups()
        own = [values.get(name) for name, _ in _FIELD.findall(text)]
        if name is None:
            return text if all(own) else ""
        holds = values.get(name) == wanted if wanted else bool(values.get(name))
        return text if holds != bool(negated) and None not in own else ""

    def field(found: re.Match[str]) -> str:
        return _formatted(values[found[1]], found[2])

    return _FIELD.sub(field, _OPTIONAL.sub(optional, template))


def _formatted(value: Any, spec: str) -> str:
    if (of := _SPECS.get(spec)) is not None:
        return of(value)
    if (template := SENTENCES.get(spec)) is not None:
        return fill(template, value)
    return _number(value, spec) if "." in spec or spec in ("g", "d") else counted(value, spec)


def _number(value: Any, spec: str = ".4g") -> str:
    return format(value, spec) if isinstance(value, int | float) else str(value)  # text, where it was not finite


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey: file names may come from anywhere."""
    return "".join(one if one.isprintable() else "?" for one in text)


def counted(number: Any, unit: str) -> str:
    """Say how many there are: "1 step", "2,000 steps"; only the number without a unit."""
    plural = f"{unit}es" if unit.endswith("ch") else f"{unit}s"
    plural = f"{unit[:-1]}ies" if unit.endswith("try") else plural
    return f"{_amount(number)} {unit if number == 1 else plural}" if unit else _amount(number)


def _amount(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return str(len(value))
    if isinstance(value, int | float):
        return format(value, "," if isinstance(value, int) else ".3g")
    return " ".join(str(value).splitlines())  # the user's, perhaps


def rows_named(rows: Sequence[int], most: int = 4) -> str:
    """Name some rows: "rows 3, 77 and 5 more"."""
    return f"{'row' if len(rows) == 1 else 'rows'} {_listed(rows, most)}"


def rank_names(ranks: Sequence[int]) -> str:
    """Name some ranks: "rank 3", "ranks 0, 1 and 3"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks, 8)}"


def names_listed(names: Sequence[str]) -> str:
    """Name some weights or layers: "`head.weight`, `head.bias` and 5 more"."""
    return _listed([f"`{name}`" for name in names], 3)


def _listed(names: Sequence[object], most: int) -> str:
    shown = [str(name) for name in names[:most]]  # numbers without commas, as they are looked up
    if more := len(names) - len(shown):
        shown.append(f"{more:,} more")
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def place_named(where: Mapping[str, Any]) -> str:
    at = f" at {os.path.basename(where['file'])}:{where['line']}" if where["file"] else ""
    return f"`{where['op']}`{at}"


def duration(seconds: float) -> str:
    """Say how long something took: 2:10:00."""
    return str(timedelta(seconds=round(seconds)))


# How the values of facts are said.
_SPECS: dict[str, Callable[[Any], str]] = {
    "": _amount,
    "id": str,  # without commas, as it is looked up
    "say": lambda facts: say(facts, "; "),
    "list": lambda facts: say(facts, ", "),
    "lines": lambda facts: say(facts, "\n  "),
    "sentences": say,
    "pairs": lambda values: ", ".join(f"{name} {_number(value)}" for name, value in values.items()),
    "counts": lambda counts: ", ".join(f"{count:,} {OUTCOMES.get(of, of)}" for of, count in counts.items()),
    "signal": lambda signal: SIGNALS[signal],
    "outcome": lambda outcome: OUTCOMES[outcome],
    "place": place_named,
    "few": rows_named,
    "rows": lambda rows: rows_named(rows, 8),
    "Rows": lambda rows: rows_named(rows, 8).capitalize(),
    "it": lambda rows: "it" if len(rows) == 1 else "them",
    "ranks": rank_names,
    "names": names_listed,
    "times": lambda times: format(times, ",.0f" if times >= 100 else ".3g"),
    "wrong": lambda family: SINGULAR[family][0],
    "fix": lambda family: SINGULAR[family][1],
    "rate": lambda times: "the configured one" if times == 1 else f"x{_amount(times)} of the configured one",
    "duration": duration,
    "time": lambda ms: f"{datetime.fromtimestamp(ms / 1000):%Y-%m-%d %H:%M:%S}",
    "day": lambda ms: f"{datetime.fromtimestamp(ms / 1000):%d %b %H:%M}",
}


def describe(incident: Incident, how: str = "printed", **more: Any) -> str:
    """Say of an incident what `how` stands for in `INCIDENT`; `more` are values beyond its own."""
    return "\n".join(lines_of(incident, how, **more))


def lines_of(incident: Incident, how: str, **more: Any) -> list[str]:
    return [line for line in fill(INCIDENT[how], about(incident) | more).split("\n") if line.strip()]


def about(incident: Incident) -> dict[str, Any]:
    """Return the values that sentences about an incident may name."""
    anomaly, diagnosis = incident.anomaly, incident.diagnosis
    gave_up, has_rewound = incident.decision.gave_up, incident.rewound_to is not None
    first = anomaly.since + 1
    reached = ("now" if first >= anomaly.step else "earlier") if anomaly.landed else "not"
    recurred = fact("recurred_to_the_end" if incident.outcome is Outcome.RECURRED else "loss_not_back")
    return {
        **known_of(incident),
        "ranks": [] if anomaly.signal is Signal.RANK_MISMATCH else sorted(anomaly.ranks),  # its evidence names them
        "reached": None if anomaly.signal in _NOT_ABOUT_WEIGHTS else reached,  # the weights
        "first": first,
        "meant": anomaly.landed and anomaly.signal in _MAY_BE_MEANT,
        "blamed": blamed(diagnosis),
        "gave_up": gave_up is not None,
        "why": gave_up or fact("nothing_left"),
        "remedies": _remedies(incident.decision.actions, incident) or fact("nothing_done"),
        "arms": [
            {"fact": "arm", **asdict(one), "lowered": one.rate < 1, "rewound": one.since is not None}
            for one in incident.tried
        ],
        "took": has_rewound and gave_up is None and diagnosis.cause is not Cause.PROCESS,
        "seconds": round(incident.seconds, 2),
        # An attempt that was refused held nothing yet.
        "lost": incident.steps_lost if incident.steps_lost > (not anomaly.landed and not has_rewound) else 0,
        "not_over": fact("not_saved") if diagnosis.cause is Cause.PROCESS else recurred,
    }


def known_of(incident: Incident) -> dict[str, Any]:
    """Return the fields of an incident and of its parts, as they are."""
    return {
        name: getattr(part, name)
        for part in (incident, incident.diagnosis, incident.decision, incident.anomaly)
        for name in part.__slots__
    }


def blamed(diagnosis: Diagnosis) -> Facts:
    line = fact("culprit", **asdict(diagnosis.culprit)) if diagnosis.culprit else ()
    return line + (fact("blamed_rows", rows=diagnosis.rows) if diagnosis.rows else ())


def _remedies(actions: Iterable[Action], incident: Incident) -> Facts:
    """Return remedies with their settings, and with what became of them where these say nothing."""
    symptom = incident.diagnosis.symptom
    became: dict[str, dict[str, Any]] = {
        "rewind": {"rewound": incident.rewound_to is not None, "rewound_to": incident.rewound_to},
        "go_on": {"restarted": incident.rewound_to == 0, "rewound_to": incident.rewound_to},
        "quarantine": {"rows": incident.diagnosis.rows},
        "armor": {"symptom": symptom and symptom.place},
    }
    return tuple({"remedy": one.remedy, **one.settings, **became.get(one.remedy, {})} for one in actions)


def tags(incidents: Sequence[Incident], status: str) -> dict[str, str]:
    """Return the tags that MLflow's list of runs is filtered by; a run without incidents has only the first two."""
    found = {"resilience.status": status, "resilience.incidents": str(len(incidents))}
    if incidents:
        found["resilience.last_incident"] = describe(incidents[-1], "line")
        found["resilience.cause"] = ", ".join(dict.fromkeys(one.diagnosis.cause for one in incidents))
    return found
