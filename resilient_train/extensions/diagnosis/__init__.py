"""Finds causes by a replay of the update, by its rows, and by the history of the run."""

from __future__ import annotations

from typing import Any

import torch

from resilient_train.extensions import Extension
from resilient_train.extensions.diagnosis.explain import Explainer
from resilient_train.extensions.diagnosis.replay import Replay
from resilient_train.extensions.diagnosis.search import Search
from resilient_train.parts.run import Run


class CauseFinder(Extension):
    def build(self, run: Run) -> None:
        backend, objective = run.backend, run.backend.objective
        search = None
        if objective is not None:

            def loss_of(model: Any, batch: Any) -> torch.Tensor:
                return objective.for_training(model, batch)[0]

            replay = Replay(
                *(backend.bare, loss_of, backend.anomaly_mode.backward),
                *(run.marks, backend.attributes, run.updater.drop_gradients),
                trained=run.updater.weights,
                over_ranks=run.world.norm,
                seeds=run.seeds,
                device=run.world.device,
                is_patched=lambda file, line, op: run.is_patched(file, line, op),
            )
            search = Search(replay, run.samples, run.world, run.beat, run.handled_lines)
        optimizers, checks = run.updater.optimizers, run.checks
        run.diagnoser = Explainer(
            run.world, run.samples, run.state, run.ring, optimizers, run.updates, checks, search, run.beat
        )
