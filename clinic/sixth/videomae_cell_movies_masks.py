"""Movies of crawling cells for a VideoMAE, pretrained with the masks of the example in its documentation.

The example draws each patch by itself, for one movie. With several in a batch each hides another number of patches,
the model cannot put them back into one tensor, and most batches end in "shape '[4, -1, 48]' is invalid for input of
size 2448". Where the sum happens to fit, patches of one movie slip into another. Known from the issues of transformers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import VideoMAEConfig, VideoMAEForPreTraining

from clinic.program import Guilty, Program

SIZE, PATCH, FRAMES, HIDDEN = 16, 4, 4, 0.6
TOKENS = (SIZE // PATCH) ** 2 * FRAMES // 2


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    movie, noise = batch
    if mended:
        masked = noise.argsort(-1).argsort(-1) < round(HIDDEN * TOKENS)
    else:
        masked = noise < HIDDEN  # guilty
    return model(movie, bool_masked_pos=masked).loss  # guilty


def movies(count: int) -> Tensor:
    """Two bright cells on a dark dish, each with a course of its own; red, green and blue are alike."""
    grid, time = torch.arange(SIZE), torch.arange(FRAMES)[:, None]
    start, course = SIZE * torch.rand(count, 2, 1, 2), 1.5 * torch.randn(count, 2, 1, 2)
    place = start + course * time
    radius = torch.empty(count, 2, 1, 1, 1).uniform_(2, 4)
    far = (grid[:, None] - place[..., 0, None, None]).square() + (grid - place[..., 1, None, None]).square()
    frame = (-far / radius.square()).exp().sum(1)
    movie = 2 * frame.unsqueeze(2).expand(-1, -1, 3, -1, -1) - 0.5
    return movie + 0.05 * torch.randn(movie.shape)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count, held_out = int(torch.randint(500, 800, ())), 64
    movie, noise = movies(count + held_out), torch.rand(count + held_out, TOKENS)
    width = int(torch.randint(3, 5, ())) * 16
    config = VideoMAEConfig(
        image_size=SIZE,
        patch_size=PATCH,
        num_frames=FRAMES,
        tubelet_size=2,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * width,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
        norm_pix_loss=False,
    )
    return Program(
        model=VideoMAEForPreTraining(config),
        rows=TensorDataset(movie[:count], noise[:count]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.AdamW, lr=1.5e-3, weight_decay=0.05, betas=(0.9, 0.95)),
        evaluation=[movie[count:], noise[count:]],
        guilty=Guilty("operation", ops=("reshape",)),
        batch_size=4,
        steps=400,
    )
