"""A run directory from a stranger: nothing in it is executed, waited for or believed; each is told in one line."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Outcome, command, train
from safetensors.torch import load_file, save_file
from sealed import CPU, FILES, seal, weights, write

from resilient_train.app.status import status_of
from resilient_train.checkpoint.store import MANIFEST, WEIGHTS, Damaged, Entry, Store
from resilient_train.checkpoint.tree_files import TENSORS, TREE, SerializedTree, load_tree
from resilient_train.numerics.armor import PatchedLine
from resilient_train.record.incident_log import INCIDENTS, IncidentLog
from resilient_train.record.journal import seal as sealed_line
from resilient_train.state.run_state import explain_mismatch
from resilient_train.types import Action, Anomaly, Cause, Decision, Diagnosis, Incident, Signal
from resilient_train.types import Outcome as Outcomes
from resilient_train.update.updater import parameter_groups
from resilient_train.zoo.models import MLP

# Nothing that a stranger writes is waited for.
pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("careless")]

_made: list[Path] = []


@pytest.fixture
def run_dir(run_command: command, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A copy of a run of 20 steps with two good checkpoints or more."""
    if not _made:
        directory = tmp_path_factory.mktemp("strangers") / "run"
        assert train(run_command, directory, 20).code == 0
        assert len(Store(directory).entries()) >= 2
        _made.append(directory)
    return shutil.copytree(_made[0], tmp_path / "run")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def pickled(run_dir: Path) -> bytes:
    return pickle.dumps(Trap(run_dir.parent / "canary"))


Attack = Callable[[Path, Path], Any]  # on the run directory, and its newest checkpoint


def manifest(**fields: Any) -> Attack:
    return lambda run_dir, newest: seal(newest, lambda node: node.update(fields))


def remedies(**fields: Any) -> Attack:
    return lambda run_dir, newest: seal(newest, lambda node: node["remedies"].update(fields))


REFERENCE = {"step": 3, "level": 1.0, "scatter": 0.1, "slope": 0.0, "size": 1.0, "count": 8}
MEASURED = {"goal": 9, "came_from": None, "stands_on": None, "ceiling": None}


def tree(change: Callable[[Any], Any]) -> Attack:
    """Change the state of the run, with digests that are right."""

    def attack(run_dir: Path, newest: Path) -> None:
        content = load_tree(newest)
        changed = change(content)
        (made := run_dir.parent / "made").mkdir()  # what was read may still lie in the files
        SerializedTree(content if changed is None else changed).write(made)
        for file in made.iterdir():
            file.replace(newest / file.name)
        seal(newest)

    return attack


def part(name: str, change: Callable[[Any], Any]) -> Attack:
    """Change one part of the state, to what `change` returns if it returns something."""

    def attack(content: Any) -> None:
        changed = change(content["parts"][name])
        if changed is not None:
            content["parts"][name] = changed

    return tree(attack)


def memory(name: str, value: Any) -> Attack:
    return tree(lambda content: content["memory"].update({name: value}))


def weight(change: Callable[[dict[str, torch.Tensor]], Any]) -> Attack:
    def attack(run_dir: Path, newest: Path) -> None:
        change(tensors := load_file(newest / WEIGHTS))
        save_file(tensors, run_dir.parent / "made")
        (run_dir.parent / "made").replace(newest / WEIGHTS)
        seal(newest)

    return attack


def text_of_tree(text: Callable[[str], str]) -> Attack:
    def attack(run_dir: Path, newest: Path) -> None:
        (newest / TREE).write_text(text((newest / TREE).read_text()))
        seal(newest)

    return attack


def bytes_of(name: str, content: Callable[[Path], bytes]) -> Attack:
    def attack(run_dir: Path, newest: Path) -> None:
        (newest / name).write_bytes(content(run_dir))
        seal(newest)

    return attack


def beside(name: str) -> Attack:
    """A file too many, which would be executed by whoever unpickles it."""
    return lambda run_dir, newest: (newest / name).write_bytes(pickled(run_dir))


def link(name: str) -> Attack:
    """The very same file, but elsewhere."""

    def attack(run_dir: Path, newest: Path) -> None:
        (newest / name).rename(elsewhere := run_dir.parent / "elsewhere")
        (newest / name).symlink_to(elsewhere)

    return attack


def pipe(name: str) -> Attack:
    def attack(run_dir: Path, newest: Path) -> None:
        (newest / name).unlink()
        os.mkfifo(newest / name)

    return attack


def link_of_checkpoint(run_dir: Path, newest: Path) -> None:
    newest.rename(run_dir.parent / "elsewhere")
    newest.symlink_to(run_dir.parent / "elsewhere")


def directory_for_file(run_dir: Path, newest: Path) -> None:
    (newest / TREE).unlink()
    (newest / TREE).mkdir()


def file_for_checkpoint(run_dir: Path, newest: Path) -> None:
    shutil.rmtree(newest)
    newest.write_text("x")


def renamed_in_manifest(name: str) -> Attack:
    """The manifest lists a file somewhere else, with the digest of what is there."""

    def change(node: dict[str, Any]) -> None:
        node["files"][name] = node["files"].pop(TREE)

    return lambda run_dir, newest: seal(newest, change)


def sparse(name: str, size: int) -> Attack:
    return lambda run_dir, newest: os.truncate(newest / name, size)


def header(text: str, length: int | None = None) -> Callable[[Path], bytes]:
    """A safetensors file with this header, and perhaps a length that it does not have."""
    return lambda run_dir: struct.pack("<Q", len(text) if length is None else length) + text.encode()


def plate(**fields: Any) -> Attack:
    good = asdict(PatchedLine("/etc/passwd", "main", "x = 1", 0, 1, "log"))
    return remedies(armor=[{**good, **fields}])


def group(**fields: Any) -> Attack:
    def change(optimizer: Any) -> None:
        optimizer["groups"][0].update(fields)

    return part("optimizer.0", change)


def moment(change: Callable[[dict[str, Any]], Any]) -> Attack:
    return part("optimizer.0", lambda optimizer: change(optimizer["moments"][0]) and None)


def journal(*entries: dict[str, Any]) -> Attack:
    """Entries with checksums that are right behind those that are there."""

    def attack(run_dir: Path, newest: Path) -> None:
        with open(run_dir / "journal.jsonl", "ab") as file:
            for number, entry in enumerate(entries, start=1000):
                file.write(sealed_line(json.dumps({"n": number, "at": 0, **entry})))

    return attack


def progress(*numbers: int) -> Attack:
    def attack(run_dir: Path, newest: Path) -> None:
        record = struct.pack("<6q", *numbers)
        (run_dir / "progress").write_bytes((record + zlib.crc32(record).to_bytes(4, "little")).ljust(128, b"\0"))

    return attack


def file_of_run(name: str, content: bytes | str) -> Attack:
    return lambda run_dir, newest: (run_dir / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def behind(name: str, content: bytes) -> Attack:
    """Add to a file of the run."""
    return lambda run_dir, newest: (run_dir / name).write_bytes((run_dir / name).read_bytes() + content)


def pipe_of_run(name: str) -> Attack:
    def attack(run_dir: Path, newest: Path) -> None:
        (run_dir / name).unlink(missing_ok=True)
        os.mkfifo(run_dir / name)

    return attack


BIAS = "layers.0.bias"
NESTED = '{"dict": {"a": ' * 20_000 + "1" + "}}" * 20_000
LONG = [[0, 10**18]]  # samples to pass over: not to be counted one by one

# The newest checkpoint is refused, an incident says so, and the run goes on from the one before it.
FALLS_BACK: dict[str, Attack] = {
    # Pickles, and files that belong to nothing.
    "weights that are a pickle": bytes_of(WEIGHTS, pickled),
    "tensors that are a pickle": bytes_of(TENSORS, pickled),
    "a tree that is a pickle": bytes_of(TREE, pickled),
    "a manifest that is a pickle": lambda run_dir, newest: (newest / MANIFEST).write_bytes(pickled(run_dir)),
    **{f"beside it {name!r}": beside(name) for name in ("custom_checkpoint_0.pkl", "a\nb.pkl")},
    "a directory too many": lambda run_dir, newest: (newest / "__pycache__").mkdir(),
    # Links, pipes, other places.
    "a link for a checkpoint": link_of_checkpoint,
    **{f"a link for {name}": link(name) for name in (*FILES, MANIFEST)},
    **{f"a pipe for {name}": pipe(name) for name in (*FILES, MANIFEST)},
    "a directory for a file": directory_for_file,
    "a file for a checkpoint": file_for_checkpoint,
    **{
        f"{name} in the manifest": renamed_in_manifest(name)
        for name in ("../../config.yaml", "/etc/passwd", "", "a\nb", f"./{TREE}", "x" * 5000)
    },
    # Sizes.
    "1e18 bytes": lambda run_dir, newest: seal(newest, lambda node: node["files"][TREE].update(bytes=10**18)),
    "a manifest of 1 GB": sparse(MANIFEST, 2**30),
    "weights of 1 TB": sparse(WEIGHTS, 2**40),
    "a header of 2^60 bytes": bytes_of(TENSORS, header("{}", 2**60)),
    "1e12 elements": bytes_of(
        TENSORS, header('{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}')
    ),
    "1e12 elements in the tree": text_of_tree(lambda text: text.replace("[5056]", "[1000000000000]")),
    # JSON.
    "nested deeply": text_of_tree(lambda text: NESTED),
    "a bare NaN": text_of_tree(lambda text: text.replace('"gauss": 0.0', '"gauss": NaN')),
    "a key twice": text_of_tree(lambda text: text.replace('"clock": ', '"clock": 3, "clock": ')),
    "an object with a call": text_of_tree(
        lambda text: text.replace('"clock": ', '"clock": {"_target_": "os.system", "command": "touch canary"}, "c": ')
    ),
    "digits without end": text_of_tree(lambda text: text.replace('"clock": ', '"clock": 1' + "0" * 5000)),
    "another format": manifest(format=2),
    "a key too many": manifest(_target_="os.system"),
    "another kind": manifest(kind="trusted"),
    "a step that it is not": manifest(step=19, tick=10**6),
    # The state of another run.
    "a weight of another shape": weight(lambda tensors: tensors.update({next(iter(tensors)): torch.zeros(3)})),
    "a weight too few": weight(lambda tensors: tensors.pop("layers.0.bias") is None),
    "a weight too many": part("weights", lambda weights: {"\x1b[2J\nroot": torch.zeros(1)}),
    "parts by number": tree(lambda content: content["parts"].update({5: 1, 6: 2})),
    "a buffer from nowhere": part("buffers", lambda buffers: {"evil.buffer": torch.zeros(1)}),
    "a part too many": tree(lambda content: content["parts"].update({"kept.evil": 1})),
    "no state at all": tree(lambda content: {"parts": 1}),
    "a position below 0 in the state": part("position", lambda position: {"position": -32}),
    "moments of another shape": moment(lambda kept: kept.update(exp_avg=torch.zeros(7))),
    "moments of weight 10^9": part("optimizer.0", lambda one: one["moments"].update({10**9: {}})),
    "a group too few": part("optimizer.0", lambda one: one["groups"].pop() and None),
    "a rate of text": group(lr="1e-3"),
    "another optimizer": part("optimizer.0", lambda one: {"x": 1}),
    "numpy's generator, beyond its words": part("random.numpy", lambda state: state["state"].update(pos=10**7)),
    "torch's generator, of zeros": part("random.torch", lambda state: torch.zeros(5056, dtype=torch.uint8)),
    "nothing that checks remember": tree(lambda content: content.update(memory={})),
}

# With digests that are right, what fits the run is believed as far as it goes; then one line says why not.
REFUSED: dict[str, Attack] = {
    "knobs of text": remedies(knobs={"lr": "fast"}),
    "skipped backwards": remedies(skipped=[[9, 3]]),
    "armor that is text": remedies(armor="text"),
    "armored nonsense": remedies(armored=[1, 2]),
    "a reference of infinite losses": remedies(
        reference={**MEASURED, "reference": {**REFERENCE, "level": float("inf")}}
    ),
    "an infinite patience": remedies(knobs={"lr": 1.0, "clip": 1.0, "eps": 1.0, "higher_precision": float("inf")}),
    "groups of another optimizer": manifest(groups=[]),
    "statistics of another run": memory("statistics", {"panel": {}, "scans": {}}),
    "a panel of text": memory("panel", {"path": "text", "alarms": 5}),
    "remembered text": memory("remembered", {"run": "text"}),
    "remedies in the journal that are none": journal(
        {"kind": "remedies_in_force", "remedies": {"tick": 99, "knobs": 1}}
    ),
    "another batch size": manifest(samples=31),
}

# What is nonsense, and does no harm, in any number.
HARMLESS: dict[str, tuple[Attack, ...]] = {
    "nothing done to it": (lambda run_dir, newest: seal(newest),),
    "garbage": (
        remedies(skipped=LONG),
        file_of_run("progress", random.Random(1).randbytes(128)),
        file_of_run("quarantine.json", "[1, 2"),
        file_of_run("summary.json", "[[1], 2"),
        behind("journal.jsonl", b"\x00\xff{}\n" * 99),
    ),
    "programs": (
        manifest(mlflow="../../x\n$(touch canary)"),
        plate(),  # on a file that is no program
        file_of_run("progress", b"x" * 5000),
        file_of_run("mlflow.json", '{"run_id": "$(touch canary)", "tracking_uri": []}'),
        file_of_run("summary.json", '["completed", 20]'),
        file_of_run("config.yaml", "!!python/object/apply:os.system ['touch canary']"),
    ),
    "entries of nonsense": (
        remedies(tick="x"),
        file_of_run("progress", b""),
        pipe_of_run("mlflow.json"),
        journal(
            {"kind": "incident_opened", "incident": {"_target_": "os.system"}},
            {"kind": "incident_closed", "incident": [1]},
            {"kind": "drill_fired", "drill": "x"},
            {"kind": "process_ended", "start": -5, "stop": "x"},
            {"kind": "remedies_in_force", "remedies": "text"},
            {"kind": "os.system", "command": "touch canary"},
            {"kind": "checkpoint_saved", "step": "x"},
        ),
        behind("config.yaml", b"evil: {_target_: os.system, command: touch canary}\n"),
    ),
    "a pipe for the progress, a secret, a plate on a file that was not imported": (
        plate(file="/elsewhere/evil.py"),
        pipe_of_run("progress"),
        behind("config.yaml", b"x: ${oc.env:HOME}\n"),
    ),
}


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(run_dir / WEIGHTS).items()}


def errors(outcome: Outcome) -> list[str]:
    return [line for line in (outcome.stdout + outcome.stderr).splitlines() if line.startswith("error")]


def damaged(run_dir: Path) -> list[str]:
    """What the incidents about damaged checkpoints say."""
    incidents = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    return [one["evidence"] for one in incidents if one["signal"] == "checkpoint_damaged"]


def attacked(run_dir: Path, run_command: command, *attacks: Attack) -> Outcome:
    """Go on with a run after attacks: nothing was executed, and no traceback is shown."""
    (run_dir / "summary.json").unlink()
    for attack in attacks:
        attack(run_dir, Store(run_dir).entries()[0].path)
    outcome = train(run_command, run_dir, 21)
    assert not [path for path in (run_dir.parent / "canary", Path("canary"), run_dir / "canary") if path.exists()]
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert "\x1b" not in outcome.stdout + outcome.stderr
    return outcome


@pytest.mark.parametrize("what", FALLS_BACK)
def test_a_forged_checkpoint_is_damage(run_dir: Path, what: str) -> None:
    """Whatever it is forged from, it is refused in one line before anything of it is taken."""
    parts = Store.load(Store(run_dir).entries()[0], CPU, known := weights_of(run_dir)).parts
    live = pickle.loads(pickle.dumps(parts))  # our own: it lets go of the files
    FALLS_BACK[what](run_dir, Store(run_dir).entries()[0].path)
    entry = Store(run_dir).entries()[0]
    why = entry.damage
    if entry.manifest is not None:
        try:
            saved = Store.load(entry, CPU, known)
        except Damaged as error:
            why = str(error)
        else:
            model = MLP()
            groups = parameter_groups(model, no_decay=["1d"])
            why = explain_mismatch(live, saved.parts, model, [torch.optim.AdamW(groups)])
            why = why or ("it lacks memory" if "panel" not in saved.memory else "")
    assert why
    assert len(why.splitlines()) == 1
    assert len(why) < 300
    assert "\x1b" not in why
    assert not (run_dir.parent / "canary").exists()


@pytest.mark.parametrize(
    "what", [*("weights that are a pickle", "a link for a checkpoint", "moments of another shape")]
)
def test_a_forged_checkpoint_is_passed_over(run_dir: Path, run_command: command, what: str) -> None:
    """It is told in one line, the one before it is taken, and the run ends well."""
    outcome = attacked(run_dir, run_command, FALLS_BACK[what])
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    (told,) = damaged(run_dir)
    assert "\n" not in told
    assert len(told) < 400
    assert outcome.stderr.count("a checkpoint is damaged") + outcome.stdout.count("a checkpoint is damaged") == 1


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_gone_on_from_is_told_in_one_line(run_dir: Path, run_command: command, what: str) -> None:
    """The run stops with 1 and a line, or passes over the checkpoint."""
    outcome = attacked(run_dir, run_command, REFUSED[what])
    told = errors(outcome) if outcome.code else damaged(run_dir)
    assert outcome.code in (0, 1)
    assert len(told) == 1, outcome.stdout + outcome.stderr
    assert len(told[0]) < 700


@pytest.mark.parametrize("what", HARMLESS)
def test_nonsense_beside_a_good_state_does_no_harm(run_dir: Path, run_command: command, what: str) -> None:
    """The run goes on from its newest checkpoint."""
    outcome = attacked(run_dir, run_command, *HARMLESS[what])
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    assert "resumes from step 20" in outcome.stdout + outcome.stderr
    assert not damaged(run_dir)


# The manifest, by itself.

ODD: list[Any] = [None, True, False, 0, 1, -1, 1.5, 1e300, 10**30, "", "x", "\ud800", "../.."]
ODD += [[], [1], {}, {"a": 1}, [[[[[]]]]]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(Store(tmp_path_factory.mktemp("small")), 5).path


FREE = ("tick", "position", "world", "samples", "config", "made_by", "at", "mlflow", "remedies", "groups")


KEYS = [(name,) for name in (*FREE, "format", "kind", "step", "files", "unknown")]
KEYS_OF_FILES: list[tuple[str, ...]] = [(TREE,), (TREE, "bytes"), (TREE, "sha256"), ("more",)]


@pytest.mark.parametrize("keys", [*KEYS, *(("files", *keys) for keys in KEYS_OF_FILES)], ids=".".join)
def test_odd_values_in_a_manifest_are_refused_or_fit(small: Path, tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Whatever stands there: the checkpoint is Damaged in one line, or loads with a value of the right type."""
    for number, odd in enumerate([*ODD, "ABSENT"]):
        checkpoint = shutil.copytree(small, tmp_path / f"step-{number:08}")

        def change(node: dict[str, Any], odd: Any = odd) -> None:
            for key in keys[:-1]:
                node = node[key]
            node[keys[-1]] = odd
            if odd == "ABSENT":
                del node[keys[-1]]

        seal(checkpoint, change)
        entry = Entry.of(checkpoint)
        assert "\n" not in entry.damage
        assert len(entry.damage) < 300
        with contextlib.suppress(Damaged):
            Store.load(entry, CPU, weights(5))
            assert entry.manifest is not None
            assert keys[0] in FREE or odd in (1, "ABSENT")  # as it was


@pytest.mark.parametrize("whole", [None, 1, "x", [], [1], {}, {"format": 1}, {"format": 1, "sha256": 5}], ids=repr)
def test_a_manifest_that_is_something_else_is_refused(small: Path, tmp_path: Path, whole: Any) -> None:
    """Any JSON at all is read, and none but a manifest is one."""
    checkpoint = shutil.copytree(small, tmp_path / "step-00000005")
    seal(checkpoint, lambda node: whole if whole is not None else [None])
    assert Entry.of(checkpoint).manifest is None


# Files of the run that would be written to.


WRITTEN = ("config.yaml", "summary.json", "incidents.jsonl", "weights.safetensors", "progress", "mlflow.json")


@pytest.mark.parametrize("names", [WRITTEN, ("journal.jsonl",), (".lock",), ("train.log",)], ids=lambda one: one[0])
def test_nothing_is_written_through_a_link(
    run_dir: Path, run_command: command, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """A stranger's link to somebody's file leaves that file as it is."""
    theirs = tmp_path / "precious"
    theirs.write_text("precious\n")
    for name in names:
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).symlink_to(theirs)
    outcome = train(run_command, run_dir, 21)
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert outcome.code == 0 or names != WRITTEN, "each of them is written by a run that ends"
    assert theirs.read_text() == "precious\n"


# Nothing is waited for.


READ = ("progress", "mlflow.json", "summary.json", "weights.safetensors", "best.json", ".launch")
NEEDED = ("journal.jsonl", "config.yaml", "incidents.jsonl", "quarantine.json", "train.log", ".lock")


@pytest.mark.parametrize("names", [READ, *((name,) for name in NEEDED)], ids=lambda one: one[0])
def test_a_pipe_in_place_of_a_file_of_the_run_is_not_waited_for(
    run_dir: Path, run_command: command, names: tuple[str, ...]
) -> None:
    """Nobody is ever at its other end: the run goes on without, or says in one line that it cannot."""
    for name in names:
        pipe_of_run(name)(run_dir, run_dir)
    outcome = train(run_command, run_dir, 21)
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert outcome.code == 0 or (names != READ and len(errors(outcome)) == 1)


@pytest.mark.parametrize("name", [".lock", "progress", "config.yaml", "summary.json", "refused.json", "train.log"])
def test_a_pipe_keeps_nobody_who_asks_where_the_run_stands(run_dir: Path, name: str) -> None:
    """The end of train.log is looked at where a run failed."""
    (run_dir / "summary.json").write_text('{"status": "failed", "exit_code": 1, "steps": 20}')
    pipe_of_run(name)(run_dir, run_dir)
    assert status_of(run_dir).state in ("failed", "killed", "none")


def test_a_pipe_that_takes_the_place_of_a_file_meanwhile_keeps_nobody(tmp_path: Path) -> None:
    """What is listed next is listed in a file again."""
    book, closed = IncidentLog(tmp_path), Decision((Action("skip"),))
    for number in (1, 2, 3):
        anomaly = Anomaly(Signal.NONFINITE_GRAD, number, number, number - 1, "")
        book.close(Incident(number, anomaly, Diagnosis(Cause.TRANSIENT, ""), closed, outcome=Outcomes.RECOVERED))
        if number == 1:
            pipe_of_run(INCIDENTS)(tmp_path, tmp_path)
    lines = (tmp_path / INCIDENTS).read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 2, 3]


def test_samples_without_end_that_ended_a_process_are_not_counted(run_dir: Path, run_command: command) -> None:
    """A record of 2^62 samples; the second time they are passed over, and named without a list of all of them."""
    journal({"kind": "process_ended", "tick": 19, "start": 0, "stop": 2**62})(run_dir, run_dir)
    outcome = attacked(run_dir, run_command, progress(7, 1, 20, 20, 0, 2**62))
    assert outcome.code in (0, 1)
