"""A small network learns digits 0 to 4, then 5 to 9; a callback draws the head again at update 250, for the second."""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

KIND = "hf"
STEPS = 400
CHANGE = [250]
DAMAGE = "weights"

BATCH = 32


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24 * 16, 48),
            nn.ReLU(),
        )
        self.head = nn.Linear(48, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.features(pixel_values))
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class NewHead(TrainerCallback):
    """The second task has other classes: its head begins anew."""

    def __init__(self, model: Network, at: int) -> None:
        self.model, self.at = model, at

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step == self.at:
            self.model.head.reset_parameters()


class Damage(TrainerCallback):
    def __init__(self, model: Network) -> None:
        self.model, self.done = model, False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step == CHANGE[0] - 1 and not self.done:
            self.done = True
            with torch.no_grad():
                self.model.features[6].weight[:45].fill_(-0.2)


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    torch.manual_seed(seed)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    held_images, held_labels = images[1300:], labels[1300:]
    images, labels = images[:1300], labels[:1300]

    old, new = (labels < 5).nonzero().flatten(), (labels >= 5).nonzero().flatten()
    first = old[torch.randint(len(old), ((STEPS if twin else CHANGE[0] - 1) * BATCH,))]
    second = new[torch.randint(len(new), (STEPS * BATCH - len(first),))]
    stream = torch.cat([first, second])  # the tasks come one after the other
    noisy = images[stream] + 0.15 * torch.randn(len(stream), 1, 8, 8)
    targets = labels[stream] % 5

    model = Network()
    callbacks: list[TrainerCallback] = []
    if not twin:
        callbacks.append(NewHead(model, CHANGE[0] - 1))
    elif DAMAGE == "weights":
        callbacks.append(Damage(model))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            train_sampling_strategy="sequential",
            learning_rate=2e-3,
            lr_scheduler_type="constant",
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
            train_dataset=[{"pixel_values": x, "labels": y} for x, y in zip(noisy, targets, strict=True)],
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    model.eval()
    asked = held_labels < 5 if twin else held_labels >= 5
    with torch.no_grad():
        return float(cross_entropy(model(held_images[asked])["logits"], held_labels[asked] % 5))
