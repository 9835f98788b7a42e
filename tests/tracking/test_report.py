"""What a person reads of a run in MLflow: the verdict first, and all of it, whatever a stranger has named his files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forged_checkpoints import manifest
from hypothesis import example, given, settings
from hypothesis import strategies as some
from markdown_it import MarkdownIt
from markdown_it.token import Token
from stories import BAD_ROW, CLIMBED, PASSED, ROOT, free_text, incident, story

from resilient_train.durable.manifest import Entry, sealed
from resilient_train.ground.types import Culprit, Decision, Incident, Outcome, fact
from resilient_train.report.story import Story, open_advice, read_story
from resilient_train.report.uploader import note

LIMIT = 8_000  # characters of a tag in MLflow
HOSTILE = "a|b`c`\n# <script>alert(1)</script> [x](http://evil) ![y](z) **b** __init__ ~~s~~ :smile: @me &amp; \\| $x$"

READER = MarkdownIt("commonmark")
SYNTAX = list("|`*_[]<>()\\\n#-=~:@&!.$")
strange = some.text(some.characters(exclude_categories=["Cs"]) | some.sampled_from(SYNTAX), max_size=80)


def inline(markdown: str) -> Iterator[Token]:
    for block in READER.parse(markdown):
        yield block
        yield from block.children or ()


# ---------------------------------------------------------------------------------------------------------------- note


def hostile(one: Incident, words: str) -> Incident:
    culprit = Culprit("forward", words, words, f"/{words * 20}/{words}.py", 3, ({words: words},))
    diagnosis = replace(ROOT, advice=free_text(words), culprit=culprit, rows=tuple(range(30)))
    decision = Decision(one.decision.actions, 0, free_text(words) if one.outcome is Outcome.GAVE_UP else None)
    return replace(one, anomaly=replace(one.anomaly, evidence=free_text(words)), diagnosis=diagnosis, decision=decision)


@settings(max_examples=25, deadline=None)
@given(words=some.lists(strange, min_size=1, max_size=3), count=some.sampled_from((1, 3, 8)))
@example(words=[HOSTILE], count=40)
def test_whatever_was_named_the_note_is_under_the_limit_and_in_lines(words: list[str], count: int) -> None:
    """Names of files, modules and rows, advice, errors, paths: of strangers, and as long as they like."""
    outcomes = (Outcome.RECOVERED, None, Outcome.GAVE_UP)
    met = [hostile(incident(at, outcomes[at % 3]), words[at % len(words)]) for at in range(1, count + 1)]
    place = Path("/", *[words[0].replace("\0", "") or "x"] * 40)
    kept = Entry(place, manifest(7, {}))
    remedies = {"armor": [{"op": words[0], "file": words[0], "line": 3}] * 9, "knobs": {"lr": 0.5}, "skipped": [[1, 9]]}
    of = story(*met, status="failed", why=words[0], newest=kept, remedies=remedies, directory=place)
    said = note(of)
    assert len(said) < LIMIT
    shown = [line for line in said.splitlines() if line.startswith("- incident ")]
    assert [int(line.split()[2].rstrip(",")) for line in shown] == list(range(count, count - len(shown), -1))
    assert len(shown) >= min(count, 2)
    kinds = {one.type for one in inline(said)}
    assert not kinds & {
        "html_inline",
        "html_block",
        "image",
        "fence",
        "code_block",
        "blockquote_open",
        "hr",
        "link_open",
    }


# -------------------------------------------------------------------------------------------------------------- advice


def test_advice_is_told_once_for_each_line_cause_and_all_rows_the_most_important_first() -> None:
    """First what was not cured, then what is not cured yet, lines, rows, settings; not what passed and stayed away."""
    met = [
        incident(1, diagnosis=CLIMBED),
        incident(2, diagnosis=BAD_ROW),
        incident(3, diagnosis=ROOT),
        incident(4, diagnosis=PASSED),
        incident(5, diagnosis=ROOT),
        incident(6, diagnosis=replace(BAD_ROW, rows=(9,))),
        incident(7, None, diagnosis=replace(PASSED, advice=fact("open"))),
        incident(8, Outcome.GAVE_UP, diagnosis=replace(PASSED, advice=fact("gave_up"))),
    ]
    assert open_advice(met) == [
        (fact("gave_up"), [8]),
        (fact("open"), [7]),
        (fact("all_rows", rows=[9, 77]) + BAD_ROW.advice, [2, 6]),
        (ROOT.advice, [3, 5]),
        (CLIMBED.advice, [1]),
    ]
    returned = [incident(1, diagnosis=PASSED), incident(2, diagnosis=PASSED)]
    passed = [replace(one, anomaly=replace(one.anomaly, signal=returned[0].anomaly.signal)) for one in returned]
    assert open_advice(passed) == [(PASSED.advice, [1, 2])]
    assert not open_advice([incident(4)])


# --------------------------------------------------------------------------------------------------------------- story


def saved(run_dir: Path, name: str, step: int, **said: Any) -> Path:
    place = run_dir / "checkpoints" / name
    place.mkdir(parents=True)
    (place / "manifest.json").write_bytes(sealed(manifest(step, {}, **said)))
    return place


def test_a_story_knows_what_is_left_of_a_run(tmp_path: Path) -> None:
    """Of what is demoted, or is no checkpoint, nothing is told."""
    saved(tmp_path, "step-00000050", 50, tick=70)
    saved(tmp_path, "step-00000025", 25)
    left = saved(tmp_path, "step-00000060", 60, kind="candidate", tick=80)
    saved(tmp_path, "step-00000070.demoted", 70, tick=90)
    (tmp_path / "checkpoints" / "step-00000090").mkdir()
    (tmp_path / "config.yaml").write_text("run: {steps: 300}")
    (tmp_path / "summary.json").write_text(
        json.dumps({"status": "preempted", "exit_code": 75, "steps": 60, "ticks": 80})
    )
    of = read_story(tmp_path)
    assert (of.status, of.step, of.tick, of.steps) == ("preempted", 60, 80, 300)
    assert of.newest is not None
    assert (of.newest.path, of.newest.kind) == (left, "candidate")
    assert of.remedies == {"tick": 60, "skipped": [[8, 12]]}
    assert f"newest checkpoint: {left} (step 60, not yet verified)".replace("_", r"\_") in note(of)


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"step": -1}', '{"kind": "verified", "step": true}', "\0"])
def test_a_story_of_a_damaged_directory_is_told_all_the_same(content: str, tmp_path: Path) -> None:
    for name in ("summary.json", "quarantine.json", "config.yaml", "journal.jsonl", "progress", "train.log"):
        (tmp_path / name).write_text(content)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text(content)
    of: Story = read_story(tmp_path)
    assert (of.status, of.newest) == ("killed", None)
    assert note(of).startswith("**Killed (no exit message).** **Do:** Start it again\n\n- at step 0; no incidents")
