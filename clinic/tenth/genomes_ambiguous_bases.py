"""Which kind of promoter a stretch of DNA is, by a small SqueezeBERT: `KeyError: 'N'`, some batches into the run.

Letters are looked up in a table of A, C, G and T. A few stretches hold what a sequencer writes where it is not sure:
N for any base, R or Y for one of two (the codes of IUPAC). Asked wherever the letters of FASTA files are encoded by a
dictionary of four.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import SqueezeBertConfig, SqueezeBertForSequenceClassification

from clinic.program import Guilty, Program

BASES = {"A": 0, "C": 1, "G": 2, "T": 3}
MOTIFS = ("TATAAA", "GGCCGG", "CACGTG", "TTGACA")


class Stretches(Dataset[tuple[Tensor, int]]):
    """Reads letters as they stand in the FASTA file."""

    def __init__(self, letters: list[str], kinds: list[int]) -> None:
        self.letters, self.kinds = letters, kinds

    def __len__(self) -> int:
        return len(self.letters)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.tensor([BASES[letter] for letter in self.letters[row]]), self.kinds[row]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    stretches, kinds = batch
    logits = model(input_ids=stretches, attention_mask=torch.ones_like(stretches)).logits
    return nn.functional.cross_entropy(logits, kinds)


def draw(count: int, length: int, kinds: int) -> tuple[list[str], list[int]]:
    letters, labels = [], torch.randint(kinds, (count,)).tolist()
    for kind in labels:
        stretch = ["ACGT"[base] for base in torch.randint(4, (length,)).tolist()]
        for at in (torch.randint(8, ()).item(), torch.randint(8, ()).item() + length // 2):
            stretch[int(at) : int(at) + 6] = MOTIFS[kind]
        letters.append("".join(stretch))
    return letters, labels


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kinds, length, count = 3 + seed % 2, 30, 900
    letters, labels = draw(count + 128, length, kinds)
    unsure = torch.randperm(count)[: 3 + seed % 5].sort().values.tolist()
    for row in unsure:
        at, code = int(torch.randint(length, ())), "NRY"[int(torch.randint(3, ()))]
        if not mended:
            letters[row] = letters[row][:at] + code + letters[row][at + 1 :]
    config = SqueezeBertConfig(
        vocab_size=len(BASES),
        hidden_size=32,
        embedding_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=length,
        num_labels=kinds,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,
    )
    held_out = [Stretches(letters, labels)[row] for row in range(count, count + 128)]
    return Program(
        model=SqueezeBertForSequenceClassification(config),
        rows=Stretches(letters[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[torch.stack([one for one, _ in held_out]), torch.tensor([kind for _, kind in held_out])],
        guilty=Guilty("data", rows=tuple(unsure)),
        steps=320,
    )
