"""Driving a ship by imitation of logged trips with a Decision Transformer: returns to go, states and actions in turn.

The optimizer is RMSprop as it comes, and it comes with a rate of 0.01, which the small network that imitated the same
logs before had never minded. In a transformer each of its steps is many times too long: the actions follow the state
roughly, and the error stays several times above what a lower rate reaches; sometimes the `tanh` at the end comes to lie
at one of its ends for good. All is finite.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import DecisionTransformerConfig, DecisionTransformerModel

from clinic.program import Guilty, Program

STEPS = 8


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    state, action, rest = batch
    time = torch.arange(STEPS).expand(len(state), -1)
    out = model(states=state, actions=action, rewards=rest, returns_to_go=rest, timesteps=time)
    return F.mse_loss(out.action_preds, action)


def trips(count: int, thrust: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each helmsman steers towards the harbour against a current, some with more care; the return says how much."""
    care = 0.3 + 0.7 * torch.rand(count, 1)
    place, speed = torch.randn(count, 2), 0.3 * torch.randn(count, 2)
    current = 0.3 * torch.randn(count, 2)
    states, actions, rewards = [], [], []
    for _ in range(STEPS):
        states.append(torch.cat([place, speed, current], -1))
        wish = care * (-1.5 * place - 2 * speed - current) @ thrust
        action = (wish + 0.05 * torch.randn_like(wish)).tanh()
        actions.append(action)
        speed = 0.9 * speed + 0.3 * action @ thrust.T + 0.1 * current
        place = place + 0.3 * speed
        rewards.append(-place.square().sum(-1, keepdim=True))
    rest = torch.stack(rewards, 1).flip(1).cumsum(1).flip(1) / STEPS
    return torch.stack(states, 1), torch.stack(actions, 1), rest


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    thrust = torch.linalg.qr(torch.randn(2, 2)).Q
    data, held_out = trips(int(torch.randint(1000, 1500, ())), thrust), trips(200, thrust)
    config = DecisionTransformerConfig(
        state_dim=6,
        act_dim=2,
        hidden_size=int(torch.randint(12, 17, ())) * 4,
        max_ep_len=32,
        n_layer=3,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        vocab_size=1,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=3 * STEPS,
    )
    return Program(
        model=DecisionTransformerModel(config),
        rows=TensorDataset(*data),
        loss=loss,
        optimizer=partial(torch.optim.RMSprop, lr=5e-4 if mended else 0.01),
        evaluation=list(held_out),
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=300,
    )
