"""A trainer of TRL under the guard, which generates what it trains on; docs/scripts.md has one that reads texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from hf_programs import tokenizer
from test_hf import incidents, rows, weights
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import resilient_train

WORDS = [f"w{number}" for number in range(61)]
TEXTS = [" ".join(f"w{(7 * row + 3 * place) % 60}" for place in range(4 + row % 8)) for row in range(96)]
COMPLETE = GRPOTrainer._generate_single_turn
AT = 8  # the step that a fault strikes
USUAL: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "logging_steps": 2,
}
USUAL |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


class Struck(GRPOTrainer):  # type: ignore[misc]  # mypy runs without TRL
    strikes, scores = False, False

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        if self.scores:  # the deviation of a group is 0 where all rewards are the same
            groups = made["advantages"].view(-1, self.num_generations)
            made["advantages"] = (groups / groups.std(1, keepdim=True)).reshape(-1)
        return made

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.strikes and self.state.global_step == AT:
            self.strikes = False
            next(weight.grad for weight in model.parameters() if weight.grad is not None).view(-1)[0] = torch.nan
        return loss


def trained(output: Path, *, guarded: bool = True, strikes: bool = False, scores: bool = False) -> Any:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=1))
    more = {"num_generations": 4, "max_completion_length": 5, "num_iterations": 1 if scores else 2}
    args = GRPOConfig(str(output), max_steps=12, **more, **USUAL)
    data = Dataset.from_dict({"prompt": [" ".join(text.split()[:3]) for text in TEXTS]})
    trainer = Struck(model, args=args, reward_funcs=reward, train_dataset=data, processing_class=tokenizer(WORDS))
    trainer.strikes, trainer.scores = strikes, scores
    if guarded:
        resilient_train.hf.guard(trainer)
    set_seed(5)
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_a_trainer_of_trl_is_untouched_while_healthy_and_cured_when_struck(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", guarded=False)
    healthy = trained(tmp_path / "healthy")
    assert weights(healthy) == weights(plain)
    assert [known(row) for row in rows(healthy)] == [known(row) for row in rows(plain)]
    assert incidents(tmp_path / "healthy") == []
    cured = trained(tmp_path / "struck", strikes=True)
    [incident] = incidents(tmp_path / "struck")
    assert (incident["signal"], incident["cause"]) == ("nonfinite_grad", "transient")
    assert weights(cured) == weights(plain)
    for row, expected in zip(rows(cured), rows(plain), strict=True):
        assert (row.get("loss"), row.get("grad_norm")) == (expected.get("loss"), expected.get("grad_norm"))


@pytest.mark.filterwarnings("ignore")
def test_a_line_between_generation_and_loss_is_named_and_patched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the second micro-batch of an update; and prompts are completed no more often than there are updates."""
    with patch.object(GRPOTrainer, "_generate_single_turn", autospec=True, side_effect=COMPLETE) as completed:
        trained(tmp_path, scores=True)
    found = incidents(tmp_path)
    assert [(one["cause"], one["culprit"]["op"], one["culprit"]["file"]) for one in found] == [
        ("operation", "div", __file__)
    ]
    assert completed.call_count == 12


def known(row: dict[str, float]) -> dict[str, float]:
    """Leave out times, and what is NaN in a run without the guard, too."""
    return {name: value for name, value in row.items() if "time" not in name and value == value}
