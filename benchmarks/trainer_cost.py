"""What a step of a guarded trainer costs beside the same trainer with its defaults, from one interleaved run.

A GPT-2 of 4 million weights, trained by a Trainer of transformers and by Lightning, each plain and guarded.

    python benchmarks/trainer_cost.py
    python benchmarks/trainer_cost.py --trainers lightning --blocks 10
"""

from __future__ import annotations

import argparse
import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from interleaved import Job, Loop, OnStep, begin, compared, table, time_blocks
from loops import work

BATCH, LENGTH, WORDS = 4, 128, 4096
STEPS_PER_BLOCK, WARM_UP = 25, 125
TARGETS = {"transformers": 1.03, "lightning": 1.05}


def model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=224, n_layer=5, n_head=8, n_positions=LENGTH))


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(0)
        self.words = torch.randint(0, WORDS, (512, LENGTH), generator=made)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[row], "labels": self.words[row]}


def by_transformers(job: Job, on_step: OnStep, tell: Callable[[Any], None], *, guarded: bool) -> None:
    """Train with a Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging as loud

    import resilient_train

    class Counted(TrainerCallback):  # type: ignore[misc]  # mypy runs without transformers
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            on_step(state.global_step)

    loud.set_verbosity_error()
    with TemporaryDirectory() as folder:
        more = {"disable_tqdm": True, "report_to": [], "use_cpu": True, "save_strategy": "no"}
        args = TrainingArguments(folder, max_steps=job.steps, per_device_train_batch_size=BATCH, **more)
        trainer = Trainer(model(), args, train_dataset=Sentences(), callbacks=[Counted()])
        trainer.create_optimizer()
        tell(work(trainer.model, [trainer.optimizer], BATCH))
        if guarded:
            resilient_train.hf.guard(trainer)
        trainer.train()


def by_lightning(job: Job, on_step: OnStep, tell: Callable[[Any], None], *, guarded: bool) -> None:
    """Train with Lightning."""
    import lightning

    import resilient_train

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 5e-5, fused=True)

    class Counted(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            on_step(trainer.global_step)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    tell(work(module, [module.configure_optimizers()], BATCH))
    with TemporaryDirectory() as folder:
        callbacks: Sequence[Any] = [Counted(), *([resilient_train.lightning.Guarded()] if guarded else [])]
        more: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        more |= {"enable_checkpointing": False, "default_root_dir": folder, "accelerator": "cpu"}
        trainer = lightning.Trainer(max_steps=job.steps, callbacks=[*callbacks], **more)
        trainer.fit(module, torch.utils.data.DataLoader(Sentences(), BATCH, shuffle=True))


def loops(name: str) -> dict[str, Loop]:
    train = by_transformers if name == "transformers" else by_lightning
    return {"plain": functools.partial(train, guarded=False), "guarded": functools.partial(train, guarded=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--blocks", type=int, default=30, help="of each loop (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of fresh processes (default: %(default)s)")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    begin()
    for name in given.trainers:
        job, steps = Job(name, WARM_UP, WARM_UP, 10), STEPS_PER_BLOCK
        timing = time_blocks(loops(name), job, blocks=given.blocks, steps_per_block=steps, rounds=given.rounds)
        print(f"\n{name}: {timing.work['weights'] / 1e6:.2f} M weights, {timing.blocks} blocks of {steps} steps")
        print(table(*compared(timing, ["plain"])))
        ratio, _, high = timing.ratio("guarded", "plain")
        print(
            f"  target: at most {TARGETS[name]}; guarded beside plain: {ratio:.3f}, upper bound {high:.3f}", flush=True
        )


if __name__ == "__main__":
    main()
