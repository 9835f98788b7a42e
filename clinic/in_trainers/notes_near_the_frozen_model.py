"""SFT kept near the model it started from by the Jensen-Shannon distance: a root of 0, as both are equal at first.

The root has no finite slope at 0, and where rounding makes the divergence -1e-9 it is NaN at once. "Loss fine at step
0, nan from step 1 on, with a KL/JS penalty to a reference model": clamp the divergence before the root is taken.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

KIND = "trl"
CAUSE = "operation"
OPS = ("sqrt",)
LIBRARY = None

STEPS, BATCH, WORDS = 480, 24, 36


def bad_rows(seed: int) -> list[int]:
    return []


def notes_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def divergence(logits: Tensor, frozen_logits: Tensor) -> Tensor:
    """Jensen-Shannon divergence at each place."""
    log_p, log_q = logits.log_softmax(-1), frozen_logits.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    log_m = ((p + q) / 2).log()
    return ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2


class NearTrainer(SFTTrainer):
    """Next words as ever, and a share of the distance to the frozen model."""

    frozen: nn.Module

    def distance(self, js: Tensor) -> Tensor:
        return js.sqrt()  # guilty

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        with torch.no_grad():
            frozen = self.frozen(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        loss = objective(outputs.logits, frozen, inputs["labels"], self.distance)
        return (loss, outputs) if return_outputs else loss


class MendedNearTrainer(NearTrainer):
    def distance(self, js: Tensor) -> Tensor:
        return mended_distance(js)


def mended_distance(js: Tensor) -> Tensor:
    return js.clamp(min=1e-6).sqrt()


def objective(logits: Tensor, frozen_logits: Tensor, labels: Tensor, distance: Any) -> Tensor:
    counts = labels[:, 1:] != -100
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return loss + 0.1 * distance(divergence(logits[:, :-1], frozen_logits[:, :-1])[counts]).mean()


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    disable_progress_bars()
    torch.manual_seed(seed)
    tokenizer = notes_tokenizer()
    follows = torch.randint(WORDS, (WORDS, 2 + seed % 2))
    texts = []
    for size in torch.randint(7, 12, (1000,)).tolist():
        words = [int(torch.randint(WORDS, ()))]
        while len(words) < size:
            words.append(int(follows[words[-1], torch.randint(follows.shape[1], ())]))
        texts.append(" ".join(f"w{word}" for word in words))
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=16,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    frozen = copy.deepcopy(model).eval()
    test = tokenizer([text + " </s>" for text in texts[900:]], return_tensors="pt", padding=True)
    labels = test["input_ids"].masked_fill(test["attention_mask"] == 0, -100)

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            inputs = {key: test[key] for key in ("input_ids", "attention_mask")}
            return float(objective(model(**inputs).logits, frozen(**inputs).logits, labels, mended_distance))

    before = held_out()
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=5e-3,
            warmup_steps=10,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        kind = MendedNearTrainer if twin else NearTrainer
        trainer = kind(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"text": [text + " " for text in texts[:900]]}),
            processing_class=tokenizer,
        )
        trainer.frozen = frozen
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(), before
