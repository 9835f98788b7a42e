"""A remedy that freezes the weights of a layer, for a number of accepted updates."""

from dataclasses import dataclass

from resilient_train.core.protocols import Effect, Hook
from resilient_train.core.remedies import Remedy, limited
from resilient_train.extensions import Extension


@dataclass(frozen=True)
class FreezeLayer(Remedy):
    layer: str = ""  # as in model.named_parameters()
    steps: int = limited(100, at_least=1)

    def applies(self, case):
        return any(is_in(name, self.layer) for name in case.facts["trained"])

    def apply(self, run):
        run.extension(FrozenLayers).freeze(self.layer, self.steps)


def is_in(name, layer):
    return bool(layer) and f"{name}.".startswith(f"{layer}.")


class FrozenLayers(Extension, Hook):
    remedies = {"freeze_layer": FreezeLayer}

    def build(self, run):
        self.model, self.left = run.state.model, {}  # updates for which a layer is still frozen
        trained = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
        self.trained = trained if run.world.size == 1 else []  # DDP waits for the gradients of all
        run.hooks.append(self)
        run.effects.append(Effect("frozen_layers", lambda: dict(self.left), self.restore, self.restore))

    def facts(self, diagnosis, since, has_landed):
        return {"trained": self.trained}

    def freeze(self, layer, steps):
        self.restore({**self.left, layer: steps})

    def restore(self, left):  # of an earlier process, or before a trial
        for name in self.trained:
            if any(is_in(name, layer) for layer in (*self.left, *left)):
                is_frozen = any(is_in(name, layer) for layer in left)
                self.model.get_parameter(name).requires_grad_(not is_frozen)
        self.left = dict(left)

    def accepted(self, update):
        if self.left:
            self.restore({layer: steps - 1 for layer, steps in self.left.items() if steps > 1})
