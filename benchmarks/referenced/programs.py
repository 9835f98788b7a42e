"""Programs that use the library as its users do: through `Guard`, `hf.guard` and Lightning's `Guarded`, nothing else.

Each trains in the working directory, with `run` as its run directory, and nothing in it depends on time.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import resilient_train
from resilient_train import Guard

trained: list[nn.Module] = []  # the models of this process
calls: Counter[int] = Counter()

RUN = Path("run")
BATCH, STEPS = 16, 200
ENDLESS = 10  # attempts for each planned update


def digest() -> str | None:
    """A digest of the weights and buffers by no code of the library, so that a run that gave up has one, too."""
    made = hashlib.sha256()
    for name, value in (item for model in trained for item in model.state_dict().items()):
        made.update(name.encode() + value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest() if trained else None


def is_call(number: int) -> bool:
    """Count a call, and say whether it is this one; it is only once, however often the run is started."""
    calls[number] += 1
    mark = Path(f"was-at-{number}")
    if calls[number] != number or mark.exists():
        return False
    mark.touch()
    return True


def wait_for(checkpoint: int) -> None:
    """Wait until the checkpoint of a step is on the disk, so that it does not matter how fast that is."""
    manifest, deadline = RUN / "checkpoints" / f"step-{checkpoint:08}" / "manifest.json", time.monotonic() + 60
    while not manifest.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------- loops of users


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Build what the loops below train with: two rows are NaN, and so are the gradients of one backward pass."""
    example: Any = importlib.import_module("accelerate_loop")
    model, optimizer, _ = example.build()
    trained.append(model)
    return model, optimizer, example.Readings(512, seed=1, rotten={17, 99})


def objective(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def drawn() -> None:
    """A function draws the batches, and the loop accumulates: plain PyTorch, as in nanoGPT."""
    model, optimizer, rows = build()

    def get_batch() -> list[Tensor]:
        return list(rows[torch.randint(len(rows), (BATCH,))])

    guard = Guard(None, model, optimizer, data=get_batch, accumulate=2, clip=1.0, steps=STEPS, run_dir=RUN)
    for micro_batches in guard.updates():
        for batch in micro_batches:
            loss = objective(model, batch)
            (loss / 2).backward()  # type: ignore[no-untyped-call]
            guard.update(loss)


def loader() -> None:
    """A loader of the user's own: it cannot be rewound, and its rows have no names."""
    model, optimizer, rows = build()
    batches = DataLoader(rows, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    guard = Guard(None, model, optimizer, data=batches, steps=STEPS, run_dir=RUN)
    for batch in guard.batches():
        loss = objective(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.update(loss)


def flipped(policy: str) -> None:
    """A weight is damaged between two updates, and an average of the weights is kept."""
    model, optimizer, rows = build()
    average = AveragedModel(model, use_buffers=True)
    more: dict[str, Any] = {"batch_size": BATCH, "steps": STEPS, "objective": objective, "recovery": policy}
    guard = Guard(None, model, optimizer, data=rows, run_dir=RUN, **more)
    guard.keep(average=average)
    for batch in guard.batches():
        if is_call(120):
            with torch.no_grad():
                next(model.parameters()).view(-1)[7] = -(2.0**60)
        if guard.step(batch):
            average.update_parameters(model)


def signalled(number: str) -> None:
    """The process gets a signal in its 90th batch: epochs, an average of the weights, and a resume from the disk."""
    model, optimizer, rows = build()
    average = AveragedModel(model, use_buffers=True)
    more: dict[str, Any] = {"batch_size": BATCH, "objective": objective, "disk": 20, "verify_after": 10, "resume": True}
    with resilient_train.StopRequests() as requests:
        guard = Guard(None, model, optimizer, data=rows, run_dir=RUN, stop=requests.asked, **more)
        guard.keep(average=average)
        for epoch in guard.epochs(6):
            for batch in epoch:
                if is_call(90):
                    wait_for(50)
                    os.kill(os.getpid(), int(number))
                if guard.step(batch):
                    average.update_parameters(model)
        if guard.stopped:
            guard.leave()
        guard.close()


def signalled_command(model: nn.Module, batch: Sequence[Tensor], *, number: int) -> Tensor:
    """An objective for the command: in its 150th call the process gets a signal; of two ranks the second one."""
    if os.environ.get("RANK", "1") == "1":
        if is_call(100):  # the writer leaves one out while it is busy
            wait_for(50)
        if is_call(150):
            wait_for(100)
            os.kill(os.getpid(), number)
    return cross_entropy(model(batch[0]), batch[1])


def hot_stretch(factor: str, length: str, start: str, form: str, optimizer: str) -> None:
    """One draw of clinic/hot_stretch.py."""
    letters: Any = importlib.import_module("clinic.hot_stretch_letters")
    form = form.replace("_", " ")
    letters.guarded(letters.Draw(0, int(factor), int(length), int(start), form, optimizer, seed=0), RUN)


def clinic(case: str) -> None:
    """A case of the clinic, guarded as in its own arms; of several processes each takes its share of a batch."""
    program: Any = importlib.import_module(f"clinic.{case}").program(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if program.bf16 else "no")

    def under_autocast(model: nn.Module, batch: Any) -> Any:
        with accelerator.autocast():
            return program.loss(model, batch)

    torch.manual_seed(0)
    trained.append(program.model)
    model = accelerator.prepare(program.model.train())
    guard = Guard(
        accelerator, model, program.optimizer(model.parameters()), data=program.rows, steps=program.steps,
        batch_size=program.batch_size // accelerator.num_processes, collate=program.collate, clip=program.clip,
        objective=under_autocast if program.bf16 else program.loss, run_dir=RUN,
    )  # fmt: skip
    for attempt, batch in enumerate(guard.batches()):
        guard.step(batch)
        if attempt > ENDLESS * program.steps:
            raise TimeoutError("the run does not come to an end")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------- trainers


def hugging_face(program: str, fault: str) -> None:
    """A Trainer of transformers, with a fault of its own program."""
    programs: Any = importlib.import_module("hf_programs")
    more = {"learning_rate": 3e-3} if fault == "operation" else {}
    trainer = programs.trainer(program, Path("output"), fault, **more)
    trained.append(trainer.model)
    resilient_train.hf.guard(trainer, run_dir=RUN)
    trainer.train()


def lightning(fault: str) -> None:
    """A Trainer of Lightning."""
    programs: Any = importlib.import_module("lightning_programs")
    module = programs.Net(fault)
    trained.append(module)
    guarded = resilient_train.lightning.Guarded(run_dir=RUN)
    trainer = programs.trainer_of(Path("output"), guarded=False, callbacks=(guarded,))
    torch.manual_seed(1)
    trainer.fit(module, programs.loader((17, 99) if fault == "rows" else ()))
