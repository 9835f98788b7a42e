"""A spectrogram transformer takes over the learning rate of the small CNN that it replaces.

0.02 was fine for the CNN. The transformer neither diverges nor warns: the loss goes down for a while and then stays
where it is, far above what it can reach, and people ask in the forum of the library why their AST "does not learn".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate
from transformers import ASTConfig, ASTForAudioClassification

from clinic.program import Guilty, Program


class Keywords(Dataset[dict[str, Tensor]]):
    """Log mel spectrograms of single words."""

    def __init__(self, spectrograms: Tensor, words: Tensor) -> None:
        self.spectrograms, self.words = spectrograms, words

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_values": self.spectrograms[row], "labels": self.words[row]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    answer: Tensor = model(**batch).loss
    return answer


def transformer(words: int, frames: int, bins: int) -> ASTForAudioClassification:
    return ASTForAudioClassification(
        ASTConfig(
            hidden_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            patch_size=4,
            frequency_stride=4,
            time_stride=4,
            max_length=frames,
            num_mel_bins=bins,
            num_labels=words,
        )
    )


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, frames, bins = int(torch.randint(8, 13, ())), 20, 16
    rows, held_out = int(torch.randint(900, 1300, ())), 96
    word = torch.randint(words, (rows + held_out,))
    # every word is a formant that moves from one pitch to another
    begins, ends = torch.rand(words) * bins, torch.rand(words) * bins
    time = torch.linspace(0, 1, frames)
    pitch = begins[word, None] * (1 - time) + ends[word, None] * time + 0.5 * torch.randn(rows + held_out, 1)
    near = -(pitch[:, :, None] - torch.arange(bins)).square() / 4
    spectrograms = 2 * near.exp() - 0.5 + 0.5 * torch.randn(rows + held_out, frames, bins)
    data = Keywords(spectrograms, word)
    return Program(
        model=transformer(words, frames, bins),
        rows=Subset(data, range(rows)),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3 if mended else 2e-2, weight_decay=0.01),
        evaluation=default_collate([data[row] for row in range(rows, rows + held_out)]),
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=260,
        clip=1.0,
    )
