"""The page of public scripts, and the one of them that is installed with its package: TRL's `sft.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kills import incidents, summary

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scripts.md").read_text()
DIFFS: dict[str, str] = dict(re.findall(r"## (\S+\.py)\n.*?```diff\n(.*?)```", PAGE, re.DOTALL))
STRIKE = ROOT / "tests" / "kill_script.py"
SFT = "trl/scripts/sft.py"
LETTERS = "abcdefghijklmnop"
WORDS = (
    "--model_name_or_path model --dataset_name data --output_dir out --per_device_train_batch_size 4 --max_steps 60 "
    "--save_steps 20 --logging_steps 10 --learning_rate 1e-3 --report_to none --use_cpu --disable_tqdm True "
    "--bf16 False --gradient_checkpointing False"
)


def test_the_page_counts_its_lines() -> None:
    assert SFT in DIFFS
    for name, diff in DIFFS.items():
        lines = diff.splitlines()[2:]
        added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
        assert re.search(rf"\[`{re.escape(name)}`\]\(\S+\) \| \S+ \| {added} \| {removed} \|", PAGE), name


def write_model_and_texts(folder: Path) -> None:
    from hf_programs import tokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    made = tokenizer(LETTERS)
    made.model_max_length = 64
    made.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"vocab_size": len(made), "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1)).save_pretrained(
        folder / "model"
    )
    (folder / "data").mkdir()
    texts = [" ".join(LETTERS[(row + 3 * place) % 16] for place in range(8 + row % 5)) for row in range(160)]
    (folder / "data" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def test_a_public_script_survives_a_nan_and_a_kill(tmp_path: Path) -> None:
    """As the page changes it: the NaN is refused and reported once, and the same command resumes after the kill."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    path = tmp_path / SFT
    shutil.copytree(Path(spec.origin).parent / "scripts", path.parent, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "guard.diff").write_text(DIFFS[SFT])
    subprocess.run(["patch", "-s", "-p1", "-d", str(tmp_path), "-i", str(tmp_path / "guard.diff")], check=True)
    write_model_and_texts(path.parent)

    def run(more: str = "", **environment: int) -> int:
        own = {name: str(value) for name, value in environment.items()}
        own |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(STRIKE), path.name, *WORDS.split(), *more.split()]
        return subprocess.run(command, cwd=path.parent, env={**os.environ, **own}, timeout=600, check=False).returncode

    assert run(NAN_AT=11, KILL_AT=45) == -signal.SIGKILL
    assert run("--resume_from_checkpoint out/checkpoint-40") == 0
    run_dir = path.parent / "out/resilient_train"
    written, (refused, crash) = summary(run_dir), incidents(run_dir)
    assert written["status"] == "completed"
    assert [refused["signal"], crash["signal"]] == ["nonfinite_grad", "crash"]
    assert refused["outcome"] == "recovered"
    assert 0 < crash["steps_lost"] <= written["ticks"] - written["steps"]
