"""What a run refuses because it would silently be something else."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from resilient_train import Guard
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import AccelerateConfig
from resilient_train.processes.launch import refuse_what_is_not_supported
from resilient_train.processes.world import World, join

PLAIN = AccelerateConfig(False, False, {}, False, False, None, None, 1)


@pytest.fixture(autouse=True)
def fresh(fresh_accelerate: None) -> None:
    """What Accelerate remembers of an earlier test is forgotten, too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("DEEPSPEED", "ACCELERATE_USE_DEEPSPEED=true: DeepSpeed is not supported"),
        ("MEGATRON_LM", "Megatron-LM is not supported"),
        ("FSDP", "sharding by accelerate launch --use_fsdp is not supported"),
        ("PARALLELISM_CONFIG", "tensor, context or pipeline parallelism is not supported"),
    ],
)
def test_engines_that_are_not_supported_are_refused_by_name(engine: str, told: str) -> None:
    """One line that says what to use instead; one that is switched off is none."""
    with pytest.raises(ConfigError, match=f"{told}: .*accelerate.fsdp=true"):
        refuse_what_is_not_supported({f"ACCELERATE_USE_{engine}": "true"})
    refuse_what_is_not_supported({f"ACCELERATE_USE_{engine}": "False"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that the processes would share")
def test_processes_that_would_each_be_a_run_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU Accelerate makes groups on a CPU only where it is told to."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"each of the 2 processes.*accelerate\.cpu=true"):
        World.joined(PLAIN)


def test_restarts_of_several_hosts_need_a_store_for_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    agent = {"WORLD_SIZE": "2", "MASTER_ADDR": "first", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in agent.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"--max-restarts: .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        join(cpu=True)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    join(cpu=True)


# ---------------------------------------------------------------------------------------------------- in one's own loop


def guarded(model: nn.Module) -> Guard:
    rows = [(torch.zeros(4), torch.zeros(1))] * 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Guard(Accelerator(cpu=True), model, optimizer, data=rows, batch_size=2)


def test_fsdp1_is_refused() -> None:
    """With what is supported instead; also where only a part of the model is wrapped."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated, and has one process here
            wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match=r"flat pieces.*fully_shard"):
            guarded(nn.Sequential(wrapped, nn.Linear(4, 1)))
    finally:
        torch.distributed.destroy_process_group()


def test_an_engine_of_deepspeed_is_refused() -> None:
    """It is known by the package of its class: the package itself need not be there."""
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(ValueError, match=r"DeepSpeed makes its updates itself.*use DDP or FSDP2"):
        guarded(engine(4, 1))


def test_an_accelerator_for_another_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    other = SimpleNamespace(value="MEGATRON_LM")
    monkeypatch.setattr(type(accelerator), "distributed_type", property(lambda one: other))
    with pytest.raises(ValueError, match="accelerator: Megatron-LM"):
        Guard(accelerator, nn.Linear(4, 1), None, data=[], batch_size=1)
