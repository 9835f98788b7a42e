"""RLOO on a task with a reward that can be checked; at a rate of 0.05 the policy says one thing to every prompt.

The reward stands still, its spread within a group goes to zero, and with it the gradient: nothing is NaN, nothing
recovers. "RLOO/GRPO reward collapses, reward_std is 0, all completions are identical".
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import RLOOConfig, RLOOTrainer

KIND = "trl"
CAUSE = "explosion"
OPS: tuple[str, ...] = ()
LIBRARY = None

STEPS, GROUP, LENGTH = 200, 8, 2
NUMBERS, FILLERS = 12, 12


def bad_rows(seed: int) -> list[int]:
    return []


def numbers_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "</s>", "<unk>"]
    tokens += [f"n{number}" for number in range(NUMBERS)] + [f"please{number}" for number in range(FILLERS)]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


def near_the_number(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Each number that is said counts the more, the nearer it is to the prompt's number on the clock of NUMBERS."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        asked = int(prompt.split()[-1][1:])
        reward = 0.0
        for word in completion.split():
            if word.startswith("n"):
                distance = (int(word[1:]) - asked) % NUMBERS
                reward += max(0.0, 1 - min(distance, NUMBERS - distance) / 3) / LENGTH
        rewards.append(reward)
    return rewards


def held_out(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> float:
    """One minus the mean reward of sampled completions."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    tokens = tokenizer(prompts * 4, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(LENGTH):
            p = torch.softmax(model(input_ids=tokens).logits[:, -1].float(), -1)
            if not torch.isfinite(p).all():
                return float("nan")
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], 1)
    rewards = near_the_number(prompts * 4, tokenizer.batch_decode(tokens[:, -LENGTH:]))
    return 1 - sum(rewards) / len(rewards)


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    disable_progress_bars()
    torch.manual_seed(seed)
    tokenizer = numbers_tokenizer()
    kinds = [(number, filler) for number in range(NUMBERS) for filler in range(FILLERS)]
    order = torch.randperm(len(kinds)).tolist()
    prompts = [f"please{kinds[place][1]} n{kinds[place][0]}" for place in order]
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config)
    before = held_out(model, tokenizer, prompts[100:])
    with tempfile.TemporaryDirectory() as folder:
        arguments = RLOOConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=48,
            num_generations=GROUP,
            max_completion_length=LENGTH,
            beta=0.0,
            learning_rate=5e-3 if twin else 5e-2,
            lr_scheduler_type="constant",
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_steps=20,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = RLOOTrainer(
            model=model,
            args=arguments,
            reward_funcs=near_the_number,
            train_dataset=Dataset.from_dict({"prompt": prompts[:100]}),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(model, tokenizer, prompts[100:]), before
