"""A classifier of feature vectors; compute_loss adds a supervised contrastive loss from update 300 on."""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import PrinterCallback, Trainer, TrainingArguments

KIND = "hf"
STEPS = 400
CHANGE = [300]
DAMAGE = "labels"

BATCH, FEATURES, CLASSES = 32, 24, 8


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU())
        self.projection = nn.Linear(64, 16)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.body(x)
        outputs = {"logits": self.head(hidden), "embeddings": self.projection(hidden)}
        if labels is not None:
            outputs["loss"] = cross_entropy(outputs["logits"], labels)
        return outputs


def supervised_contrastive(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    z = normalize(embeddings, dim=1)
    same = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool)
    similarity = (z @ z.T / temperature).masked_fill(itself, -1e9)
    log_probability = similarity - similarity.logsumexp(dim=1, keepdim=True)
    positives = same & ~itself
    each = (log_probability * positives).sum(dim=1) / positives.sum(dim=1).clamp(min=1)
    return -each[positives.any(dim=1)].mean()


class ContrastiveTrainer(Trainer):
    def __init__(self, *args: Any, contrast_from: int | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.contrast_from = contrast_from

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"]
        if self.contrast_from is not None and self.state.global_step >= self.contrast_from:
            loss = loss + supervised_contrastive(outputs["embeddings"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    torch.manual_seed(seed)
    rows = STEPS * BATCH
    centres = 1.5 * torch.randn(2, CLASSES, FEATURES)  # two clusters for each class
    labels = torch.randint(CLASSES, (rows + 1000,))
    x = centres[torch.randint(2, (rows + 1000,)), labels] + 1.6 * torch.randn(rows + 1000, FEATURES)
    x, held_x, labels, held_labels = x[:rows], x[rows:], labels[:rows], labels[rows:]
    if twin and DAMAGE == "labels":
        first = (CHANGE[0] - 1) * BATCH
        labels[first : first + rows // 16 : 2] = (labels[first : first + rows // 16 : 2] + 1) % CLASSES
    model = Network()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            train_sampling_strategy="sequential",
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            max_grad_norm=5.0,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = ContrastiveTrainer(
            model=model,
            args=arguments,
            train_dataset=[{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)],
            contrast_from=None if twin else CHANGE[0] - 1,
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    model.eval()
    with torch.no_grad():
        return float(cross_entropy(model(held_x)["logits"], held_labels))
