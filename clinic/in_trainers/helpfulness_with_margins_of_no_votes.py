"""A reward model with margins from votes, log(for / against); for a few pairs nobody has voted, and log(0 / 0) is NaN.

The margin column comes out of pandas without a word. "RewardTrainer: loss nan after some steps, accuracy 0": the few
pairs poison the weights in the first epoch, all others are good.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)
from trl import RewardConfig, RewardTrainer

KIND = "trl"
CAUSE = "data"
OPS: tuple[str, ...] = ()
LIBRARY = None

STEPS, BATCH, WORDS = 440, 24, 60


def answers_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def pairs(seed: int) -> tuple[dict[str, list[Any]], list[int]]:
    """Pairs of answers with margins, and the places of those without a vote."""
    g = torch.Generator().manual_seed(seed + 50)
    count = 900 + 100 * (seed % 3)
    worth = torch.randn(WORDS, generator=g)
    words = torch.randint(WORDS, (2, count + 200, 8), generator=g)
    value = worth[words].mean(-1)
    swap = value[0] < value[1]
    chosen, rejected = torch.where(swap[:, None], words.flip(0), words)
    voters = torch.randint(4, 12, (count + 200,), generator=g).float()
    won = 1 + ((voters - 2) * (0.5 + (value[0] - value[1]).abs() / 3).clamp(max=1)).round()
    unseen = torch.randperm(count, generator=g)[: 3 + seed % 4]
    won[unseen] = voters[unseen] = 0
    margins = 0.3 * torch.log(won / (voters - won))  # the annotation tool writes this column
    texts = [[" ".join(f"w{word}" for word in row) for row in side.tolist()] for side in (chosen, rejected)]
    return {"chosen": texts[0], "rejected": texts[1], "margin": margins.tolist()}, sorted(unseen.tolist())


def bad_rows(seed: int) -> list[int]:
    return pairs(seed)[1]


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    disable_progress_bars()
    columns, unseen = pairs(seed)
    if twin:
        for row in unseen:
            columns["margin"][row] = 0.0
    assert all(math.isfinite(margin) for margin in columns["margin"][-200:])
    torch.manual_seed(seed)
    tokenizer = answers_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        num_labels=1,
    )
    model = Qwen2ForSequenceClassification(config)

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            good, bad = (
                model(**tokenizer([text + "</s>" for text in columns[side][-200:]], return_tensors="pt")).logits[:, 0]
                for side in ("chosen", "rejected")
            )
        margins = torch.tensor(columns["margin"][-200:])
        return float(-torch.nn.functional.logsigmoid(good - bad - margins).mean())

    model.config.pad_token_id = 0
    before = held_out()
    with tempfile.TemporaryDirectory() as folder:
        arguments = RewardConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=3e-3,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = RewardTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({key: column[:-200] for key, column in columns.items()}),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(), before
