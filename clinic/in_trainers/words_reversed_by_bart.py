"""A small BART from scratch that writes words backwards, with the rate typed as 3e-2 and no warm-up.

"Seq2SeqTrainer: loss stuck, generates the same token for every input": post-norm encoder and decoder, and AdamW steps
that throw every weight about in the first updates. All stays finite; a tenth of the rate and some warm-up mend it.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

KIND = "hf"
CAUSE = "explosion"
OPS: tuple[str, ...] = ()
LIBRARY = None

STEPS, BATCH = 320, 32
LETTERS = "abcdefghijklmnop"


def bad_rows(seed: int) -> list[int]:
    return []


def letters_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    torch.manual_seed(seed)
    tokenizer = letters_tokenizer()
    sizes = torch.randint(3, 5 + seed % 2, (2200,)).tolist()
    words = ["".join(LETTERS[int(letter)] for letter in torch.randint(16, (size,))) for size in sizes]
    rows = [
        {
            "input_ids": tokenizer(word)["input_ids"],
            "labels": tokenizer(word[::-1])["input_ids"] + [tokenizer.eos_token_id],
        }
        for word in words
    ]
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=16,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config)
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    test = collator([dict(row) for row in rows[2000:]])

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            return float(model(**test).loss)

    before = held_out()
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=3e-3 if twin else 3e-2,
            warmup_steps=30 if twin else 0,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows[:2000], data_collator=collator)
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(), before
