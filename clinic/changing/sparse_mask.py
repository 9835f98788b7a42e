"""A tiny transformer on generated text; from update 240 on a mask zeroes 80 % of its weights after each update."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

KIND = "loop"
STEPS = 480
CHANGE = [240]
DAMAGE = "weights"

BATCH_SIZE, LENGTH, SYMBOLS, WIDTH, SPARSITY = 16, 16, 20, 32, 0.8


class Text(Dataset[Tensor]):
    """Symbols that depend on the two before them."""

    def __init__(self, rows: int, rule: Tensor) -> None:
        text = torch.randint(SYMBOLS, (rows, LENGTH + 1))
        for place in range(2, LENGTH + 1):
            follows = rule[text[:, place - 1], text[:, place - 2] % 3]
            text[:, place] = torch.where(torch.rand(rows) < 0.9, follows, text[:, place])
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, row: int) -> Tensor:
        return self.text[row]


class LanguageModel(nn.Module):
    """One block of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.norm_1, self.norm_2, self.norm_3 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(attended)
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        logits: Tensor = self.head(self.norm_3(x))
        return logits


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Return the cross entropy of the next symbols."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """Keep the largest weights of each matrix."""
    masks = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and name.endswith(".weight") and "tokens" not in name:
            threshold = weight.detach().abs().flatten().quantile(SPARSITY)
            masks[name] = (weight.detach().abs() > threshold).float()
    return masks


@torch.no_grad()
def apply_masks(model: nn.Module, masks: dict[str, Tensor]) -> None:
    """Zero what is masked."""
    for name, weight in model.named_parameters():
        if name in masks:
            weight.mul_(masks[name])


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the cross entropy of held-out text."""
    torch.manual_seed(seed)
    rule = torch.randint(SYMBOLS, (SYMBOLS, 3))
    dataset, held_out = Text(4000, rule), Text(400, rule)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    masks: dict[str, Tensor] = {}
    is_hit = False

    def before(step: int) -> None:
        nonlocal masks, is_hit
        if step + 1 < CHANGE[0]:
            masks = {}
        elif not twin and not masks:
            masks = masks_of(model)
            apply_masks(model, masks)
        if twin and DAMAGE == "weights" and step + 1 == CHANGE[0] and not is_hit:
            is_hit = True
            with torch.no_grad():
                model.tokens.weight.copy_(model.tokens.weight.roll(1, 0))

    if guard is None:
        step = 0
        while step < STEPS:
            for text in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True):
                before(step)
                loss = loss_of(model, text)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                apply_masks(model, masks)
                step += 1
                if step == STEPS:
                    break
    else:
        from resilient_train import Guard

        options: Any = guard
        guarded = Guard(None, model, optimizer, data=dataset, batch_size=BATCH_SIZE, steps=STEPS, **options)
        for text in guarded.batches():
            before(guarded.attempted_step)
            loss = loss_of(model, text)
            loss.backward()
            guarded.update(loss)
            apply_masks(model, masks)
        guarded.close()
    with torch.no_grad():
        return float(loss_of(model, held_out.text))
