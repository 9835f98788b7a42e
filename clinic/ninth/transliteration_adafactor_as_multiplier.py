"""Adafactor with a rate of one, "since it finds its own rate": in PyTorch the rate is a share of each weight's size.

Adafactor in fairseq and transformers needs no rate, and people who come from there put 1.0. `torch.optim.Adafactor`
takes it as the most that a weight may change in one update, as a share of itself: its paper says 0.01, and without that
bound the share falls only as one over the root of the step. Nothing is infinite, but attention never forms. Here a
small Marian spells the words of one script in another.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import MarianConfig, MarianMTModel

from clinic.program import Guilty, Program

PADDING, START, FIRST = 0, 1, 2


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, spelled = batch
    before = nn.functional.pad(spelled[:, :-1], (1, 0), value=START)
    logits = model(input_ids=words, attention_mask=torch.ones_like(words), decoder_input_ids=before).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), spelled.flatten())


def transliterate(words: Tensor, letters: int) -> Tensor:
    """A letter is spelled by itself, but softly where the next one is a front vowel (one of the first three)."""
    following = torch.cat([words[:, 1:], words[:, :1]], dim=1)
    soft = following < FIRST + 3
    table = torch.randperm(letters)
    return torch.where(soft, FIRST + letters + table[words - FIRST], FIRST + table[words - FIRST])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    letters, length, count = 10 + 2 * (seed % 4), 8, 960
    words = FIRST + torch.randint(letters, (count + 96, length))
    spelled = transliterate(words, letters)
    config = MarianConfig(
        vocab_size=FIRST + 2 * letters,
        d_model=48,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=32,
        pad_token_id=PADDING,
        bos_token_id=START,
        eos_token_id=PADDING,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
        scale_embedding=True,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
    return Program(
        model=MarianMTModel(config),
        rows=TensorDataset(words[:count], spelled[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adafactor, lr=0.03 if mended else 1.0),  # guilty
        evaluation=[words[count:], spelled[count:]],
        guilty=Guilty("optimizer"),
        steps=320,
    )
