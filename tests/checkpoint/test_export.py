"""An export is a folder that `from_pretrained` loads, to the bit what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import MINE, command
from safetensors.torch import load_file
from torch import nn

from resilient_train.app import checkpoints
from resilient_train.checkpoint.tree_files import load_tree
from resilient_train.checkpoint.weights import PRETRAINED, describe

HF = ["model=hf_causal_lm", "data=python_source", "data.batch_size=2", "data.eval._target_=null", "run.steps=30"]
HF += [
    "objective=language_model",
    "checkpoint.disk.every=10",
    "accelerate.cpu=true",
    "tracking=none",
    "run.dir=run",
    "optimizer.lr=0.01",
]
SIZES = {
    "gpt2": ["+model.n_layer=1", "+model.n_embd=32", "+model.n_head=2", "+model.n_positions=160"],
    "llama": [
        *("+model.num_hidden_layers=1", "+model.hidden_size=32", "+model.num_attention_heads=2"),
        *("+model.num_key_value_heads=1", "+model.intermediate_size=48", "+model.tie_word_embeddings=true"),
    ],
}

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", SIZES)
def test_an_export_is_loaded_by_from_pretrained(kind: str, run_command: command, capsys: Said) -> None:
    """The model that was trained and the one that is loaded give the same logits, bit for bit."""
    transformers = pytest.importorskip("transformers")
    done = run_command([*HF, f"model.name={kind}", "+model.vocab_size=256", *SIZES[kind]])
    assert done.code == 0, done.stderr
    assert checkpoints.main(["run", "--export", "exported/here"]) == 0
    assert "step 30 is in exported/here" in capsys.readouterr().out
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        "exported/here", local_files_only=True, output_loading_info=True
    )
    assert not any(report.values()), report
    trained = transformers.AutoModelForCausalLM.from_config(loaded.config)
    trained.load_state_dict(load_file("run/weights.safetensors"), strict=False)
    trained.tie_weights()
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, trained.eval()(tokens).logits)
    first = transformers.AutoModelForCausalLM.from_config(loaded.config)
    assert not torch.equal(next(first.parameters()), next(loaded.parameters()))


def test_weights_that_were_widened_stay_wide(tmp_path: Path) -> None:
    """A config may still say what its weights were on the hub: the description says what they are."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8, dtype="bfloat16")
    model = transformers.GPT2LMHeadModel(config).to(torch.float32)
    describe(model, tmp_path)
    told = json.loads((tmp_path / PRETRAINED / "config.json").read_text())
    assert (told["dtype"], told["architectures"]) == ("float32", ["GPT2LMHeadModel"])


def test_what_cannot_be_exported_is_told_in_one_line(run_command: command, capsys: Said) -> None:
    """A model that is not of transformers, a folder that is taken, a checkpoint that is not there or not sound."""
    mine = ["model=mlp", "data=digits", "objective=classification", "run.steps=3", "tracking=none", "run.dir=run"]
    done = run_command([*mine, "checkpoint.disk.every=1", "data.eval._target_=null"])
    assert done.code == 0, done.stderr

    def refusal(*arguments: str) -> tuple[int, str]:
        code = checkpoints.main(["run", *arguments])
        (line,) = capsys.readouterr().err.splitlines()
        return code, line

    (newest,) = (one.name for one in Path("run/checkpoints").iterdir())
    code, line = refusal("--export", "new")
    assert code == 1
    assert f"run/checkpoints/{newest}/weights.safetensors loads with safetensors" in line
    assert refusal("--export", "new", "--checkpoint", "step-1") == (
        2,
        f"run has no checkpoint step-1: there is {newest}",
    )
    Path("run", PRETRAINED).mkdir()
    Path("run", PRETRAINED, "config.json").write_text("{")
    assert refusal("--export", "new")[1] == f"run/{PRETRAINED}/config.json is not what a run writes there"
    Path("run", PRETRAINED, "config.json").write_text("{}")
    assert refusal("--export", "run")[1] == "run is there already: --export makes a new folder"
    Path("run/checkpoints", newest, "weights.safetensors").write_bytes(b"")
    assert checkpoints.main(["run", "--export", "new"]) == 1
    assert f"{newest}: weights.safetensors is 0 bytes long" in capsys.readouterr().err
    assert not Path("new").exists()


class Complex(nn.Module):
    """A complex weight, and a buffer of a type that the format does not have either."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.phase = nn.Linear(6, 1), nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(6, dtype=torch.uint16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((x * self.phase).real)
        return out


def test_what_the_format_cannot_hold_is_left_out_and_named(run_command: command) -> None:
    """The run is complete, also when it is started again, and its checkpoint has the rest."""
    own = [*MINE, "model._target_=test_export.Complex", "run.dir=run", "run.steps=30", "run.eval_every=10"]
    own += [
        "optimizer=custom",
        "optimizer._target_=torch.optim.SGD",
        "+optimizer.lr=0.01",
        "data.eval._target_=strangers.Fixed",
    ]
    done = run_command(own)
    assert done.code == 0, done.stdout + done.stderr
    assert "weights.safetensors has no mask (uint16), phase (complex64)" in done.stdout
    assert "is complete" in run_command(own).stdout
    assert load_file("run/weights.safetensors").keys() == {"head.weight", "head.bias"}
    (checkpoint,) = Path("run/checkpoints").iterdir()
    assert {*load_tree(checkpoint)["parts"]["weights"]} == {"phase"}
