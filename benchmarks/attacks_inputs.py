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


def demoted(place: Place) -> None:
    """What was demoted is nobody's last good state, however high its number."""
    place.copy()
    later = shutil.copytree(place.run_dir / NEWEST, place.run_dir / "checkpoints/step-00000099")
    seal(later, lambda node: node.update(kind="demoted", step=99, tick=99))
    summary = json.loads((place.run_dir / "summary.json").read_text()) | {"status": "gave_up", "exit_code": 3}
    (place.run_dir / "summary.json").write_text(json.dumps(summary))
    said = place.train("run.steps=20")
    if "step-00000099" in said.text:
        place.fails(f"it names a demoted state: {said.last}")


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


NUMBERS = ["run.steps", "run.step_timeout", "clip.max_norm", "checkpoint.disk.every", "optimizer.lr", "data.batch_size"]
LADDER = "recovery.ladders.default="
CONFIGURATION: dict[str, Attack] = {f"{key}=nan": wrong(f"{key}=nan") for key in NUMBERS}
CONFIGURATION |= {f"{key}=inf": wrong(f"{key}=inf") for key in NUMBERS}
CONFIGURATION |= {
    word: wrong(word)
    for word in (
        "run.steps=-1",
        "run.steps=${oc.env:NOPE}",
        "data.batch_size=0",
        "run.nope=1",
        "model=nope",
        "=",
        "run.steps=",
    )
}
CONFIGURATION |= {
    f"a remedy {remedy}": wrong(f"{LADDER}[{remedy}]")
    for remedy in (
        '[{os.system:{command:"touch CANARY"}}]',
        '[{subprocess.call:{args:[touch,"CANARY"]}}]',
        '[{pathlib.Path.touch:{self:"CANARY"}}]',
        '[{builtins.exec:{source:"open(\\"CANARY\\",\\"w\\")"}}]',
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
    "a policy with an odd name": policy("ladders: {default: [[skip]], '\u202e\u0000x': [[skip]]}\n".replace("\0", "")),
    "checks with a tag that executes": wrong(
        "--config-dir=mine",
        "checks=evil",
        files={"mine/checks/evil.yaml": "jump: !!python/object/apply:os.system ['touch CANARY']\n"},
    ),
}


# ------------------------------------------------------------------------------------------------------------- secrets


def said_aloud(secret: str, said: str = "%s", **environment: Any) -> Attack:
    """Rows and the objective raise errors that hold a secret: neither file nor terminal shows it, nor do the verbs."""

    def attack(place: Place) -> None:
        place.secrets.append(secret)
        words = ["data.train._target_=attacks_programs.SayingRows"]
        text = said.replace("%s", secret)
        said_so = place.train(
            *words, "objective=custom", "objective._target_=attacks_programs.says", ATTACK_SAYS=text, **environment
        )
        if said_so.code != 1 or not said_so.errors:
            place.fails(f"the run was to fail with its own words: {said_so.code} {said_so.last}")
        place.asked()

    return attack


HEX = "0123456789abcdefABCDEFGHIJKLMNOPQRSTUVWXYZghijklmnopqrstuvwxyz"


def made(prefix: str, length: int, letters: str = HEX) -> str:
    """Something that looks like a token."""
    return prefix + "".join(random.Random(prefix + str(length)).choices(letters, k=length))


BY_NAME = {
    "HF_TOKEN": made("hf_", 34),
    "AWS_SECRET_ACCESS_KEY": made("", 40),
    "DB_PASSWORD": "trustnoone",
    "PIN_PASSWORD": "20240131",
    "MY_PASSPHRASE": "correct horse battery",
    "WANDB_API_KEY": made("", 40, "0123456789abcdef"),
    "OPENAI_API_KEY": made("sk-proj-", 40),
    "SERVICE_SECRET": "p$\\w'\"<&>+/=\u00fc",
    "GH_PASSWD": "opensesame",
}
BY_LOOK = {
    "user and password in an address": (made("", 12), "postgresql://writer:%s@db.example/losses"),
    "a token in an address": (made("", 20), "https://%s@git.example/x.git"),
    "a query": (made("", 16), "https://s3.example/rows?X-Amz-Signature=%s&part=3"),
    "password=": (made("", 12), "host=db user=me password=%s dbname=x"),
    "AccountKey=": (made("", 44) + "==", "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=%s;Suffix=x"),
    "aws_secret_access_key=": (made("", 40), "aws_secret_access_key=%s"),
    "api_key=''": (made("", 24), "Client(api_key='%s', retries=3)"),
    "a header": (made("", 30), "Authorization: Bearer %s"),
    "JSON": (made("", 24), '{"client_secret": "%s", "n": 3}'),
    "hf_": (made("hf_", 34, HEX[10:]), "401 for %s at the hub"),
    "AKIA": (made("AKIA", 16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"), "the access key %s does not exist"),
    "ghp_": (made("ghp_", 36), "bad credentials: %s"),
    "github_pat_": (made("github_pat_", 22) + "_" + made("", 59), "bad credentials: %s"),
    "xoxb-": (made("xoxb-", 12, "123456789") + "-" + made("", 24), "invalid_auth for %s"),
    "a JSON web token": (
        f"{made('eyJhbGciOiJIUzI1NiJ9.eyJ', 40)}.{made('', 43)}",
        "token %s has expired",
    ),
}
SECRETS: dict[str, Attack] = {name: said_aloud(value, **{name: value}) for name, value in BY_NAME.items()}
SECRETS |= {what: said_aloud(secret, said) for what, (secret, said) in BY_LOOK.items()}

INPUTS: Mapping[str, Mapping[str, Attack]] = {
    "files": FILES,
    "checkpoints": CHECKPOINTS,
    "configuration": CONFIGURATION,
    "secrets": SECRETS,
}
