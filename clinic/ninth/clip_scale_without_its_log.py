"""A small CLIP that finds the product photo to a caption: 1 / 0.07 is given as the logarithm of the scale, not its log.

`logit_scale_init_value` wants log(1 / 0.07) = 2.66 and gets 14.3, so `exp` makes cosines 1.6 million times larger: the
softmax is one-hot from the first step and nothing is ever infinite. All embeddings fall together into one point, and
the loss stays at the logarithm of the size of the batch. Asked as "CLIP loss is stuck at ln(batch size)"; the paper
clips the scale at 100 "to prevent training instability".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import CLIPConfig, CLIPModel

from clinic.program import Guilty, Program

GREATEST = 100.0  # scale, in the paper


def loss(model: nn.Module, batch: list[Tensor], clipped: bool) -> Tensor:
    photos, captions = batch
    found = model(input_ids=captions, pixel_values=photos)
    scale = model.logit_scale.exp()  # guilty
    if clipped:
        scale = scale.clamp(max=GREATEST)
    scores = scale * found.text_embeds @ found.image_embeds.T
    right = torch.arange(len(photos))
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    colours, side, patch, count = 12 + 2 * (seed % 3), 12, 4, 1200
    palette = torch.randn(colours, 3)
    parts = (side // patch) ** 2
    shown = torch.rand(count + 64, colours).argsort(dim=1)[:, :parts]  # one colour a part of the picture
    photos = palette[shown].transpose(1, 2).unflatten(2, (side // patch, side // patch))
    photos = photos.repeat_interleave(patch, dim=2).repeat_interleave(patch, dim=3)
    photos = photos + 0.2 * torch.randn(photos.shape)
    named = shown[:, :4] + 1  # the caption names what is in the first places
    captions = torch.cat([named, torch.full((len(named), 1), colours + 1)], dim=1)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": colours + 1, "pad_token_id": 0}
    config = CLIPConfig(
        text_config={"vocab_size": colours + 2, "max_position_embeddings": 8, **ends, **layers},
        vision_config={"image_size": side, "patch_size": patch, **layers},
        projection_dim=24,
        logit_scale_init_value=1 / 0.07,
    )
    return Program(
        model=CLIPModel(config),
        rows=TensorDataset(photos[:count], captions[:count]),
        loss=partial(loss, clipped=mended),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        evaluation=[photos[count:], captions[count:]],
        guilty=Guilty("operation", ops=("exp",)),
        steps=300,
    )
