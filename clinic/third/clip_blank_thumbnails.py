"""Pictures are brought to mean 0 and spread 1 when they are read, and a few thumbnails of a shop are one colour only.

For these it is zero over zero. A contrastive loss compares all with all: one such picture, and every similarity of the
batch that has to do with it is NaN.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from clinic.program import Guilty, Program


class Shop(torch.utils.data.Dataset):
    """Thumbnails as bytes, and captions as tokens that end with the highest one."""

    def __init__(self, thumbnails: Tensor, captions: Tensor) -> None:
        self.thumbnails, self.captions = thumbnails, captions

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        picture = self.thumbnails[row].float()
        return {"pixel_values": (picture - picture.mean()) / picture.std(), "input_ids": self.captions[row]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, return_loss=True).loss


def clip(words: int, size: int) -> CLIPModel:
    text = {"vocab_size": words, "max_position_embeddings": 8, "eos_token_id": words - 1, "bos_token_id": 0}
    both = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return CLIPModel(
        CLIPConfig(
            text_config={**both, **text, "pad_token_id": 1},
            vision_config={**both, "image_size": size, "patch_size": 4},
            projection_dim=24,
        )
    )


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    things, colours, size = int(torch.randint(8, 12, ())), 6, 16
    rows, held_out, words = int(torch.randint(700, 1100, ())), 48, 32
    shapes, tints = torch.randn(things, 1, size, size), torch.randn(colours, 3, 1, 1)
    thing, colour = torch.randint(things, (rows + held_out,)), torch.randint(colours, (rows + held_out,))
    drawn = shapes[thing] + tints[colour] + 0.3 * torch.randn(rows + held_out, 3, size, size)
    thumbnails = (128 + 40 * drawn).clamp(0, 255).byte()
    ends = torch.full_like(thing, words - 1)
    captions = torch.stack([torch.zeros_like(thing), 2 + colour, 2 + colours + thing, ends], dim=-1)
    bad = sorted(torch.randperm(rows)[: int(torch.randint(4, 9, ()))].tolist())
    if not mended:
        thumbnails[bad] = 255
    data = Shop(thumbnails, captions)
    held = [data[row] for row in range(rows, rows + held_out)]
    return Program(
        model=clip(words, size),
        rows=torch.utils.data.Subset(data, range(rows)),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=torch.utils.data.default_collate(held),
        guilty=Guilty("data", rows=tuple(bad)),
        steps=220,
    )
