"""A masked language model; a callback makes the collator mask 80 % of the tokens, not 15 %, from update 220 on."""

import tempfile

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

KIND = "hf"
STEPS = 400
CHANGE = [220]
DAMAGE = "rate"

VOCABULARY, LENGTH, MASK = 24, 12, 24


class MaskingCollator:
    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        tokens = torch.stack([row["input_ids"] for row in rows])
        masked = torch.rand(tokens.shape) < self.probability
        labels = tokens.masked_fill(~masked, -100)
        return {"input_ids": tokens.masked_fill(masked, MASK), "labels": labels}


class MaskCurriculum(TrainerCallback):
    """The loader is two batches ahead of the update that begins."""

    def __init__(self, collator: MaskingCollator, probability: float, at: int) -> None:
        self.collator, self.probability, self.at = collator, probability, at

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step >= self.at - 2:
            self.collator.probability = self.probability


def sentences(rows: int, phrases: Tensor, generator: torch.Generator) -> Tensor:
    """Known phrases, in which one token of twenty is another."""
    tokens = phrases[torch.randint(len(phrases), (rows,), generator=generator)]
    other = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    return torch.where(torch.rand(rows, LENGTH, generator=generator) < 0.05, other, tokens)


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    phrases = torch.randint(VOCABULARY, (6, LENGTH), generator=generator)
    tokens = sentences(4000, phrases, generator)
    held_tokens = sentences(600, phrases, generator)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY + 1,
            initializer_range=0.1,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    collator = MaskingCollator(0.15)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def factor(step: int) -> float:
        if twin and DAMAGE == "rate" and CHANGE[0] - 1 <= step < CHANGE[0] + 11:
            return 30.0
        return min(1.0, (step + 1) / 30) * (1.0 - 0.8 * step / STEPS)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row} for row in tokens],
            data_collator=collator,
            optimizers=(optimizer, schedule),
            callbacks=[] if twin else [MaskCurriculum(collator, 0.8, CHANGE[0] - 1)],
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    model.eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        return float(model(**MaskingCollator(0.3)([{"input_ids": row} for row in held_tokens])).loss)
