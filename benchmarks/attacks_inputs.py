"""The inputs of `attacks.py`, group by group: a name, and what is done and has to hold in a place of its own."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attacks_place import Place
from kills import SAVING
from sealed import seal

Attack = Callable[["Place"], object]
NEWEST = "checkpoints/step-00000020"
DEEP = "[" * 200_000
CHECKPOINT = ("manifest.json", "tree.json", "tensors.safetensors", "weights.safetensors")
RUN_FILES: tuple[str, ...] = (
    ".lock",
    "config.yaml",
    "incidents.jsonl",
    "journal.jsonl",
    "progress",
    "quarantine.json",
    "summary.json",
)
RUN_FILES += ("train.log", "weights.safetensors")


def inputs() -> Mapping[str, Mapping[str, Attack]]:
    """All of them, by group."""
    from attacks_around import ENVIRONMENT, SIGNALS
    from attacks_delivery import DELIVERY, SECRETS
    from attacks_loops import DATA, GUARD

    return {
        "files": FILES,
        "checkpoints": CHECKPOINTS,
        "configuration": CONFIGURATION,
        "environment": ENVIRONMENT,
        "secrets": SECRETS,
        "signals": SIGNALS,
        "data": DATA,
        "guard": GUARD,
        "delivery": DELIVERY,
    }


# --------------------------------------------------------------------------------------------------------------- files


def resumes(harm: Callable[[Place], object], *words: str, **environment: Any) -> Attack:
    """Harm a copy of a run: every verb answers, and the same command goes on or is refused."""

    def attack(place: Place) -> None:
        place.copy()
        harm(place)
        place.asked()
        place.resumes(*words, **environment)

    return attack


def _flip(file: Path, at: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 4
    file.write_bytes(content)


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(file: Path) -> None:
        file.unlink(missing_ok=True)
        make(file)

    return harm


def _other(file: Path) -> None:
    """The same file of another run."""
    place = next(one for one in file.parents if (one / "precious").exists())
    theirs = place.parent / "other" / file.relative_to(place / "run")
    shutil.copy(theirs, file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": _cut,
    "with a flipped bit": _flip,
    "emptied": lambda file: os.truncate(file, 0),
    "as a directory": _instead(lambda file: (file / "x").mkdir(parents=True)),
    "as a link to a file of mine": _instead(lambda file: file.symlink_to(file.parents[-3] / "precious")),
    "that is no text": lambda file: file.write_bytes(b"\xff\xfe{" + random.Random(1).randbytes(2000)),
    "of another run": _other,
}


def damaged(name: str, how: str) -> Callable[[Place], object]:
    def harm(place: Place) -> None:
        file = place.run_dir / name
        file.touch()  # .lock is not always there
        if "link" in how:
            file.unlink()
            file.symlink_to(place.path / "precious")
        else:
            DAMAGES[how](file)

    return harm


def digest_flipped(place: Place) -> None:
    """The data is right: a digest that is not is damage, and told as such if it keeps the run from going on."""
    place.copy()
    file = place.run_dir / "quarantine.json"
    text = file.read_text()
    at = text.index('"9": "') + 10
    file.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
    said = place.resumes()
    if said.code and "damage" not in said.text and "checksum" not in said.text:
        place.fails(f"takes a flipped bit for other data: {said.last}")


def evil_yaml(place: Place) -> None:
    (place.run_dir / "config.yaml").write_text(f"a: !!python/object/apply:os.system ['touch {place.canary}']\n")


def target_yaml(place: Place) -> None:
    with open(place.run_dir / "config.yaml", "a") as file:
        file.write(
            f"evil: {{_target_: os.system, command: 'touch {place.canary}'}}\nenv: ${{oc.env:CANARY_API_TOKEN}}\n"
        )


def only_checkpoints(place: Place) -> None:
    for file in place.run_dir.iterdir():
        if file.is_file():
            file.unlink()


FILES: dict[str, Attack] = {"nothing done to it": resumes(lambda place: None)}
FILES |= {f"{name} {how}": resumes(damaged(name, how)) for name in RUN_FILES for how in DAMAGES}
FILES |= {
    "a flipped digit in a digest of quarantine.json": digest_flipped,
    "config.yaml with a tag that executes": resumes(evil_yaml),
    "config.yaml with a target": resumes(target_yaml),
    "all files but the checkpoints removed": resumes(only_checkpoints),
}


# --------------------------------------------------------------------------------------------------------- checkpoints


class Trap:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def forged(name: str, content: Callable[[Place], bytes]) -> Attack:
    """A file with a digest that is right."""

    def harm(place: Place) -> None:
        (place.run_dir / NEWEST / name).write_bytes(content(place))
        seal(place.run_dir / NEWEST)

    return resumes(harm)


def manifest(change: Callable[[dict[str, Any]], Any]) -> Attack:
    return resumes(lambda place: seal(place.run_dir / NEWEST, change))


def pickled(place: Place) -> bytes:
    return pickle.dumps(Trap(place.canary))


def torched(place: Place) -> bytes:
    import torch

    torch.save({"weights": Trap(place.canary)}, place.path / "made.pt")
    return (place.path / "made.pt").read_bytes()


def tree(change: Callable[[str], str]) -> Attack:
    return forged("tree.json", lambda place: change((place.run_dir / NEWEST / "tree.json").read_text()).encode())


def to_mine(name: str) -> Callable[[Place], None]:
    """A link to a directory in which something of mine lies."""

    def harm(place: Place) -> None:
        shutil.rmtree(place.run_dir / name, ignore_errors=True)
        (place.path / "precious-directory").mkdir()
        (place.path / "precious-directory" / "mine").write_text("mine")
        (place.run_dir / name).symlink_to(place.path / "precious-directory")

    return harm


def link_for_checkpoint(place: Place) -> None:
    (place.run_dir / NEWEST).rename(place.path / "elsewhere")
    (place.run_dir / NEWEST).symlink_to(place.path / "elsewhere")


def demoted(place: Place) -> None:
    """What was demoted is nobody's last good state, however high its number."""
    place.copy()
    later = shutil.copytree(place.run_dir / NEWEST, place.run_dir / "checkpoints/step-00000099")
    seal(later, lambda node: node.update(kind="demoted", step=99, tick=99))
    summary = json.loads((place.run_dir / "summary.json").read_text()) | {"status": "gave_up", "exit_code": 3}
    (place.run_dir / "summary.json").write_text(json.dumps(summary))
    said = [place.verb("status"), place.train("run.steps=20")]
    for one in said:
        if "step-00000099" in one.text:
            place.fails(f"{one.what} names a demoted state: {one.last}")


def every(harm: Callable[[Path], object]) -> Callable[[Place], object]:
    return lambda place: [harm(one / "tensors.safetensors") for one in (place.run_dir / "checkpoints").glob("step-*")]


def begun_from(key: str, make: Callable[[Place], object]) -> Attack:
    """A path of a stranger's file in the configuration: refused, or of no consequence."""

    def attack(place: Place) -> None:
        make(place)
        place.refused(place.train(f"{key}=given"), 1, 2)

    return attack


GIVEN: dict[str, Callable[[Place], object]] = {
    "a pickle": lambda place: (place.path / "given").write_bytes(pickled(place)),
    "a file of torch's": lambda place: (place.path / "given").write_bytes(torched(place)),
    "nested deeply": lambda place: (place.path / "given").write_text(DEEP),
    "a directory": lambda place: (place.path / "given").mkdir(),
}

CHECKPOINTS: dict[str, Attack] = {
    f"{name} {how}": resumes(damaged(f"{NEWEST}/{name}", how)) for name in CHECKPOINT for how in DAMAGES
}
CHECKPOINTS |= {f"{name} that is a pickle": forged(name, pickled) for name in CHECKPOINT[1:]}
CHECKPOINTS |= {f"run.init_from {what}": begun_from("run.init_from", GIVEN[what]) for what in GIVEN}
CHECKPOINTS |= {f"run.resume {what}": begun_from("run.resume", GIVEN[what]) for what in ("a pickle", "a directory")}
CHECKPOINTS |= {f"quarantine of {what}": begun_from("data.quarantine", GIVEN[what]) for what in GIVEN}
CHECKPOINTS |= {
    "a manifest that is a pickle": resumes(
        lambda place: (place.run_dir / NEWEST / "manifest.json").write_bytes(pickled(place))
    ),
    "weights of torch's": forged("weights.safetensors", torched),
    "custom_checkpoint_0.pkl": resumes(
        lambda place: (place.run_dir / NEWEST / "custom_checkpoint_0.pkl").write_bytes(pickled(place))
    ),
    "a tree nested deeply": tree(lambda text: DEEP),
    "a tree with a target": tree(
        lambda text: text.replace('"clock": ', '"clock": {"_target_": "os.system", "command": "touch canary"}, "c": ')
    ),
    "a manifest of another format": manifest(lambda node: node.update(format=2)),
    "a link for a checkpoint": resumes(link_for_checkpoint),
    "a link for all checkpoints": resumes(to_mine("checkpoints")),
    "a link where a checkpoint is made": resumes(to_mine(SAVING)),
    "a link for best": resumes(
        to_mine("best"), "run.eval_every=5", "data.eval._target_=attacks_programs.Healthy", "run.steps=30"
    ),
    "all checkpoints damaged": resumes(every(_flip)),
    "all checkpoints emptied": resumes(every(lambda file: os.truncate(file, 0))),
    "no checkpoints": resumes(lambda place: shutil.rmtree(place.run_dir / "checkpoints")),
    "a demoted one with the highest number": demoted,
}


# ------------------------------------------------------------------------------------------------------- configuration


def wrong(*words: str, codes: Sequence[int] = (2,), files: Mapping[str, str] | None = None) -> Attack:
    """A configuration that is refused in one line, before anything of it is called."""

    def attack(place: Place) -> None:
        for name, text in (files or {}).items():
            (place.path / name).parent.mkdir(parents=True, exist_ok=True)
            (place.path / name).write_text(text.replace("CANARY", str(place.canary)))
        place.refused(place.train(*(word.replace("CANARY", str(place.canary)) for word in words)), *codes)

    return attack


def policy(text: str) -> Attack:
    return wrong("--config-dir=mine", "recovery=evil", files={"mine/recovery/evil.yaml": text})


NUMBERS = [
    *("run.step_timeout", "run.start_timeout", "run.save_timeout", "run.grace", "run.max_hours", "run.steps"),
    *("clip.max_norm", "clip.max_value", "checkpoint.memory.max_gib", "checkpoint.memory.every", "optimizer.lr"),
    *("checkpoint.disk.every", "checkpoint.verify_after", "checks.jump.sigmas", "checks.limit.grad_factor"),
    *("recovery.budget.share", "recovery.relax_after", "schedule.warmup_steps", "data.batch_size", "model.dropout"),
    *("optimizer.weight_decay", "optimizer.eps", "run.seed", "run.eval_every"),
]
LADDER = "recovery.ladders.default="
CONFIGURATION: dict[str, Attack] = {f"{key}=nan": wrong(f"{key}=nan") for key in NUMBERS}
CONFIGURATION |= {f"{key}=inf": wrong(f"{key}=inf") for key in NUMBERS[:12]}
CONFIGURATION |= {
    word: wrong(word)
    for word in (
        *("run.steps=-1", "run.steps=1e400", "run.steps=${oc.env:NOPE}", "run.seed=-1"),
        *("data.batch_size=0", "data.batch_size=64.5", "data.num_workers=-1", "run.nope=1", "model=nope"),
        *(
            "clip.max_norm=-1",
            "clip.max_norm=[1]",
            "checkpoint.disk.keep={}",
            "checks.jump=text",
            "run.steps=\U0001f600",
        ),
        *("run.seed=nan", "run.log_every=-5", "recovery.budget.share=7", "run.steps=[" + "[" * 100, "=", "run.steps="),
        *("model.hidden=[-1]", "model.hidden=text", "objective._target_=attacks_programs", "run.steps=${run.steps}"),
    )
}
CONFIGURATION |= {
    f"a remedy {remedy}": wrong(f"{LADDER}[{remedy}]")
    for remedy in (
        '[{os.system:{command:"touch CANARY"}}]',
        '[{subprocess.call:{args:[touch,"CANARY"]}}]',
        '[{pathlib.Path.touch:{self:"CANARY"}}]',
        '[{builtins.exec:{source:"open(\\"CANARY\\",\\"w\\")"}}]',
        "[attacks_programs.network]",
        '[{_target_:os.system,command:"touch CANARY"}]',
        *("[nope]", "5", "[[[[[skip]]]]]", "[{lower_lr:{factor:nan}}]", "[{lower_lr:{factor:-1}}]"),
        *("[{lower_lr:{factor:fast}}]", "[{rewind:{older:1e30}}]", "[{do:[skip],strikes:nan}]", "[null]"),
    )
}
CONFIGURATION |= {
    "a policy with a command": policy("ladders: {default: [[{os.system: {command: touch CANARY}}]]}\n"),
    "a policy with a tag that executes": policy("ladders: !!python/object/apply:os.system ['touch CANARY']\n"),
    "a policy with a tag that makes an object": policy("ladders: !!python/name:os.system\n"),
    "a policy with a target": policy("_target_: os.system\ncommand: touch CANARY\nladders: {default: [[skip]]}\n"),
    "a policy nested deeply": policy("ladders: " + "[" * 5000 + "]" * 5000 + "\n"),
    "a policy that is no text": policy("\x00\x01\x02"),
    "a policy of a number": policy("7\n"),
    "a policy with an odd name": policy("ladders: {default: [[skip]], '\u202e\u0000x': [[skip]]}\n".replace("\0", "")),
    "checks with a tag that executes": wrong(
        "--config-dir=mine",
        "checks=evil",
        files={"mine/checks/evil.yaml": "jump: !!python/object/apply:os.system ['touch CANARY']\n"},
    ),
}
