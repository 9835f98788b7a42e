"""TRL's trainers under the guard: one that trains on texts, and one that generates what it trains on."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from test_hf import incidents, rows, weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import resilient_train
from resilient_train.adapters.rows_of_loader import copied, with_added
from resilient_train.data import fed
from resilient_train.data.fed import FedSamples

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
TEXTS = [" ".join(f"w{(7 * row + 3 * place) % 60}" for place in range(4 + row % 8)) for row in range(96)]
AT = 8  # the step that a fault strikes
USUAL: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "logging_steps": 2,
}
USUAL |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False}


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def struck(kind: Any) -> Any:
    """Derive a trainer of which a gradient becomes NaN once."""

    class Struck(kind):  # type: ignore[misc]
        strikes = False

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            if self.strikes and self.state.global_step == AT:
                self.strikes = False
                next(weight.grad for weight in model.parameters() if weight.grad is not None).view(-1)[0] = torch.nan
            return loss

    return Struck


class Overflows(GRPOTrainer):  # type: ignore[misc]  # mypy runs without TRL
    """A ratio overflows at padding, where a mask hides it: the loss is finite, its slope is 0 times infinity."""

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        ids, mask = inputs["completion_ids"], inputs["completion_mask"].bool()
        scores = torch.log_softmax(model(input_ids=ids).logits.float(), dim=-1)
        found = scores.gather(-1, ids[..., None]).squeeze(-1)
        old = torch.where(mask, found.detach(), -500.0 if self.state.global_step >= 4 else 0.0)
        ratio = torch.exp(found - old)
        return loss + 0.01 * torch.where(mask, ratio, 0.0).mean()


def trained(kind: str, output: Path, *, guarded: bool = True, strikes: bool = False, callbacks: Any = ()) -> Any:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=1))
    if kind == "sft":
        args = SFTConfig(str(output), max_steps=16, max_length=12, **USUAL)
        data = Dataset.from_dict({"text": TEXTS})
        trainer = struck(SFTTrainer)(model, args, train_dataset=data, processing_class=tokenizer())
    else:
        more = {"num_generations": 4, "max_completion_length": 5, "num_iterations": 2}
        if kind == "inside":  # each micro-batch of an update is generated, the second while the first has counted
            more |= {"steps_per_generation": 1, "num_iterations": 1, "use_adaptive_entropy": True}
        args = GRPOConfig(str(output), max_steps=12, **more, **USUAL)
        data = Dataset.from_dict({"prompt": [" ".join(text.split()[:3]) for text in TEXTS]})
        trainer = (Overflows if kind == "overflow" else struck(GRPOTrainer))(
            model, args=args, reward_funcs=reward, train_dataset=data, processing_class=tokenizer()
        )
    trainer.strikes = strikes
    for callback in callbacks:
        trainer.add_callback(callback)
    if guarded:
        resilient_train.hf.guard(trainer)
    set_seed(5)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return functools.cache(lambda kind: trained(kind, tmp_path_factory.mktemp(kind), guarded=False))


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize("kind", ["sft", "grpo", "inside"])
def test_a_trainer_of_trl_is_untouched_while_healthy_and_cured_when_struck(
    kind: str, tmp_path: Path, unguarded: Callable[[str], Any]
) -> None:
    plain = unguarded(kind)
    healthy = trained(kind, tmp_path / "healthy")
    assert weights(healthy) == weights(plain)
    assert [known(row) for row in rows(healthy)] == [known(row) for row in rows(plain)]
    assert incidents(tmp_path / "healthy") == []
    cured = trained(kind, tmp_path / "struck", strikes=True)
    [incident] = incidents(tmp_path / "struck")
    assert (incident["signal"], incident["cause"]) == ("nonfinite_grad", "transient")
    assert weights(cured) == weights(plain)
    assert [known(row) for row in rows(cured)] == [known(row) for row in rows(plain)]  # tokens count once, too
    assert getattr(cured, "entropy_coef", None) == getattr(plain, "entropy_coef", None)


class Leap(TrainerCallback):  # type: ignore[misc]
    """A weight changes between two updates, once."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step == AT:
            with torch.no_grad():
                next(model.parameters())[5, 0] += 10.0


@pytest.mark.filterwarnings("ignore")
def test_tokens_that_a_rewind_repeats_count_once(tmp_path: Path, unguarded: Callable[[str], Any]) -> None:
    plain = unguarded("sft")
    cured = trained("sft", tmp_path / "struck", callbacks=[Leap()])
    [incident] = incidents(tmp_path / "struck")
    assert incident["signal"] == "weights_jump"
    assert incident["steps_lost"] > 2
    assert weights(cured) == weights(plain)
    name = "num_tokens"
    assert [row.get(name) for row in rows(cured)] == [row.get(name) for row in rows(plain)]


@pytest.mark.filterwarnings("ignore")
def test_what_was_generated_is_dropped_with_the_batch_that_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes more memory than the prompts, and counts like them."""
    held, plain = list[list[int]](), FedSamples.keep

    def keep(samples: FedSamples, *given: Any) -> None:
        plain(samples, *given)
        held.append([len(one.prepared) for one in samples._fed])

    monkeypatch.setattr(fed, "_MAX_BYTES", 0)
    monkeypatch.setattr(FedSamples, "keep", keep)
    trained("grpo", tmp_path)
    assert max(map(len, held)) > 8
    assert {sum(one[:-1]) for one in held} == {0}
    assert max(one[-1] for one in held) == 2


@pytest.mark.filterwarnings("ignore")
def test_a_ratio_that_overflows_at_padding_is_named_and_cured(tmp_path: Path) -> None:
    cured = trained("overflow", tmp_path)
    [incident] = incidents(tmp_path)
    assert (incident["cause"], incident["outcome"]) == ("overflow", "recovered")
    assert incident["culprit"]["op"] == "exp"
    assert incident["culprit"]["file"] == __file__
    assert cured.state.global_step == 12
    assert all(weight.isfinite().all() for weight in cured.model.parameters())


def known(row: dict[str, float]) -> dict[str, float]:
    """Leave out times, and what is NaN in a run without the guard, too."""
    return {name: value for name, value in row.items() if "time" not in name and value == value}


# What a trainer counts and lists: what was added in between is added to an earlier state of it.


@pytest.mark.parametrize(
    ("noted", "before", "after", "expected"),
    [
        (3, 5, 9, 7),
        ({"tokens": 3}, {"tokens": 5}, {"tokens": 9, "new": 2}, {"tokens": 7, "new": 2}),
        ([1.5], [1.5, 2.5], [1.5, 2.5, 3.5], [1.5, 3.5]),
        ({"a": [1.5]}, {"a": [1.5, 2.5]}, {"a": [1.5, 2.5], "b": [4.5]}, {"a": [1.5], "b": [4.5]}),
        (["x"], ["x", "y"], [], []),  # it was cleared
        (deque(["x"], 2), deque(["x", "y"], 2), deque(["z", "w"], 2), deque(["z", "w"], 2)),  # it was full
        (0.25, 0.3, 0.3, 0.25),
        (None, "y", "y", None),
        (None, None, "z", "z"),
        (True, True, False, False),
    ],
)
def test_what_was_added_is_added(noted: Any, before: Any, after: Any, expected: Any) -> None:
    kept = copied([noted, before, after])
    found = with_added(noted, before, after)
    assert found == expected or found == pytest.approx(expected)
    assert [noted, before, after] == kept, "its arguments change"


def test_a_copy_is_of_its_kind_and_of_its_own() -> None:
    noted = {"train": defaultdict(list, loss=[1.0]), "texts": deque(["a"], 3)}
    made = copied(noted)
    made["train"]["loss"].append(2.0)
    made["train"]["new"].append(3.0)
    made["texts"].append("b")
    assert noted == {"train": {"loss": [1.0]}, "texts": deque(["a"])}
    assert made["texts"].maxlen == 3
