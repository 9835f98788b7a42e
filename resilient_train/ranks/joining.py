"""Joins the processes of one attempt, on a store of that attempt alone.

An elastic agent keeps one store over all restarts, and with it what processes left there that are gone, their addresses
among it: those who come after them call there, and fail or wait. Restart counts do not tell attempts apart, because
each agent counts its own, and hosts that come and go are not counted. So rank 0 thinks of a name for the attempt, and
tells it to who asks for it with a word of its own, to which no process before them can have an answer. An agent ends
all its processes before it takes part in another attempt: whoever answers is of this one.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_ROOM = "resilient_train"  # where in the agent's store
_CONNECT = timedelta(seconds=300)  # the agent's store is there before any of its processes
_PAUSE_S = 0.05
_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_under_agent() -> bool:
    """Say whether an elastic agent has started this process, and shares its store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and all(name in os.environ for name in _NEEDED)


def join(*, cpu: bool = False, patience: timedelta = timedelta(minutes=30), limit: timedelta | None = None) -> bool:
    """Make the process group, as Accelerate would make it but for the store; False where it is left to Accelerate.

    A loop of a user's own calls it before it makes its Accelerator, so that an agent's restarts find each other.
    `cpu` is what that is given; `patience` is for the others to come, `limit` for every collective from then on.
    """
    if not is_under_agent() or torch.distributed.is_initialized():
        return False
    on_gpu = not cpu and torch.cuda.is_available()
    if not (on_gpu or cpu) or (cpu and torch.distributed.is_mpi_available()):
        return False  # another kind of device or backend, which Accelerate knows to choose
    rank, local, size, port = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"))
    device = torch.device("cuda", local % torch.cuda.device_count()) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    agents = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False, timeout=_CONNECT)
    agents.set_timeout(patience)
    store = PrefixStore(f"{_ROOM}/{named(agents, rank, size, patience)}", agents)
    torch.distributed.init_process_group(
        "gloo" if device is None else "nccl",
        store=store,
        rank=rank,
        world_size=size,
        timeout=limit,
        device_id=device,
    )
    return True


def named(agents: Store, rank: int, size: int, patience: timedelta) -> str:
    """Agree on a name that no attempt had before, on a store that all attempts have in common."""
    if rank > 0:
        word = uuid.uuid4().hex
        agents.set(f"{_ROOM}/asks/{rank}", word)
        name = agents.get(f"{_ROOM}/answer/{word}").decode()
        agents.add(f"{_ROOM}/joined/{name}", 1)
        return name
    name, answered = uuid.uuid4().hex, dict[int, bytes]()
    deadline = time.monotonic() + patience.total_seconds()
    while (joined := agents.add(f"{_ROOM}/joined/{name}", 0)) < size - 1:
        for other in range(1, size):
            if not agents.check([f"{_ROOM}/asks/{other}"]):
                continue
            word_of_other = agents.get(f"{_ROOM}/asks/{other}")
            if word_of_other != answered.get(other):  # perhaps that of a process before it: then it will ask anew
                answered[other] = word_of_other
                agents.set(f"{_ROOM}/answer/{word_of_other.decode()}", name)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{size - 1 - joined} of {size} processes have not come within {patience.seconds} s")
        time.sleep(_PAUSE_S)
    return name
