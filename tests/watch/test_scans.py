"""Scans: damage to weights and moments is found and named, and healthy training never is. Names of gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from math import inf, isfinite
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from clinic import state_faults
from clinic.state_faults import Lion, Recipe, regress, restarts
from resilient_train.core.loss import Every
from resilient_train.extensions.scans.weights import NormsConfig, Numbers, Path, ScanConfig, Watched, Weights
from resilient_train.ground.types import Anomaly, Signal

EVERY = 5
NAN, INF = float("nan"), float("inf")


def config(**every: int) -> Any:
    """Checks as they are configured by default, at short intervals."""
    return SimpleNamespace(
        weights=ScanConfig(every.get("weights", EVERY), margin=1.05),
        optimizer=ScanConfig(every.get("optimizer", EVERY), margin=1.05),
        replicas=Every(0),
        norms=NormsConfig(every.get("norms", EVERY), factor=1000.0),
        expect=(),
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.mid = nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 24)
        self.down = nn.Linear(24, 4)
        self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.up(x)))
        y: Tensor = self.down(torch.tanh(self.mid(x)) + x)
        return y


Make = Callable[[nn.Module], list[Optimizer]]


def one(kind: Any, **options: Any) -> Make:
    return lambda model: [kind(model.parameters(), **options)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    flat = [weight for weight in model.parameters() if weight.ndim == 2]
    rest = [weight for weight in model.parameters() if weight.ndim != 2]
    return [torch.optim.Muon(flat, lr=0.01), torch.optim.AdamW(rest, lr=3e-3)]


optim = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "SGD": one(optim.SGD, lr=0.1),
    "SGD nesterov": one(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": one(optim.Adam, lr=3e-3),
    "Adam decayed": one(optim.Adam, lr=3e-3, weight_decay=0.01),
    "AdamW fused": one(optim.AdamW, lr=3e-3, weight_decay=0.1, fused=True),
    "amsgrad": one(optim.AdamW, lr=3e-3, amsgrad=True),
    "RMSprop": one(optim.RMSprop, lr=1e-3, momentum=0.5),
    "Adagrad": one(optim.Adagrad, lr=0.02),
    "RAdam": one(optim.RAdam, lr=3e-3),
    "Adafactor": one(optim.Adafactor, lr=0.02),
    "Muon and AdamW": muon_and_adamw,
    "one's own": one(Lion),
}
BOUNDED = ("Adam", "Adam decayed", "AdamW fused", "amsgrad", "RMSprop")
ADAMS = ("Adam", "Adam decayed", "AdamW fused", "amsgrad", "RAdam")


TRUTH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def waves(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, generator=rng)
    return x, torch.sin(x @ TRUTH)


class Run(state_faults.Run):
    """Trains as the guard does: a scan is launched between backward and update and judged an update later."""

    def __init__(self, make: Make, model: Any = None, checks: Any = None, rate: Any = lambda step: 1.0) -> None:
        def build() -> tuple[nn.Module, list[Optimizer]]:
            net = Net() if model is None else model
            return net, make(net)

        super().__init__(Recipe("", build, waves, regress, rate), checks or config(), 0)
        self.model: Any

    def updates(self, count: int) -> Anomaly | None:
        """Train until something is found."""
        return next((found for _ in range(count) if (found := self.update()) is not None), None)

    def finding(self, count: int = 2 * EVERY) -> Anomaly:
        """Train until something is found, which has to be soon."""
        found = self.updates(count)
        assert found is not None
        return found


_trained: dict[str, Run] = {}


def trained(name: str) -> Run:
    """A run of 100 healthy updates, as a copy."""
    if name not in _trained:
        _trained[name] = Run(OPTIMIZERS[name])
        found = _trained[name].updates(103)
        assert found is None, found
    return deepcopy(_trained[name])


# ------------------------------------------------------------------------------------------------------- healthy runs


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_healthy_training_is_never_reported(name: str) -> None:
    """A hundred updates with any optimizer are clean, and every scan has seen them."""
    run = trained(name)
    assert run.scans.clean_step == 100


@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW fused"])
@pytest.mark.parametrize(
    "rate", [lambda step: min(1.0, step / 100), restarts, lambda step: 10.0], ids=["warm-up", "restarts", "huge"]
)
def test_learning_rates_may_do_what_they_like(name: str, rate: Callable[[int], float]) -> None:
    """Warm-up, restarts and a huge rate are no damage."""
    assert Run(OPTIMIZERS[name], rate=rate).updates(80) is None


def frozen(model: Any) -> None:
    model.up.requires_grad_(False)


def tied(model: Any) -> None:
    model.mid.weight = nn.Parameter(model.mid.weight.detach().clone())
    model.extra = nn.Linear(24, 24)
    model.extra.weight = model.mid.weight  # its bias never has a gradient


def halves(model: Any) -> None:
    model.to(torch.bfloat16)
    model.forward = lambda x: Net.forward(model, x.bfloat16()).float()


def mixed(model: Any) -> None:
    model.mid.double()
    model.mid.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    model.mid.register_forward_hook(lambda _, args, out: out.float())
    model.register_parameter("turn", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    model.down.register_forward_hook(lambda _, args, out: out * model.turn.abs().mean())
    model.register_parameter("nothing", nn.Parameter(torch.ones(0)))


@pytest.mark.parametrize("name", ["SGD nesterov", "Adam", "one's own"])
@pytest.mark.parametrize("change", [frozen, tied, halves, mixed])
def test_unusual_models_are_scanned(name: str, change: Callable[[Any], None]) -> None:
    """Frozen, tied, unused, coarse, complex and empty weights raise no alarm, and a fault beside them does."""
    if change is mixed and name == "one's own":
        pytest.skip("the sign of a complex number is not for this optimizer")
    model: Any = Net()
    change(model)
    run = Run(OPTIMIZERS[name], model)
    assert run.updates(60) is None
    single(1e3, "down")(run)
    assert run.finding().evidence[0]["name"] == "down.weight"


@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW fused"])
def test_a_weight_that_rests_now_and_then_is_healthy(name: str) -> None:
    """It may start to move at any time, from zero as well; moments do not fade while it has no gradient."""
    model: Any = Net()
    nn.init.zeros_(model.up.bias)
    run = Run(OPTIMIZERS[name], model)
    for step in range(100):
        model.up.requires_grad_(step >= 60)
        model.mid.requires_grad_(step % 50 < 37)
        assert run.update() is None


def test_moments_of_a_weight_without_a_slope_may_fade_to_nothing() -> None:
    """As those of a hinge that is satisfied: their squares vanish long before they do."""
    run = Run(one(torch.optim.AdamW, betas=(0.5, 0.6)))
    run.updates(20)
    for weight in run.model.down.parameters():
        weight.register_hook(torch.zeros_like)
    assert run.updates(300) is None


@pytest.mark.parametrize("is_new_group", [True, False])
def test_groups_and_weights_may_be_added(is_new_group: bool) -> None:
    """New weights in an optimizer are scanned from then on, and are no jump."""
    model: Any = Net()
    run = Run(lambda _: [optim.Adam([*model.up.parameters(), *model.norm.parameters()], lr=1e-3)], model)
    assert run.updates(52) is None
    if is_new_group:
        run.optimizers[0].add_param_group({"params": list(model.down.parameters()), "lr": 1e-3})
        run.rates[0].append(1e-3)
    else:  # their gradients are not in the norm that the run knows
        run.optimizers[0].param_groups[0]["params"].extend(model.down.parameters())
    assert run.updates(40) is None
    single(1e3, "down")(run)
    assert run.finding().evidence[0]["name"] == "down.weight"


# -------------------------------------------------------------------------------------------------------------- faults


def single(value: float, name: str = "mid") -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        getattr(run.model, name).weight.data[3, 5] = value

    return strike


def layer(factor: float) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        run.model.mid.weight.data.mul_(factor)

    return strike


def moment(name: str, factor: float) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        weight: Any = run.model.mid.weight
        run.optimizers[0].state[weight][name].mul_(factor)

    return strike


FAULTS = {"1e3": single(1e3), "NaN": single(NAN), "times 10": layer(10.0), "zeroed": layer(0.0)}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in BOUNDED for fault in FAULTS),
        *((name, fault) for name in OPTIMIZERS if name not in BOUNDED for fault in ("1e3", "NaN")),
    ],
)
def test_damage_to_weights_is_found_and_named(name: str, fault: str) -> None:
    """The next scan reports it; where an optimizer has no bound, a weight far above all others or one that is NaN."""
    run = trained(name)
    FAULTS[fault](run)
    found = run.finding()
    signal = Signal.NONFINITE_WEIGHTS if fault == "NaN" else Signal.WEIGHTS_JUMP
    assert (found.signal, found.step, found.tick) == (signal, 105, 105)
    assert found.since == 100
    if signal is Signal.WEIGHTS_JUMP:
        assert found.evidence[0]["name"] == "mid.weight"


@pytest.mark.parametrize(
    ("name", "key", "factor"),
    [
        *((name, "exp_avg_sq", factor) for name in ADAMS for factor in (0.0, -1.0, 1e-4, NAN)),
        *(("SGD nesterov", "momentum_buffer", INF), ("one's own", "sum", INF), ("Adafactor", "row_var", INF)),
    ],
)
def test_damage_to_moments_is_found_before_it_lands(name: str, key: str, factor: float) -> None:
    """Of second moments what no updates leave, of any optimizer what is not finite; the weights are fine yet."""
    run = trained(name)
    assert run.updates(2) is None  # the scan of update 105 is launched in the middle of the next one
    moment(key, factor)(run)
    found = run.finding(2)
    assert found.signal is (Signal.OPTIMIZER_RANGE if isfinite(factor) else Signal.NONFINITE_OPTIMIZER)
    assert found.evidence[0]["name"].startswith(f"{key} of ")
    assert (found.step, found.since) == (105, 100)


@pytest.mark.parametrize("value", [NAN, INF])
def test_buffers_have_to_be_finite_unless_they_were_not_at_first(value: float) -> None:
    """A running mean that turned infinite is found; what began as NaN or infinity may be so again."""
    model = Net()
    model.register_buffer("best", torch.full((3,), value))
    run = Run(OPTIMIZERS["SGD"], model)
    for number in (1.0, value):
        assert run.updates(2 * EVERY) is None
        run.model.best[1] = number
    run.scans.load_state_dict(json.loads(json.dumps(run.scans.state_dict())))
    assert run.updates(2 * EVERY) is None
    run.model.norm.running_mean.fill_(value)
    found = run.finding()
    assert found.signal is Signal.NONFINITE_WEIGHTS
    assert (found.evidence[0]["name"], found.evidence[0]["more"]) == ("buffer norm.running_mean", 0)


# --------------------------------------------------------------------------------------------------------------- reach


numbers = st.floats(-1e4, 1e4, allow_nan=False).map(lambda x: 0.0 if abs(x) < 1e-6 else x)
gradients = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=40)
BETAS = [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.8, 0.7)]


@settings(max_examples=40, deadline=None)
@given(gradients, st.sampled_from(BETAS), st.sampled_from([0.0, 0.5, 0.9]), st.booleans())
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "RMSprop"])
def test_no_gradients_carry_a_weight_beyond_its_bound(
    kind: str, pushes: list[tuple[float, float]], betas: tuple[float, float], momentum: float, amsgrad: bool
) -> None:
    """From the first update on: with decay of either kind, momentum, Nesterov's step and maxima."""
    options: dict[str, dict[str, Any]] = {
        "Adam": {"betas": betas, "eps": 1e-12, "amsgrad": amsgrad, "maximize": momentum > 0, "weight_decay": 0.1},
        "AdamW": {"betas": betas, "eps": 1e-12, "amsgrad": amsgrad, "maximize": momentum > 0, "weight_decay": 0.5},
        "SGD": {"momentum": momentum, "nesterov": amsgrad and momentum > 0, "weight_decay": 0.1 * (not amsgrad)},
        "RMSprop": {"momentum": momentum, "eps": 1e-12},
    }
    weight = nn.Parameter(torch.tensor([0.5, -2.0], dtype=torch.float64))
    optimizer, path = getattr(optim, kind)([weight], lr=0.01, **options[kind]), Path(kind)
    start = weight.detach().clone()
    for push in pushes:
        weight.grad = torch.tensor(push, dtype=torch.float64)
        optimizer.step()
        path.landed(optimizer.param_groups[0], float(weight.grad.norm()))
        moved = float((weight.detach() - start).abs().max())
        assert moved <= path.reach(float(start.abs().max())) * (1 + 1e-6) + 1e-9


# ------------------------------------------------------------------------------------------------------ time and place


def test_what_is_compared_against_rewinds() -> None:
    """After a rewind the same updates are judged as before, from plain data that survives JSON and what follows."""
    run = trained("AdamW fused")
    state = run.scans.state_dict()
    written = json.dumps(state, allow_nan=False)
    back = deepcopy(run)
    assert run.updates(20) is None
    assert json.dumps(state) == written
    late = run.scans.state_dict()
    back.scans.load_state_dict(late)  # as if it had gone on
    back.scans.load_state_dict(json.loads(written))
    assert back.updates(20) is None
    assert back.scans.state_dict() == late
    layer(0.0)(back)
    assert back.updates(2 * EVERY) is not None


def test_reset_moments_are_a_new_base() -> None:
    """After `rebase` the next measurement is taken as it is, and damage after it is found."""
    run = trained("AdamW fused")
    for optimizer in run.optimizers:
        optimizer.state.clear()
    layer(2.0)(run)
    run.scans.rebase()
    assert run.updates(2 * EVERY) is None
    layer(0.0)(run)
    assert run.updates(2 * EVERY) is not None


def test_what_was_finite_once_is_found_right_after_a_new_base() -> None:
    """A buffer may be NaN from the beginning, as a minimum until it is set; not after it was finite."""
    buffer, scan = Watched("weights", "lowest", is_free=True), Weights(ScanConfig(every=1, margin=1.05))
    assert scan.look([(buffer, Numbers(inf))]) is None
    scan.learn(1, [(buffer, Numbers(3.0))], None)
    scan.restart([])
    assert scan.look([(buffer, Numbers(inf))]) is not None


def test_what_comes_again_after_every_rewind_is_intended(info: pytest.LogCaptureFixture) -> None:
    """Surgery in user code at a certain step is undone once, then accepted with a line; damage there is none."""
    run = trained("AdamW fused")
    for factor, is_accepted in ((1e30, False), (10.0, False), (10.0, True)):
        again = deepcopy(run)
        again.scans._found = run.scans._found  # does not rewind
        layer(factor)(again)
        assert (again.updates(2 * EVERY) is None) == is_accepted
    (remark,) = info.messages
    assert "intended" in remark
    assert again.updates(2 * EVERY) is None
    layer(1.5)(again)
    assert again.updates(2 * EVERY) is None  # such code writes there now and then
    layer(NAN)(again)
    assert again.updates(2 * EVERY) is not None


def test_the_clean_step_waits_for_every_scan() -> None:
    """It is the newest step that all scans that are on have seen."""
    run = Run(OPTIMIZERS["Adam"], checks=config(weights=4, optimizer=7, norms=0))
    for told in range(-1, 40):  # the newest step that a verdict can be known of
        run.update()
        assert run.scans.clean_step == max(0, min(told // 4 * 4, told // 7 * 7))
    assert Run(OPTIMIZERS["Adam"], checks=config(weights=0, optimizer=0, norms=0)).scans.is_due() is False


def test_measuring_reads_nothing_on_the_host() -> None:
    """The numbers stay on the device until somebody reads the one vector."""

    class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += "_local_scalar_dense" in str(func) or "nonzero" in str(func)
            return func(*args, **(kwargs or {}))

    run = trained("AdamW fused")
    with Reads() as reads:  # type: ignore[no-untyped-call]
        vector = run.scans.measure(0, everything=True)
    assert reads.count == 0
    assert (vector.dtype, vector.ndim, vector.requires_grad) == (torch.float32, 1, False)


def test_a_loop_may_shrink_its_weights_a_little() -> None:
    """By a projection, say, though no update can."""
    run = Run(OPTIMIZERS["Adam"], rate=lambda step: 1e-3)
    assert run.updates(12) is None
    for factor in (0.8, 0.5):
        layer(factor)(run)
        assert (run.updates(2 * EVERY) is None) == (factor == 0.8)
