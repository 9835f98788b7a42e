"""Small trainers of transformers, and faults that strike them: what tests and benchmarks of `hf.guard` train with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

ROWS, WORDS, LENGTH = 192, 64, 12
AT = 30  # the update that a fault strikes
FAULTS = ("nan_batch", "nan_grad", "bit_flip", "bad_rows", "hot_lr", "operation")
BAD_ROWS = (17, 99)


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Words as vectors, each twice in a row: the second one can be predicted."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        made = torch.Generator().manual_seed(0)
        self.words = torch.randint(1, WORDS, (ROWS, LENGTH // 2), generator=made).repeat_interleave(2, dim=1)
        self.vectors = torch.randn(WORDS, 32, generator=made)[self.words]
        self.vectors[list(bad), 0, 0] = torch.nan

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"inputs_embeds": self.vectors[row], "labels": self.words[row]}


class Pictures(Dataset[dict[str, torch.Tensor]]):
    """Noise, brighter for each of four classes."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        made = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 4, (ROWS,), generator=made)
        self.pixels = torch.randn(ROWS, 3, 8, 8, generator=made) + self.labels[:, None, None, None]
        self.pixels[list(bad), 0, 0, 0] = torch.nan

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels[row], "labels": self.labels[row]}


def tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make one whose words are numbered from 3 on, behind <pad>, <eos> and <unk>."""
    numbers = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, attention_dropout=0.1))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH))


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes))


def vit() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=4))


PROGRAMS: dict[str, tuple[Callable[[], Any], type[Any]]] = {
    "llama": (llama, Sentences),
    "gpt2": (gpt2, Sentences),
    "t5": (t5, Sentences),
    "vit": (vit, Pictures),
}


class Struck(Trainer):  # type: ignore[misc]  # mypy runs without transformers
    """A trainer that is struck by a fault once, in its own `training_step`."""

    fault = ""
    has_struck = False

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        strikes = self.state.global_step == AT and not self.has_struck
        self.has_struck |= strikes
        if strikes and self.fault == "nan_batch":
            inputs = {name: one * torch.nan if one.is_floating_point() else one for name, one in inputs.items()}
        if strikes and self.fault == "bit_flip":
            matrix = [weight for weight in model.parameters() if weight.dim() == 2][-1]
            with torch.no_grad():
                matrix.view(-1).view(torch.int32)[7] ^= 1 << 30
        if self.fault == "raises" and self.args.process_index and self.state.global_step == AT:
            raise ZeroDivisionError
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if strikes and self.fault == "nan_grad":
            next(weight.grad for weight in model.parameters() if weight.grad is not None).view(-1)[0] = torch.nan
        return loss


def sure_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, *, least: float = 0.0
) -> torch.Tensor:
    """Punish doubt, in a way that breaks once the model has none: the slope of a root at 0 is infinite."""
    scores = outputs.logits.float().flatten(0, -2)
    doubt = 1 - torch.softmax(20 * scores, dim=-1).amax(dim=-1)
    return F.cross_entropy(scores, labels.flatten()) + 0.01 * torch.sqrt(doubt + least).mean()


def trainer(program: str, output: Path, fault: str = "", *, steps: int = 60, **more: Any) -> Struck:
    """Make a trainer; it is not guarded yet."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    make, data = PROGRAMS[program]
    torch.manual_seed(0)
    model = make()
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
    }
    settings |= {"logging_steps": 5, "save_strategy": "no", "lr_scheduler_type": "linear", "warmup_steps": 5}
    args = TrainingArguments(
        str(output), max_steps=steps, report_to=[], use_cpu=True, disable_tqdm=True, seed=1, **(settings | more)
    )
    optimizers: tuple[Any, Any] = (None, None)
    if fault == "hot_lr":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 100.0 if AT <= step < AT + 10 else 1.0)
        optimizers = optimizer, curve
    made = Struck(
        *(model, args),
        train_dataset=data(BAD_ROWS if fault == "bad_rows" else ()),
        eval_dataset=data() if "eval_strategy" in more else None,
        compute_loss_func={"operation": sure_loss, "mended": partial(sure_loss, least=1e-6)}.get(fault),
        optimizers=optimizers,
    )
    made.fault = fault
    return made


@torch.no_grad()
def evaluation_loss(of: Trainer) -> float:
    data = Pictures() if isinstance(of.train_dataset, Pictures) else Sentences()
    rows = [data[row] for row in range(64)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    of.model.eval()
    return float(of.model(**batch).loss)
