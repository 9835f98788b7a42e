"""A small ViT classifies the digits of scikit-learn; a callback switches label smoothing on at update 200."""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.trainer_pt_utils import LabelSmoother

KIND = "hf"
STEPS = 400
CHANGE = [200]
DAMAGE = "rate"


class SmoothLabels(TrainerCallback):
    """Trains with hard labels until a step, and with smoothed ones from there on."""

    def __init__(self, epsilon: float, from_step: int) -> None:
        self.epsilon, self.from_step = epsilon, from_step
        self.trainer: Trainer | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.trainer is not None and state.global_step >= self.from_step:
            self.trainer.label_smoother = LabelSmoother(epsilon=self.epsilon)


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    torch.manual_seed(seed)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 8 - 1
    labels = torch.tensor(digits.target)[order]
    images, held_images, labels, held_labels = images[:1400], images[1400:], labels[:1400], labels[1400:]
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=10,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
    )
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    def factor(step: int) -> float:
        if twin and DAMAGE == "rate" and CHANGE[0] - 1 <= step < CHANGE[0] + 9:
            return 30.0
        return min(1.0, (step + 1) / 40)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    smoothing = SmoothLabels(0.1, CHANGE[0] - 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=32,
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
            train_dataset=[{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)],
            optimizers=(optimizer, schedule),
            callbacks=[] if twin else [smoothing],
        )
        smoothing.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
            smoothing.trainer = trainer
        trainer.train()
    model.eval()
    with torch.no_grad():
        return float(cross_entropy(model(pixel_values=held_images).logits, held_labels))
