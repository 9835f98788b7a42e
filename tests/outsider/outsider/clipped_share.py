"""Warns where most updates of late were clipped: the configured learning rate is not the one that is used."""

from collections import deque
from dataclasses import dataclass, field

from resilient_train.core.checks import Check
from resilient_train.extensions import Extension
from resilient_train.ground.reader import limited
from resilient_train.ground.wording import log


@dataclass
class Settings:
    window: int = limited(200, at_least=10)  # accepted updates
    share: float = limited(0.9, above=0, at_most=1)


@dataclass
class ClippedShare(Check):
    saved = ("lately",)  # rewinds with the run, and is in checkpoints
    persistent = ("has_warned",)  # is in checkpoints, and stays as it is in a rewind

    settings: Settings
    lately: deque = field(default_factory=deque)
    has_warned: bool = False

    def landed(self, step, vitals, reference, *, is_learned):
        self.lately.append(vitals.clipped)
        if len(self.lately) < self.settings.window:
            return
        share = sum(self.lately) / len(self.lately)
        self.lately.popleft()
        if share >= self.settings.share and not self.has_warned:
            self.has_warned = True
            log.warning("step %d: %.0f %% of the last updates were clipped", step, 100 * share)
        return  # an Alarm(since, fact("text", text="...")) would be an incident

    def forget(self, limit=float("inf")):  # something was changed on purpose
        self.lately.clear()


class ClippedShares(Extension):
    settings = {"clipped_share": Settings}

    def checks(self, settings):
        return {"clipped_share": ClippedShare(settings.clipped_share)}
