"""`resilient-train examine RUN_DIR [overrides]`: one batch of a run under the microscope, at its newest verified state.

Model, data and objective are those of the command line, as nothing that a run directory names is ever built.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from resilient_train.command import no_run, parser_of
from resilient_train.durable.endings import CONFIG, is_run
from resilient_train.ground.errors import ConfigError, TrainError
from resilient_train.ground.reader import find_in_working_directory

_HELP = """\
Runs forward and backward of the first batch of the data under the microscope, and changes nothing: what every layer
puts out and which gradients arrive there, the first operation that makes a value that is not finite. It takes the
weights of the newest verified checkpoint, else the final ones, and computes in their type. Give the overrides of the
run: no model or data is built from its directory."""
_EXIT_CODES = "0 if loss and gradients are finite, 1 if not, 2 if RUN_DIR or the overrides do not fit"


def main(words: list[str]) -> int:
    parser = parser_of("examine", _HELP, _EXIT_CODES)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the overrides of the run's own command")
    given = parser.parse_intermixed_args(words)
    if not is_run(given.run_dir):
        return no_run(given.run_dir)
    find_in_working_directory()
    try:
        found = _examined(given)
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(found)
    return 0 if found.is_healthy else 1


def _examined(given: argparse.Namespace) -> Any:
    # Here, as it imports torch, which takes seconds.
    import torch

    from resilient_train.command import build
    from resilient_train.command.config import compose
    from resilient_train.core.randomness import Purpose, mix, seed_all
    from resilient_train.durable import store as weights
    from resilient_train.durable.manifest import VERIFIED, entries_of
    from resilient_train.extensions.diagnosis.examine import examine

    run_dir: Path = given.run_dir
    composed = compose.load(given.overrides)
    if changes := compose.other_run(composed.changes(run_dir / CONFIG)):
        why = f"is a run of another configuration ({'; '.join(changes[:3])}): give the overrides of its command"
        raise ConfigError("RUN_DIR", run_dir, why)
    config = composed.config
    seed_all(mix(Purpose.INITIAL_WEIGHTS, config.run.seed), torch.device("cpu"))
    objective = build.objective_of(config, torch.device("cpu"))
    rows = compose.build("data.train", config.data.train)
    model = build.model_of(config)
    kept = (one.path for one in entries_of(run_dir) if one.kind == VERIFIED)
    weights.load_into(model, next(kept, run_dir), "RUN_DIR")
    model.train()
    batch = build.collate_of(config)(list(islice(rows, config.data.batch_size)))
    return examine(model, objective, batch)
