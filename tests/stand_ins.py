"""Tiny packages in the places of large ones that public scripts import: only data sets, an environment and a metric."""

from __future__ import annotations

from pathlib import Path

TORCHVISION = {
    "__init__.py": "",
    "transforms.py": "def ToTensor():\n    return None\n",
    "utils.py": "import torch\ndef save_image(tensor, path, **_):\n    torch.save(tensor, path)\n",
    "datasets.py": """
import torch

class Pictures(torch.utils.data.Dataset):
    def __init__(self, count, *shape):
        made = torch.Generator().manual_seed(count)
        self.pictures = torch.rand(count, *shape, generator=made).cumsum(-1).div(shape[-1])

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, row):
        return self.pictures[row], row % 10

def MNIST(root, train=True, transform=None, download=False):
    return Pictures(320 if train else 32, 1, 28, 28)

def FakeData(image_size, transform=None):
    return Pictures(120, *image_size)
""",
}
CART_POLE = """
import math
from types import SimpleNamespace
import numpy as np

class CartPole:  # the equations of Barto, Sutton and Anderson (1983), with Euler steps of 0.02 s
    spec = SimpleNamespace(reward_threshold=70)

    def reset(self, seed=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.state, self.steps = self.random.uniform(-0.05, 0.05, 4), 0
        return self.state.astype(np.float32), {}

    def step(self, action):
        x, speed, angle, turn = self.state
        sin, cos, mass, pole = math.sin(angle), math.cos(angle), 1.1, 0.05
        push = ((10.0 if action else -10.0) + pole * turn**2 * sin) / mass
        turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / mass))
        moving = push - pole * turning * cos / mass
        self.state = self.state + 0.02 * np.array([speed, moving, turn, turning])
        self.steps += 1
        fell = abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12)
        return self.state.astype(np.float32), 1.0, bool(fell), self.steps >= 100, {}

def make(name, render_mode=None):
    return CartPole()
"""
METRIC = "def load(name, *_, **more):\n    return None\n"


def write(place: Path) -> None:
    """Write each package into a folder of its own, since others look for what is installed."""
    for name, file, text in [
        *(("torchvision", f"torchvision/{file}", text) for file, text in TORCHVISION.items()),
        *(("gymnasium", "gymnasium.py", CART_POLE), ("evaluate", "evaluate.py", METRIC)),
    ]:
        path = place / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
