"""A small BERT classifies token sequences with a frozen encoder; a callback unfreezes the encoder at update 200."""

import tempfile

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

KIND = "hf"
STEPS = 400
CHANGE = [200]
DAMAGE = "weights"

CLASSES, LENGTH, PER_CLASS, ROWS = 4, 16, 10, 3200


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=CLASSES * PER_CLASS,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(config.hidden_size, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=input_ids).last_hidden_state
        logits = self.classifier(self.dropout(hidden.mean(dim=1)))
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class FreezeEncoder(TrainerCallback):
    """Freezes the encoder when training begins, and unfreezes it at a step."""

    def __init__(self, model: Classifier, unfreeze_at: int | None) -> None:
        self.model, self.unfreeze_at = model, unfreeze_at

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.model.bert.requires_grad_(False)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step == self.unfreeze_at:
            self.model.bert.requires_grad_(True)


class Damage(TrainerCallback):
    def __init__(self, model: Classifier) -> None:
        self.model, self.done = model, False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step == CHANGE[0] - 1 and not self.done:
            self.done = True
            with torch.no_grad():
                scale = self.model.bert.encoder.layer[0].output.LayerNorm.weight
                scale[:6].mul_(12)
                scale[6:].mul_(0.05)


def sequences(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each token is from the group of its class with a chance of 0.3, else from anywhere."""
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    anywhere = torch.randint(CLASSES * PER_CLASS, (rows, LENGTH), generator=generator)
    own = labels[:, None] * PER_CLASS + torch.randint(PER_CLASS, (rows, LENGTH), generator=generator)
    return torch.where(torch.rand(rows, LENGTH, generator=generator) < 0.3, own, anywhere), labels


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = sequences(ROWS, generator)
    held_tokens, held_labels = sequences(1000, generator)
    model = Classifier()
    callbacks: list[TrainerCallback] = [FreezeEncoder(model, None if twin else CHANGE[0] - 1)]
    if twin and DAMAGE == "weights":
        callbacks.append(Damage(model))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=32,
            learning_rate=5e-3,
            warmup_steps=20,
            lr_scheduler_type="constant_with_warmup",
            weight_decay=0.01,
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
            train_dataset=[{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)],
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    model.eval()
    with torch.no_grad():
        return float(cross_entropy(model(held_tokens)["logits"], held_labels))
