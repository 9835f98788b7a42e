"""A remedy that freezes the weights whose names begin with a word, for a number of accepted updates."""

from dataclasses import dataclass

from resilient_train.core.protocols import Effect, Hook
from resilient_train.core.remedies import Remedy, limited
from resilient_train.extensions import Extension


@dataclass(frozen=True)
class FreezeLayer(Remedy):
    layer: str = ""  # as in model.named_parameters()
    steps: int = limited(100, at_least=1)

    def applies(self, case):
        return any(name.startswith(self.layer) for name in case.facts["trained"] if self.layer)

    def apply(self, run):
        run.extension(FrozenLayers).freeze(self.layer, self.steps)


class FrozenLayers(Extension, Hook):
    remedies = {"freeze_layer": FreezeLayer}

    def build(self, run):
        self.model, self.left = run.state.model, {}  # updates for which a layer is still frozen
        self.trained = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
        run.hooks.append(self)
        run.effects.append(Effect("frozen_layers", lambda: dict(self.left), self.restore, self.restore))

    def facts(self, diagnosis, since, has_landed):
        return {"trained": self.trained}

    def freeze(self, layer, steps):
        self.restore({**self.left, layer: steps})

    def restore(self, left):  # of an earlier process, or before a trial
        self.left = dict(left)
        for name in self.trained:
            is_frozen = any(name.startswith(layer) for layer in left)
            self.model.get_parameter(name).requires_grad_(not is_frozen)

    def accepted(self, update):
        if self.left:
            self.restore({layer: steps - 1 for layer, steps in self.left.items() if steps > 1})
