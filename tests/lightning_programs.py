"""Small modules of Lightning, and faults that strike them: what tests and benchmarks of `Guarded` train with."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from resilient_train import lightning

AT = 60  # the step of a fault, of 96
BATCH = 8
WARNINGS = [  # of Lightning, that tests ignore
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:.training_step. returned .None",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:Be aware that when using",
    "ignore:Using ModelCheckpoint with manual optimization",
]

for _name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, rows: int = 256, bad: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(0)
        self.y = torch.randint(0, 4, (rows,), generator=generator)
        self.x = torch.randn(rows, 16, generator=generator) + 2 * nn.functional.one_hot(self.y, 16)
        self.x[[*bad], 0] = math.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[row], self.y[row]


class Recorder(Logger):  # type: ignore[misc]
    name, version = "recorder", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, *given: Any, **more: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Net(L.LightningModule):  # type: ignore[misc]
    """A small classifier with everything that has a state of its own: running statistics, dropout, a metric."""

    def __init__(self, fault: str = "", schedule: Any = None, at: int = AT) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(
            *(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)),
        )
        self.accuracy: Any = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.fault, self.schedule, self.at, self.was_struck = fault, schedule, at, False
        self.struck: Any = self.net[4]

    @property
    def is_time(self) -> bool:
        return bool(self.trainer.global_step == self.at)

    def strikes(self, fault: str) -> bool:
        if self.fault != fault or not self.is_time or self.was_struck:
            return False
        self.was_struck = True
        return True

    def spoiled(self, x: torch.Tensor) -> torch.Tensor:
        if self.strikes("bit_flip"):
            with torch.no_grad():
                self.struck.weight.view(-1)[7] -= 2.0**60
        return x * math.nan if self.strikes("nan_batch") else x

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits, y)
        if self.fault == "operation":
            rest = 1.0 - torch.softmax(8 * logits.float(), -1).amax(-1)
            loss = loss + 0.01 * torch.sqrt(rest).mean()  # infinite slope where the model is sure
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(self.spoiled(x))
        loss = self.loss(logits, y)
        self.accuracy(logits.detach().nan_to_num(), y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.fault == "none" and batch_idx % 5 == 2:
            return None
        return {"loss": loss, "batch": batch_idx}

    def on_after_backward(self) -> None:
        if self.strikes("nan_gradient"):
            grads = [one.grad for one in self.parameters() if one.requires_grad]  # a generator may be toggled off
            next(one for one in grads if one is not None).view(-1)[3] = math.nan
        if self.fault == "raises" and self.trainer.global_step == AT:
            raise ZeroDivisionError("of the user")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [one.grad.norm() for one in self.parameters() if one.grad is not None]
        if norms:
            self.log("norm", torch.stack(norms).norm())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        schedule = self.schedule
        if self.fault == "rate":
            schedule = lambda one: LambdaLR(one, lambda step: 300.0 if AT <= step < AT + 10 else 1.0)  # noqa: E731
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}


@dataclass
class Fitted:
    trainer: Any
    module: Net
    rows: list[tuple[int | None, dict[str, float]]]
    place: Path

    @property
    def weights(self) -> list[list[float]]:
        return [value.double().reshape(-1).tolist() for value in self.module.state_dict().values()]

    @property
    def loss(self) -> float:
        """Of the whole data without dropout."""
        data = Rows()
        self.module.eval()
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.module.net(data.x), data.y))

    @property
    def incidents(self) -> list[dict[str, Any]]:
        lines = (self.place / "resilient_train" / "incidents.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def trainer_of(place: Path, *, guarded: bool, callbacks: tuple[Any, ...] = (), **more: Any) -> Any:
    options = {name: more.pop(name) for name in ("recovery", "tracking") if name in more}
    more = {"max_epochs": 3, "enable_checkpointing": False, "logger": Recorder(), "log_every_n_steps": 2, **more}
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[*callbacks, *([lightning.Guarded(**options)] if guarded else [])],
        default_root_dir=place,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def loader(bad: tuple[int, ...] = (), workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Rows(bad=bad), BATCH, shuffle=True, num_workers=workers)


def fit(
    place: Path,
    fault: str = "",
    *,
    guarded: bool = True,
    schedule: Any = None,
    workers: int = 0,
    at: int = AT,
    patience: int | None = None,
    **more: Any,
) -> Fitted:
    L.seed_everything(1, verbose=False)
    if patience is not None:
        more["callbacks"] = (EarlyStopping("val", patience=patience, min_delta=10.0),)
    module, trainer = Net(fault, schedule, at), trainer_of(place, guarded=guarded, **more)
    trainer.fit(module, loader((17, 99) if fault == "rows" else (), workers), DataLoader(Rows(64), 32))
    return Fitted(trainer, module, trainer.logger.rows, place)


class Manual(Net):
    """The same with manual optimization: `how` it steps, and a generator beside a critic for the ways of several."""

    def __init__(self, how: str, fault: str = "", at: int = AT, schedule: Any = None) -> None:
        super().__init__(fault, schedule, at)
        self.automatic_optimization, self.how, self.calls = False, how, 0
        self.is_pair = how in ("in turn", "critic", "both first")
        self.generator: Any = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.critic: Any = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
        if self.is_pair:
            self.struck = self.critic[0]

    @property
    def total(self) -> int:
        """Batches until now: `global_step` counts each step of each optimizer."""
        return int(self.trainer.fit_loop.epoch_loop.total_batch_idx)

    @property
    def is_time(self) -> bool:
        return self.total >= self.at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = self.spoiled(x)
        loss = self.step_pair(x, batch_idx) if self.is_pair else self.step_alone(x, y, batch_idx)
        for schedule in self.schedules() if self.how != "accumulated" or batch_idx % 4 == 3 else ():
            schedule.step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss.detach(), "batch": batch_idx}

    def schedules(self) -> list[Any]:
        found = self.lr_schedulers()
        return found if isinstance(found, list) else [] if found is None else [found]

    def step_alone(self, x: torch.Tensor, y: torch.Tensor, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()

        if self.how == "closure":
            losses = []

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                losses.append(self.loss(self.net(x), y))
                self.manual_backward(losses[0])
                return losses[0]

            optimizer.step(closure=closure)
            return losses[0].detach()
        loss = self.loss(self.net(x), y)
        if self.how == "accumulated":
            self.manual_backward(loss / 4)
            if batch_idx % 4 == 3 or self.trainer.is_last_batch:
                optimizer.step()
                optimizer.zero_grad()
            return loss
        for _ in range(3 if self.how == "three times" else 1):
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            loss = self.loss(self.net(x), y) if self.how == "three times" else loss
        return loss

    def step_pair(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        of_critic, of_generator = self.optimizers()
        fake = self.generator(torch.randn(len(x), 4))

        def of_both() -> torch.Tensor:
            real, made = self.critic(x), self.critic(fake.detach())
            loss = nn.functional.softplus(-real).mean() + nn.functional.softplus(made).mean()
            if self.fault == "operation":
                loss = loss + 0.01 * torch.sqrt(1 - torch.sigmoid(64 * real)).mean()
            return loss

        def of_made() -> torch.Tensor:
            loss: torch.Tensor = nn.functional.softplus(-self.critic(fake)).mean()
            return loss * math.nan if self.strikes("nan_second") else loss

        if self.how == "both first":
            first, second = of_both(), of_made()
            of_critic.zero_grad()
            of_generator.zero_grad()
            self.manual_backward(first, inputs=[*self.critic.parameters()])
            self.manual_backward(second, inputs=[*self.generator.parameters()])
            of_critic.step()
            of_generator.step()
            return first + second
        self.toggle_optimizer(of_critic)
        first = of_both()
        of_critic.zero_grad()
        self.manual_backward(first)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        if self.how == "critic" and batch_idx % 3:
            return first
        with of_generator.toggle_model():
            second = of_made()
            of_generator.zero_grad()
            self.manual_backward(second)
            of_generator.step()
        return first + second

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        alone = [[*self.net.parameters()]]
        parts = [[*self.critic.parameters()], [*self.generator.parameters()]] if self.is_pair else alone
        optimizers = [torch.optim.AdamW(part, 3e-3) for part in parts]
        if self.fault == "rate":
            hot = [LambdaLR(one, lambda step: 100.0 if AT <= step < AT + 10 else 1.0) for one in optimizers]
            return optimizers, hot
        return optimizers, [self.schedule(one) for one in optimizers if self.schedule is not None]


WAYS = ("alone", "closure", "accumulated", "three times", "in turn", "critic", "both first")
