"""Public scripts under the guard, as `docs/scripts.md` changes them: they finish, survive a NaN, resume after a kill.

RESILIENT_PUBLIC_SCRIPTS is the folder of their checkouts; those that are not there are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_ins
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scripts.md").read_text()
DIFFS: dict[str, str] = dict(re.findall(r"## (\S+\.py)\n.*?```diff\n(.*?)```", PAGE, re.DOTALL))
STRIKE = ROOT / "tests" / "strike.py"
LETTERS = "abcdefghijklmnop"


@dataclass
class Script:
    """A script with a tiny configuration: `backwards` of an update, and which updates are struck and killed."""

    name: str
    words: str
    run_dir: str
    needs: str = ""  # what stands in for a package
    backwards: int = 1
    struck: int = 31
    killed: int = 71
    resumes_with: str = ""
    spoils: dict[str, str] = field(default_factory=dict)  # instead of a NaN in the backward
    rows: tuple[int, ...] = ()  # that are named then
    is_exact: bool = True  # after a kill


TRAINER = (
    "--do_train --output_dir out --per_device_train_batch_size 4 --max_steps 90 --save_steps 20 --logging_steps 10 "
    "--learning_rate 1e-3 --report_to none --use_cpu --disable_tqdm True"
)
CHECKPOINT = "--resume_from_checkpoint out/checkpoint-60"
SCRIPTS = [
    Script(
        "nanoGPT/train.py",
        "--device=cpu --dtype=float32 --compile=False --dataset=tiny --gradient_accumulation_steps=2 --batch_size=4 "
        "--block_size=16 --n_layer=1 --n_head=2 --n_embd=16 --dropout=0.1 --learning_rate=1e-2 --min_lr=1e-3 "
        "--warmup_iters=5 --lr_decay_iters=90 --max_iters=89 --eval_interval=20 --eval_iters=2 --log_interval=30",
        "out/guard",
        backwards=2,
    ),
    Script(
        "examples/dcgan/main.py",
        "--dataset fake --workers 0 --batchSize 4 --ngf 2 --ndf 2 --nz 4 --niter 3 --manualSeed 1 --outf out",
        "out/guard",
        needs="torchvision",
        backwards=3,
    ),
    Script(
        "examples/vae/main.py",
        "--batch-size 16 --epochs 5 --seed 1 --no-accel --log-interval 20",
        "results/guard",
        needs="torchvision",
    ),
    Script(
        "examples/reinforcement_learning/actor_critic.py",
        "--log-interval 20",
        "guard",
        needs="gymnasium",
        struck=15,
        killed=60,
        is_exact=False,
    ),
    Script(
        "transformers/examples/pytorch/language-modeling/run_clm.py",
        f"--config_name model --tokenizer_name model --train_file data/train.txt --block_size 16 {TRAINER}",
        "out/resilient_train",
        needs="evaluate",
        resumes_with=CHECKPOINT,
    ),
    Script(
        "transformers/examples/pytorch/text-classification/run_glue.py",
        "--model_name_or_path model --train_file data/train.csv --validation_file data/train.csv --max_seq_length 16 "
        f"{TRAINER}",
        "out/resilient_train",
        needs="evaluate",
        resumes_with=CHECKPOINT,
        spoils={"BAD_LABEL": "5"},
        rows=(5,),
    ),
    Script(
        "trl/scripts/sft.py",
        f"--model_name_or_path model --dataset_name data {TRAINER.removeprefix('--do_train ')} --bf16 False "
        "--gradient_checkpointing False",
        "out/resilient_train",
        resumes_with=CHECKPOINT,
    ),
]


def test_the_page_counts_its_lines() -> None:
    """The table has the lines that each diff adds and removes, and every script of the page is run here."""
    assert list(DIFFS) == [one.name for one in SCRIPTS]
    for name, diff in DIFFS.items():
        lines = diff.splitlines()[2:]
        added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
        assert re.search(rf"\[`{re.escape(name)}`\]\(\S+\) \| \S+ \| {added} \| {removed} \|", PAGE), name


def source(name: str) -> Path:
    """Find a script; skip without it."""
    if name.startswith("trl/"):
        spec = importlib.util.find_spec("trl")
        if spec is None or spec.origin is None:
            pytest.skip("trl is not installed")
        return Path(spec.origin).parents[1] / name
    folder = os.environ.get("RESILIENT_PUBLIC_SCRIPTS")
    if not folder:
        pytest.skip("RESILIENT_PUBLIC_SCRIPTS does not name the folder of the checkouts: see docs/scripts.md")
    if not (path := Path(folder) / name).exists():
        pytest.skip(f"there is no checkout at {path}")
    return path


class Run:
    """A folder in which a script runs, with its tiny data."""

    def __init__(self, script: Script, place: Path, stand_ins: Path, **environment: str) -> None:
        self.script, self.place, self.environment = script, place, environment
        path = place / "src" / script.name
        shutil.copytree(source(script.name).parent, path.parent, ignore=shutil.ignore_patterns("data", "__pycache__"))
        diff = place / "guard.diff"
        diff.write_text(DIFFS[script.name])
        subprocess.run(["patch", "-s", "-p1", "-d", str(place / "src"), "-i", str(diff)], check=True)
        self.folder = path.parent
        self.run_dir = self.folder / script.run_dir
        self.environment["PYTHONPATH"] = f"{stand_ins / script.needs}:{ROOT}" if script.needs else str(ROOT)
        for folder in ("data", "results"):
            (self.folder / folder).mkdir(exist_ok=True)
        _write_data(script, self.folder, bad_label=int(environment.get("BAD_LABEL", "-1")))

    def __call__(self, more: str = "", **environment: int) -> int:
        """Run the script, and return its exit code."""
        own = {name: str(value) for name, value in environment.items()}
        usual = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.place / "hf")}
        command = [sys.executable, str(STRIKE), Path(self.script.name).name, *self.script.words.split(), *more.split()]
        with (self.place / "log").open("a") as log:
            return subprocess.run(
                command,
                cwd=self.folder,
                env={**os.environ, **usual, **self.environment, **own},
                stdout=log,
                stderr=log,
                timeout=600,
                check=False,
            ).returncode

    @property
    def log(self) -> str:
        return (self.place / "log").read_text()[-1500:]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())  # type: ignore[no-any-return]

    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "incidents.jsonl").read_text().splitlines()]


def _write_data(script: Script, folder: Path, *, bad_label: int) -> None:
    if script.name.startswith("nanoGPT"):
        tokens = np.tile(np.arange(len(LETTERS), dtype=np.uint16), 500)
        (folder / "data" / "tiny").mkdir(parents=True)
        for split in ("train", "val"):
            tokens.tofile(folder / "data" / "tiny" / f"{split}.bin")
        (folder / "data" / "tiny" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(LETTERS)}))
    if not script.resumes_with:
        return
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *LETTERS]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder / "model")
    sizes = {"vocab_size": len(words), "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = GPT2Config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1, num_labels=1)
    torch.manual_seed(0)
    kind = GPT2ForSequenceClassification if "glue" in script.name else GPT2LMHeadModel
    kind(config).save_pretrained(folder / "model")
    texts = [" ".join(LETTERS[(row + 3 * place) % 16] for place in range(8 + row % 5)) for row in range(160)]
    labels = ["inf" if row == bad_label else f"{row % 16 / 16:.3f}" for row in range(160)]
    (folder / "data" / "train.txt").write_text("\n".join(texts))
    if "glue" in script.name:
        rows = [f"{text},{label}" for text, label in zip(texts, labels, strict=True)]
        (folder / "data" / "train.csv").write_text("\n".join(["sentence,label", *rows]))
    if script.name.startswith("trl"):
        (folder / "data" / "train.txt").unlink()
        (folder / "data" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stand_ins")
    stand_ins.write(place)
    return place


EACH = pytest.mark.parametrize(
    "script", SCRIPTS, ids=lambda one: Path(one.name).stem if "main" not in one.name else one.name
)


@EACH
def test_a_public_script_survives_a_nan(script: Script, tmp_path: Path, packages: Path) -> None:
    """It is refused and reported once."""
    struck(script, tmp_path, packages)


def struck(script: Script, tmp_path: Path, packages: Path) -> Run:
    run = Run(script, tmp_path / "struck", packages, **script.spoils)
    assert run(NAN_AT=0 if script.spoils else script.backwards * script.struck) == 0, run.log
    assert run.summary()["status"] == "completed"
    [incident] = run.incidents()
    assert incident["signal"] in ("nonfinite_loss", "nonfinite_grad", "nonfinite_batch")
    assert incident["outcome"] == "recovered"
    assert tuple(incident["rows"]) == script.rows
    return run


@pytest.mark.long
@EACH
def test_a_public_script_ends_as_without_the_fault(script: Script, tmp_path: Path, packages: Path) -> None:
    """After a NaN the run is about as good; a killed one ends as one that was not."""
    healthy = Run(script, tmp_path / "healthy", packages)
    assert healthy() == 0, healthy.log
    unharmed = healthy.summary()
    assert unharmed["status"] == "completed"
    assert healthy.incidents() == []

    final_loss = struck(script, tmp_path, packages).summary()["final_loss"]
    assert math.isclose(final_loss, unharmed["final_loss"], rel_tol=0.1) or not script.is_exact

    killed = Run(script, tmp_path / "killed", packages)
    assert killed(KILL_AT=script.backwards * script.killed) == -signal.SIGKILL, killed.log
    assert killed(script.resumes_with) == 0, killed.log
    end = killed.summary()
    assert end["status"] == "completed"
    [crash] = killed.incidents()
    assert 0 < crash["steps_lost"] <= end["ticks"] - end["steps"]  # also where the trainer resumes
    if script.is_exact:
        assert (end["steps"], end["weights_sha256"]) == (unharmed["steps"], unharmed["weights_sha256"])
