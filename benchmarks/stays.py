"""Which functions hold the anomaly of one NaN row, from the check that finds it to the log that names it?

A function holds it if an argument, a local at its return, or what it returns is the anomaly, or an incident or a case,
which have one, or a tuple or list of these. Comprehensions and lambdas belong to the function that they are in.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any


def measured() -> dict[tuple[str, str], bool]:
    """Train a loop with one NaN row; return files and functions of the package, and whether they held it directly."""
    import torch

    import resilient_train
    from resilient_train.ground.types import Anomaly, Incident

    package, found = Path(resilient_train.__file__).parent, dict[tuple[str, str], bool]()

    def flat(value: Any) -> list[Any]:
        return [one for each in value for one in flat(each)] if type(value) in (tuple, list) else [value]

    def profile(frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(f"{package}{os.sep}") and code.co_name[0] != "<":
            place = str(Path(code.co_filename).relative_to(package)), code.co_qualname
            for one in flat([*frame.f_locals.values(), returned]):
                if isinstance(one, Anomaly | Incident) or type(one).__name__.endswith("Case"):
                    found[place] = found.get(place, False) or isinstance(one, Anomaly)

    torch.manual_seed(0)
    x = torch.randn(512, 6)
    data = torch.utils.data.TensorDataset(x.index_fill(0, torch.tensor([100]), torch.nan), x.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    objective = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    with tempfile.TemporaryDirectory() as run_dir:
        plan: dict[str, Any] = {"objective": objective, "data": data, "batch_size": 16, "steps": 120}
        guard = resilient_train.Guard(None, model, optimizer, run_dir=f"{run_dir}/run", **plan)
        sys.setprofile(profile)
        for batch in guard.batches():
            guard.step(batch)
        guard.close()
        sys.setprofile(None)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each of them")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], metavar="DIR", help="another checkout")
    args = parser.parse_args()
    if "STAYS" not in os.environ:  # another interpreter, which imports the package of that checkout
        environment = {**os.environ, "PYTHONPATH": str(args.tree.resolve()), "STAYS": "1"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    places = measured()
    for (file, function), is_direct in sorted(places.items()) if args.list else ():
        print(f"{file}: {function}{'' if is_direct else ' (in an incident or a case)'}")
    for chosen, what in (([one for one in places if places[one]], "it"), (places, "it, an incident or a case")):
        print(f"{len(chosen)} functions in {len({file for file, _ in chosen})} files hold {what}")
