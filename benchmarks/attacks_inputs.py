"""The inputs of `attacks.py`, group by group: a name, and what is done and has to hold in a place of its own."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attacks_place import Place
from forged_checkpoints import seal

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


# --------------------------------------------------------------------------------------------------------------- files


def resumes(harm: Callable[[Place], object]) -> Attack:
    """Harm a copy of a run: every verb answers, and the same command goes on or is refused."""

    def attack(place: Place) -> None:
        place.copy()
        harm(place)
        place.asked()
        place.resumes()

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
    run_dir = next(one for one in file.parents if one.name == "run")
    shutil.copy(run_dir.parents[1] / "other" / file.relative_to(run_dir), file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": _cut,
    "with a flipped bit": _flip,
    "emptied": lambda file: os.truncate(file, 0),
    "as a directory": _instead(lambda file: (file / "x").mkdir(parents=True)),
    "that is no text": lambda file: file.write_bytes(b"\xff\xfe{" + random.Random(1).randbytes(2000)),
    "of another run": _other,
}


def damaged(name: str, how: str) -> Callable[[Place], object]:
    def harm(place: Place) -> None:
        file = place.run_dir / name
        file.touch()  # .lock is not always there
        DAMAGES[how](file)

    return harm


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
    "all checkpoints damaged": resumes(every(_flip)),
    "all checkpoints emptied": resumes(every(lambda file: os.truncate(file, 0))),
    "no checkpoints": resumes(lambda place: shutil.rmtree(place.run_dir / "checkpoints")),
}


# ------------------------------------------------------------------------------------------------------------- secrets


def said_aloud(secret: str, said: str) -> Attack:
    """Rows and the objective raise errors that hold a secret: neither file nor terminal shows it, nor do the verbs."""

    def attack(place: Place) -> None:
        place.secrets.append(secret)
        words = ["data.train._target_=attacks_programs.SayingRows"]
        text = said.replace("%s", secret)
        said_so = place.train(*words, "objective=custom", "objective._target_=attacks_programs.says", ATTACK_SAYS=text)
        if said_so.code != 1 or not said_so.errors:
            place.fails(f"the run was to fail with its own words: {said_so.code} {said_so.last}")
        place.asked()

    return attack


HEX = "0123456789abcdefABCDEFGHIJKLMNOPQRSTUVWXYZghijklmnopqrstuvwxyz"


def made(prefix: str, length: int, letters: str = HEX) -> str:
    """Something that looks like a token."""
    return prefix + "".join(random.Random(prefix + str(length)).choices(letters, k=length))


BY_LOOK = {
    "user and password in an address": (made("", 12), "postgresql://writer:%s@db.example/losses"),
    "a query": (made("", 16), "https://s3.example/rows?X-Amz-Signature=%s&part=3"),
    "password=": (made("", 12), "host=db user=me password=%s dbname=x"),
    "a header": (made("", 30), "Authorization: Bearer %s"),
    "JSON": (made("", 24), '{"client_secret": "%s", "n": 3}'),
}
SECRETS: dict[str, Attack] = {what: said_aloud(secret, said) for what, (secret, said) in BY_LOOK.items()}

INPUTS: Mapping[str, Mapping[str, Attack]] = {
    "files": FILES,
    "checkpoints": CHECKPOINTS,
    "secrets": SECRETS,
}
