"""SFT with PaLM's z-loss written out, in half precision to save memory: exp of a logit above 11.09 is infinite.

At first the logits are small; with a steep head they pass 11 as the model becomes sure, the sum is infinite, and so is
the loss. `logsumexp` in single precision is what everybody should have written ("z-loss nan fp16").
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

KIND = "trl"
CAUSE = "operation"
OPS = ("exp",)
LIBRARY = None

STEPS, BATCH, WORDS = 360, 16, 40


def bad_rows(seed: int) -> list[int]:
    return []


def kitchen_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def with_z_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    total = torch.exp(logits.half()).sum(-1)  # guilty
    return loss + 1e-4 * total.log().float().square().mean()


def with_z_loss_mended(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return loss + 1e-4 * torch.logsumexp(logits.float(), -1).square().mean()


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    disable_progress_bars()
    torch.manual_seed(seed)
    tokenizer = kitchen_tokenizer()
    step = torch.randint(3, 9, (1000,))
    place = (torch.randint(WORDS, (1000, 1)) + step[:, None] * torch.arange(9 + seed % 3)) % WORDS
    texts = [" ".join(f"w{word}" for word in row) for row in place.tolist()]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.6,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    test = tokenizer(texts[900:], return_tensors="pt")["input_ids"]

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            return float(with_z_loss_mended(model(input_ids=test), test))

    before = held_out()
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=5e-3,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"text": texts[:900]}),
            processing_class=tokenizer,
            compute_loss_func=with_z_loss_mended if twin else with_z_loss,
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(), before
