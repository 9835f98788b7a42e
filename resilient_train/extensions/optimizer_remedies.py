"""Further remedies of the optimizer, and what those that last make of every update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from resilient_train.core.clip import gradients, norm_of, scale
from resilient_train.core.controls import Controls
from resilient_train.core.knobs import Numbers
from resilient_train.core.protocols import Effect
from resilient_train.core.remedies import Case, Remedy, limited
from resilient_train.core.updater import Lasting
from resilient_train.extensions import Extension
from resilient_train.ground.types import Diagnosis
from resilient_train.ground.wording import log
from resilient_train.parts.run import Run, lost_eps

_FALLS = 50  # healthy updates until a limit of updates is 0.7 of what it was
_LEAST_SHARE = 0.1  # of it: no less, or it would slow down healthy training late in a long run
_SMALL_WEIGHT, _MOST_MOMENTUM = 0.02, 0.999


@dataclass
class LastingRemedies(Numbers, Lasting):
    share: float = 0.0  # of the norm of the weights, by which SGD may change them at first; 0: no limit
    limited: int = 0  # healthy updates since it was set
    mends_eps: bool = False  # an epsilon that rounds to 0 in the type of its weights is raised

    @property
    def share_now(self) -> float:
        """It falls with the updates. Where all of them are as long as they may be, no loss comes to rest."""
        return self.share * max(_LEAST_SHARE, math.sqrt(_FALLS / (_FALLS + self.limited)))

    def advance(self) -> None:
        self.limited += self.share > 0

    def shape(self, group: Mapping[str, Any], setting: dict[str, Any], usual: Mapping[str, Any]) -> None:
        eps = usual.get("eps")
        if isinstance(eps, int | float):  # Adafactor's is a pair
            setting["eps"] = eps  # the configured one also where the remedy was undone
            if self.mends_eps:
                # The least keeps an update small where a second moment has underflowed to zero.
                kinds = [torch.finfo(weight.dtype) for weight in group["params"] if weight.is_floating_point()]
                setting["eps"] = max([eps, *(math.sqrt(kind.smallest_normal * kind.eps) for kind in kinds)])

    def limits(self, optimizers: Sequence[Optimizer], rate: float) -> bool:
        if self.share:  # at a lower rate, by a remedy or by the schedule, updates are shorter, too
            groups = [group for one in optimizers for group in one.param_groups]
            clip_to_share(groups, self.share_now * min(1.0, rate))
        return self.share > 0


@torch.no_grad()
def clip_to_share(groups: Sequence[Mapping[str, Any]], share: float) -> None:
    """Clip gradients of SGD, after all other clipping: they change the weights by a share of their norm at most.

    With momentum, one gradient enters many updates. Weights near zero may grow as if they were of the size that weights
    usually begin with.
    """
    trained = [group for group in groups if any(weight.grad is not None for weight in group["params"])]
    weights = [weight for group in trained for weight in group["params"] if weight.grad is not None]
    if not weights:
        return
    grads = gradients(weights)
    norm, of_weights = norm_of(grads, None), norm_of([weight.detach() for weight in weights], None)
    of_weights = of_weights.float().clamp(min=_SMALL_WEIGHT * math.sqrt(sum(one.numel() for one in weights)))
    pace = max(group["lr"] / (1 - min(group.get("momentum", 0.0), _MOST_MOMENTUM)) for group in trained)
    scale(grads, (share * of_weights / (pace * norm.float() + 1e-30)).clamp(max=1.0))


def needs_its_state(optimizer: Optimizer) -> bool:
    """Say whether an optimizer may have made its state when it was built, as Adagrad does. Others of torch make it in
    their first step; what they have before the run comes from a checkpoint of a trainer.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.Adagrad)
    return bool(optimizer.state) and not is_torchs


@dataclass(frozen=True)
class ResetMoments(Remedy):
    """Reset the optimizer's moments. Best with some re-warming: the first estimates are rough."""

    order = 50

    def apply(self, run: Controls) -> None:
        run.extension(FurtherRemedies).reset_moments()


@dataclass(frozen=True)
class LimitLr(Remedy):
    """Keep the learning rate at the highest before it rose. The last one before would be lower than the schedule's."""

    order = 70
    to: float = limited(0.0, at_least=0)  # a multiple of the configured rate; 0: the highest that it had
    leapt_to: float = limited(0.0, at_least=0)  # what the rate rose to in one step; as that falls, so does the limit

    def settings_for(self, case: Case) -> dict[str, float]:
        return {} if self.to else {"to": case.diagnosis.usual_rate, "leapt_to": case.diagnosis.leapt_to}

    def applies(self, case: Case) -> bool:
        return self.to > 0 or case.diagnosis.usual_rate > 0

    def apply(self, run: Controls) -> None:
        run.knobs.limit_lr(self.to, self.leapt_to)


@dataclass(frozen=True)
class LimitUpdate(Remedy):
    """Clip the gradient so that an update of SGD changes the weights by at most a share of their norm, which falls."""

    order, is_main = 90, True
    share: float = limited(0.1, above=0, at_most=1)

    def settings_for(self, case: Case) -> dict[str, float]:
        """Where updates are limited already, begin with a third of what is left of that."""
        return {"share": min(self.share, float(f"{case.facts['share'] / 3:.2g}"))} if case.facts["share"] else {}

    def applies(self, case: Case) -> bool:
        return case.sgd and not case.facts["sharded"]  # the norms would be those of a share of the weights

    def apply(self, run: Controls) -> None:
        lasting = run.extension(FurtherRemedies).lasting
        lasting.share, lasting.limited = self.share, 0


@dataclass(frozen=True)
class MendEps(Remedy):
    """Raise an optimizer's epsilon that its type rounds to 0, as half precision does with 1e-8."""

    order = 120

    def applies(self, case: Case) -> bool:
        return bool(case.facts["lost_eps"])

    def apply(self, run: Controls) -> None:
        run.extension(FurtherRemedies).lasting.mends_eps = True


class FurtherRemedies(Extension):
    """Remedies of the optimizer that most runs never need."""

    remedies = MappingProxyType(
        {"reset_moments": ResetMoments, "limit_lr": LimitLr, "limit_update": LimitUpdate, "mend_eps": MendEps}
    )

    def build(self, run: Run) -> None:
        self._run, updater = run, run.updater
        self.lasting = lasting = LastingRemedies()
        self._needs_its_state = [optimizer for optimizer in updater.optimizers if needs_its_state(optimizer)]
        updater.lasting.append(lasting)
        usual = lasting.state_dict()

        def state() -> dict[str, Any]:
            return {} if (now := lasting.state_dict()) == usual else now

        def restore(saved: Any) -> None:
            lasting.load_state_dict(saved or usual)

        run.effects.append(Effect("lasting", state, restore, restore, lasting.state_dict))

    def facts(self, diagnosis: Diagnosis, since: int, has_landed: bool) -> Mapping[str, Any]:
        updater = self._run.updater
        return {
            "share": self.lasting.share_now,
            "sharded": updater.clipper.over_ranks is not None,
            "lost_eps": lost_eps(updater.optimizers) is not None and not self.lasting.mends_eps,
        }

    def reset_moments(self) -> None:
        for optimizer in self._run.updater.optimizers:
            if optimizer in self._needs_its_state:
                log.warning("the moments of %s stay: it may not step without them", type(optimizer).__name__)
            else:
                optimizer.state.clear()
        self._run.scans.rebase()
