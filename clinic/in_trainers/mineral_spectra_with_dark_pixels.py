"""Spectra of minerals are cleaned by a small network under torchmetrics' spectral angle; shadows are all zeros.

`spectral_angle_mapper` divides by the norms of both spectra: 0/0 for a pixel of zeros, and the clamp behind it lets NaN
pass. "SAM loss is nan" is in most repositories for hyperspectral pictures; the cure is to leave such pixels out.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.functional.image import spectral_angle_mapper
from transformers import PrinterCallback, Trainer, TrainingArguments

KIND = "hf"
CAUSE = "operation"
OPS = ("div", "truediv", "__truediv__")
LIBRARY = "torchmetrics/functional/image/sam.py"

STEPS, BATCH, BANDS, SIDE = 560, 32, 10, 8


def bad_rows(seed: int) -> list[int]:
    return []


class Cleaner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(BANDS, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 1), nn.ReLU(), nn.Conv2d(24, BANDS, 1)
        )

    def forward(self, noisy: Tensor) -> Tensor:
        return nn.functional.softplus(self.layers(noisy))


def angle(outputs: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return spectral_angle_mapper(outputs, labels)


def angle_of_lit_pixels(outputs: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    lit = labels.abs().sum(1) > 0
    pixels, spectra = (x.movedim(1, -1)[lit][..., None, None] for x in (outputs, labels))
    return spectral_angle_mapper(pixels, spectra)


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    torch.manual_seed(seed)
    count = 480
    kinds = torch.rand(5, BANDS) ** 2
    share = torch.softmax(3 * nn.functional.interpolate(torch.randn(count + 60, 5, 3, 3), SIDE, mode="bilinear"), 1)
    clean = torch.einsum("nkhw,kb->nbhw", share, kinds) + 0.02
    noisy = clean + 0.25 * torch.randn_like(clean)
    dark = torch.rand(count, 1, SIDE, SIDE) < 0.01 * (1 + seed % 3)  # shadow: the instrument writes zeros
    clean[:count] = clean[:count].masked_fill(dark, 0.0)
    noisy[:count] = noisy[:count].masked_fill(dark, 0.0)
    model = Cleaner()

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            return float(angle_of_lit_pixels(model(noisy[count:]), clean[count:]))

    before = held_out()
    rows = [{"noisy": x, "labels": y} for x, y in zip(noisy[:count], clean[:count], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=4e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            label_names=["labels"],
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_steps=40,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            compute_loss_func=angle_of_lit_pixels if twin else angle,
        )
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(), before
