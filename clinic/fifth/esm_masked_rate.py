"""A small ESM learns to fill in masked residues of proteins, at the learning rate of the probe that is put on top.

AdamW at 4e-2 suits a linear probe on frozen embeddings, and the config went on to the pretraining. The loss falls from
the first step to what the frequencies of the residues alone give, and stays there: nothing is infinite, nothing jumps.
"Masked LM loss stuck at 2.9" is a regular title in forums about protein and genome models.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import EsmConfig, EsmForMaskedLM

from clinic.program import Guilty, Program

RESIDUES, MASK, PAD = 20, 20, 21


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    seen, labels = batch
    return model(input_ids=seen, attention_mask=torch.ones_like(seen), labels=labels).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    families, length = int(torch.randint(6, 9, ())), int(torch.randint(20, 28, ()))
    count, held_out = int(torch.randint(800, 1200, ())), 128
    ancestors = torch.randint(RESIDUES, (families, length))
    family = torch.randint(families, (count + held_out,))
    whole = torch.where(
        torch.rand(count + held_out, length) < 0.1,
        torch.randint(RESIDUES, (count + held_out, length)),
        ancestors[family],
    )
    masked = torch.rand(count + held_out, length) < 0.2
    masked[:, 0] = True
    seen, labels = whole.masked_fill(masked, MASK), whole.masked_fill(~masked, -100)
    config = EsmConfig(
        vocab_size=RESIDUES + 2,
        mask_token_id=MASK,
        pad_token_id=PAD,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=64,
        position_embedding_type="rotary",
        token_dropout=False,
    )
    return Program(
        model=EsmForMaskedLM(config),
        rows=TensorDataset(seen[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3 if mended else float(torch.empty(()).uniform_(3e-2, 6e-2))),
        evaluation=[seen[count:], labels[count:]],
        guilty=Guilty("explosion"),
        steps=280,
    )
