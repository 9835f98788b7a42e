"""No sentence is data: with the words of all of them in another order, runs decide what they decide else."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command import MINE
from fork_server import Forked, python
from test_killed_anywhere import train

import resilient_train
from resilient_train.durable.journal import JOURNAL, Journal, read
from resilient_train.ground import sentences, wording

PACKAGE = Path(resilient_train.__file__).parent
GIVES_UP = ["drill=inf_loss", "drill.at=[20,21,22,23,24,25]", "recovery.budget.in_a_row=3"]
OF_SUMMARY = ("status", "exit_code", "steps", "ticks", "trial_updates", "verdict", "final_loss", "weights_sha256")


def killed(entries: int) -> None:
    """Train to the entry of the journal with this number."""
    write = Journal.write

    def writing(journal: Journal, kind: str, /, **fields: Any) -> None:
        write(journal, kind, **fields)
        if len(journal.entries) == entries:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.write = writing  # type: ignore[method-assign]
    train(Path("run"))


# Each is started so often, one start after the other.
RUNS: dict[str, list[Callable[[], None]]] = {
    "ten faults": [partial(train, Path("run"))],
    "killed and resumed": [partial(killed, 40), partial(train, Path("run"))],
    "gives up": [partial(python, "-m", "resilient_train", *MINE, *GIVES_UP, "run.dir=run", "run.steps=60")] * 2,
}


def with_words_shuffled(what: Callable[[], None]) -> None:
    """Do it with the words of each template in another order; fields and optional parts stay whole."""
    dice = random.Random(0)

    def shuffled(text: Any) -> Any:
        if isinstance(text, tuple):
            return tuple(map(shuffled, text))
        parts = re.findall(r"<[^<>]*>|\{[^{}]*\}|[^\s<>{}]+", text)
        return " ".join(dice.sample(parts, len(parts)))

    for name, value in [*vars(sentences).items()]:
        if isinstance(value, dict) and name.isupper():
            value.update({key: shuffled(text) for key, text in value.items()})
        elif isinstance(value, str) and name.isupper():
            for other in [one for one in sys.modules.values() if getattr(one, name, None) is value]:
                setattr(other, name, shuffled(value))
    what()


def facts_of(place: Path) -> Iterator[Any]:
    """Everything that runs have written as data; what a clock says is left out."""
    for journal in sorted(place.rglob(JOURNAL)):
        for entry in read(journal):
            (entry.get("incident") or {}).pop("seconds", None)
            yield [entry["n"], entry["kind"], {name: one for name, one in entry.items() if name not in ("at", "crc")}]
        if (file := journal.with_name("summary.json")).exists():  # a loop of the caller's may have none
            yield {name: json.loads(file.read_text()).get(name) for name in OF_SUMMARY}
        if (file := journal.with_name("quarantine.json")).exists():
            yield [[row["row"], row["step"], row["incident"]] for row in json.loads(file.read_text())["rows"]]


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_says_decides_nothing(name: str, tmp_path: Path) -> None:
    """Nothing parses or compares a sentence: all facts are the same where each says something else."""
    facts, said, codes = [], [], []
    for folder in ("said", "shuffled"):
        (place := tmp_path / folder).mkdir()
        for start in RUNS[name]:
            start = partial(with_words_shuffled, start) if folder == "shuffled" else start
            codes.append(Forked(start, place=place, out=place / "out.txt").wait())
        facts.append([json.dumps(one, sort_keys=True).replace(str(place), "") for one in facts_of(place)])
        said.append("".join(file.read_text() for file in sorted(place.rglob("incidents.jsonl"))))
    assert codes[: len(codes) // 2] == codes[len(codes) // 2 :]
    assert facts[0] == facts[1]
    assert any("incident_opened" in one for one in facts[0])
    assert said[0] != said[1], "the words were shuffled"


# --------------------------------------------------------------------------------------------------- what the code says

SAYING = {  # what returns words
    name
    for name, one in vars(wording).items()
    if getattr(one, "__module__", "") == wording.__name__
    and one.__annotations__.get("return") in ("str", "list[str]", "dict[str, str]")
}
TAKING_APART = re.compile(
    "replace|r?partition|r?split|splitlines|(starts|ends)with|find|index|count|remove(pre|suf)fix"
)
KEEPING = {"fact", "Anomaly", "Diagnosis", "Decision", "ProcessIncident"}


def name_of(call: ast.AST) -> str:
    function = call.func if isinstance(call, ast.Call) else None
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def offences(tree: ast.Module) -> Iterator[ast.expr]:
    """Where a sentence is compared, searched or taken apart, and where one is put into a fact."""
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        yield from offences_in([*of_scope(scope)])


def of_scope(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef):
            yield from of_scope(node)


def offences_in(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    said = [node for node in nodes if isinstance(node, ast.Assign) and name_of(node.value) in SAYING]
    names = {target.id for node in said for target in node.targets if isinstance(target, ast.Name)}

    def is_said(node: ast.AST) -> bool:
        return name_of(node) in SAYING or (isinstance(node, ast.Name) and node.id in names)

    for node in nodes:
        match node:
            case ast.Compare(left=left, comparators=others) if any(map(is_said, [left, *others])):
                yield node
            case ast.Subscript(value=value) if is_said(value):
                yield node
            case ast.Match(subject=subject) if is_said(subject):
                yield subject
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if is_said(value) and TAKING_APART.fullmatch(
                name
            ):
                yield node
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=given) if any(map(is_said, given)):
                yield node
            case ast.Call(args=args, keywords=named) if name_of(node) in KEEPING:
                parts = [*args, *(key.value for key in named)]
                inside: list[ast.AST] = [part for one in parts for part in ast.walk(one)]
                texts = (one.value for one in inside if isinstance(one, ast.Constant) and isinstance(one.value, str))
                if any(len(text.split()) > 5 for text in texts):
                    yield node


def test_no_code_reads_sentences_or_keeps_them_as_facts() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.name != "wording.py"
        for node in offences(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_such_code_is_found() -> None:
    """Each of these lines, and none of the others."""
    bad = """\
if "hardware" in say(facts): pass
say(facts).partition(": ")
re.sub("a", "b", describe(incident))
describe(incident) == other
words = wording.say(facts); "x" in words
say(facts)[:3]
fact("text", text="it is what it was some time ago")
Diagnosis(Cause.DATA, advice="look at the rows of this batch")"""
    good = 'say(facts).strip()\nfact("text", text=str(error))\nlog.info("%s", say(facts))\nsaid in words'
    assert sorted(node.lineno for node in offences(ast.parse(bad))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not [*offences(ast.parse(good))]
