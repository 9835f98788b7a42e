"""GRPO with the logarithm of the overlap as reward, "to spread small values": no overlap at all is minus infinity.

The mean of a group is then minus infinity as well, and -inf - (-inf) is NaN; TRL makes 0 of such advantages, so that
the policy hardly moves and only the log shows "reward: -inf". An epsilon inside of the logarithm mends it.
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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

KIND = "trl"
CAUSE = "operation"
OPS = ("log",)
LIBRARY = None

STEPS, GROUP, LENGTH, PROMPT = 240, 8, 4, 3
SEASONS, WORDS = 4, 4  # each season has some words of its own


def bad_rows(seed: int) -> list[int]:
    return []


def words_tokenizer() -> PreTrainedTokenizerFast:
    words = [f"w{season}{number}" for season in range(SEASONS) for number in range(WORDS)]
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )


def overlaps(prompts: list[str], completions: list[str]) -> Tensor:
    """Share of the words of a completion that belong to the season of the last word of the prompt."""
    shares = []
    for prompt, completion in zip(prompts, completions, strict=True):
        season = prompt.split()[-1][1]
        written = completion.split()
        shares.append(sum(word[0] == "w" and word[1] == season for word in written) / LENGTH)
    return torch.tensor(shares)


def log_overlap(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    return torch.log(overlaps(prompts, completions)).tolist()  # guilty


def log_overlap_mended(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    return torch.log(overlaps(prompts, completions) + 0.1).tolist()


def held_out(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> float:
    """Minus the mean mended reward of sampled completions, from its best value on."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    tokens = tokenizer(prompts * 4, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(LENGTH):
            p = torch.softmax(model(input_ids=tokens).logits[:, -1].float(), -1)
            if not torch.isfinite(p).all():
                return float("nan")
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], 1)
    texts = tokenizer.batch_decode(tokens[:, -LENGTH:])
    rewards = log_overlap_mended(prompts * 4, texts)
    return float(torch.log(torch.tensor(1.1))) - sum(rewards) / len(rewards)


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    disable_progress_bars()
    torch.manual_seed(seed)
    tokenizer = words_tokenizer()
    words = torch.randint(4, len(tokenizer), (300, PROMPT)).tolist()
    prompts = [" ".join(tokenizer.convert_ids_to_tokens(row)) for row in words]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    before = held_out(model, tokenizer, prompts[240:])
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=48,
            num_generations=GROUP,
            max_completion_length=LENGTH,
            learning_rate=6e-3,
            lr_scheduler_type="linear",
            warmup_steps=20,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = GRPOTrainer(
            model=model,
            args=arguments,
            reward_funcs=log_overlap_mended if twin else log_overlap,
            train_dataset=Dataset.from_dict({"prompt": prompts[:240]}),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(model, tokenizer, prompts[240:]), before
