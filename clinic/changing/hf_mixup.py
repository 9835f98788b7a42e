"""A residual network on digits; compute_loss mixes pairs of rows from update 150 on, and stops that at update 320."""

import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, relu
from transformers import PrinterCallback, Trainer, TrainingArguments

KIND = "hf"
STEPS = 400
CHANGE = [150, 320]
DAMAGE = "labels"

CLASSES = 10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(relu(self.into(self.norm(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 48), Block(48), Block(48), nn.LayerNorm(48), nn.Linear(48, CLASSES))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class MixupTrainer(Trainer):
    def __init__(self, *args: Any, mix_between: tuple[int, int] | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mix_between = mix_between

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        x, labels = inputs["x"], one_hot(inputs["labels"], CLASSES).float()
        mixing = self.mix_between is not None and self.mix_between[0] <= self.state.global_step < self.mix_between[1]
        if mixing and model.training:
            share = float(torch.distributions.Beta(1.0, 1.0).sample())
            partner = torch.randperm(len(x))
            x = share * x + (1 - share) * x[partner]
            labels = share * labels + (1 - share) * labels[partner]
        outputs = model(x, labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    torch.manual_seed(seed)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    x, held_x, labels, held_labels = x[:1400], x[1400:], labels[:1400], labels[1400:]
    if twin and DAMAGE == "labels":
        wrong = torch.randperm(len(labels))[: len(labels) // 25]
        labels[wrong] = (labels[wrong] + torch.randint(1, CLASSES, (len(wrong),))) % CLASSES
    model = Network()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            weight_decay=0.01,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = MixupTrainer(
            model=model,
            args=arguments,
            train_dataset=[{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)],
            mix_between=None if twin else (CHANGE[0] - 1, CHANGE[1] - 1),
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    model.eval()
    with torch.no_grad():
        return float(cross_entropy(model(held_x)["logits"], held_labels))
