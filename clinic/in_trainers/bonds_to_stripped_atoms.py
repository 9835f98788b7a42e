"""Molecules as dense graphs: the hydrogens were stripped from the atoms, but a few of the bond lists still name them.

`__getitem__` raises "IndexError: index 9 is out of bounds" once in a while, as many report for graphs made by hand
after a cleaning. Mended by leaving those molecules out.
"""

import logging
import tempfile
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot, relu
from torch.utils.data import DataLoader, Dataset, Subset

KIND = "lightning"
CAUSE = "data"  # rows that raise
OPS = ()
LIBRARY = None
STEPS = 450

ELEMENTS, LARGEST, HELD = 5, 14, 128


class Molecules(Dataset):
    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        count = int(torch.randint(600, 900, (), generator=draw)) + HELD
        worth = torch.randn(ELEMENTS, generator=draw)
        pull = torch.randn(ELEMENTS, ELEMENTS, generator=draw)
        self.atoms, self.bonds, self.energies = [], [], []
        for _ in range(count):
            size = int(torch.randint(6, LARGEST + 1, (), generator=draw))
            atoms = torch.randint(ELEMENTS, (size,), generator=draw)
            bonds = [(i, int(torch.randint(i, (), generator=draw))) for i in range(1, size)]  # a tree, and rings
            bonds += [tuple(torch.randperm(size, generator=draw)[:2].tolist()) for _ in range(size // 5)]
            energy = worth[atoms].sum() + sum(pull[atoms[i], atoms[j]] for i, j in bonds)
            self.atoms.append(atoms)
            self.bonds.append(bonds)
            self.energies.append(float(energy) / 4)
        self.bad = torch.randperm(count - HELD, generator=draw)[: int(torch.randint(2, 6, (), generator=draw))].tolist()
        for row in self.bad:
            size = len(self.atoms[row])
            self.bonds[row].append((int(torch.randint(size, (), generator=draw)), size + row % 3))

    def __len__(self) -> int:
        return len(self.atoms)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        size = len(self.atoms[row])
        adjacency = torch.eye(size)
        for i, j in self.bonds[row]:
            adjacency[i, j] += 1
            adjacency[j, i] += 1
        nodes, edges = torch.zeros(LARGEST, ELEMENTS), torch.zeros(LARGEST, LARGEST)
        nodes[:size], edges[:size, :size] = one_hot(self.atoms[row], ELEMENTS).float(), adjacency
        return nodes, edges, torch.tensor(self.energies[row])


def bad_rows(seed: int) -> list[int]:
    return sorted(Molecules(seed).bad)


class GraphNet(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(ELEMENTS, width), nn.Linear(2 * width, width)
        self.third = nn.Linear(2 * width, width)
        self.out = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        there = nodes.sum(-1, keepdim=True)
        hidden = relu(self.first(nodes))
        hidden = relu(self.second(torch.cat([hidden, edges @ hidden], -1)))
        hidden = relu(self.third(torch.cat([hidden, edges @ hidden], -1)))
        return (self.out(hidden) * there).sum(1).squeeze(-1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        nodes, edges, energies = batch
        return mse_loss(self(nodes, edges), energies)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    molecules = Molecules(seed)
    count = len(molecules) - HELD
    rows = [row for row in range(count) if not (twin and row in molecules.bad)]
    L.seed_everything(seed, verbose=False)
    module = GraphNet(width=32 + 16 * (seed % 3))
    loader = DataLoader(Subset(molecules, rows), batch_size=32, shuffle=True)
    columns = zip(*(molecules[row] for row in range(count, count + HELD)), strict=True)
    nodes, edges, energies = (torch.stack(column) for column in columns)

    def held_out() -> float:
        module.eval()
        with torch.no_grad():
            return float(mse_loss(module(nodes, edges), energies))

    before = held_out()
    module.train()
    callbacks: list[L.Callback] = []
    if guard is not None:
        import resilient_train

        callbacks.append(resilient_train.lightning.Guarded(**guard))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = L.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
    return held_out(), before
