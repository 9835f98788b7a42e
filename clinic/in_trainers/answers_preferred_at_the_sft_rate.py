"""DPO at the rate that was used for SFT: the implicit rewards run away, and little is learned of the prompts.

"DPO loss goes up to 20 and rewards/chosen is -300": the advice in TRL's issues is always a rate ten to a hundred times
lower. Nothing is NaN; the loss jumps in the first updates, and what is left is not much better than ln 2.
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
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback
from trl import DPOConfig, DPOTrainer

KIND = "trl"
CAUSE = "explosion"
OPS: tuple[str, ...] = ()
LIBRARY = None

STEPS, BATCH, WORDS, TOPICS, BETA = 200, 16, 48, 6, 0.1


def bad_rows(seed: int) -> list[int]:
    return []


def dialogue_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def pairs(seed: int) -> dict[str, list[str]]:
    """Prompts with two answers; the chosen one keeps to the topic of the prompt, the other to another topic."""
    g = torch.Generator().manual_seed(seed + 7)
    count, length = 1000, 6 + seed % 3
    topic = torch.randint(TOPICS, (count, 1), generator=g)
    other = (topic + torch.randint(1, TOPICS, (count, 1), generator=g)) % TOPICS
    size = WORDS // TOPICS
    prompt = size * topic + torch.randint(size, (count, 4), generator=g)
    right, wrong = (size * kind + torch.randint(size, (count, length), generator=g) for kind in (topic, other))
    answers = torch.stack([right, wrong])
    stray = torch.rand(answers.shape, generator=g) < 0.3
    answers = torch.where(stray, torch.randint(WORDS, answers.shape, generator=g), answers)
    texts = [[" ".join(f"w{word}" for word in row) for row in part.tolist()] for part in (prompt, *answers)]
    return {
        "prompt": [text + " " for text in texts[0]],
        "chosen": texts[1],
        "rejected": texts[2],
    }


def held_out_loss(
    model: GPT2LMHeadModel, first: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, rows: dict[str, list[str]]
) -> float:
    def log_ratio(side: str) -> Tensor:
        texts = [prompt + answer + " </s>" for prompt, answer in zip(rows["prompt"], rows[side], strict=True)]
        tokens = tokenizer(texts, return_tensors="pt")["input_ids"]
        both = [
            network(input_ids=tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[:, 3:, 0].sum(1)
            for network in (model, first)
        ]
        return both[0] - both[1]

    model.eval()
    with torch.no_grad():
        return float(-logsigmoid(BETA * (log_ratio("chosen") - log_ratio("rejected"))).mean())


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    disable_progress_bars()
    torch.manual_seed(seed)
    tokenizer = dialogue_tokenizer()
    rows = pairs(seed)
    test = {key: column[-150:] for key, column in rows.items()}
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=32,
        n_embd=32,
        n_layer=2,
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
    first = copy.deepcopy(model).eval()
    before = held_out_loss(model, first, tokenizer, test)
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=3e-3 if twin else 1e-1,
            lr_scheduler_type="constant",
            beta=BETA,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = DPOTrainer(
            model=model,
            ref_model=copy.deepcopy(first),
            args=arguments,
            train_dataset=Dataset.from_dict({key: column[:-150] for key, column in rows.items()}),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out_loss(model, first, tokenizer, test), before
