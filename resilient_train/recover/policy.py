"""A policy is data: ladders by cause, rungs of remedies, strikes, forgiveness and a budget. Read, checked, frozen."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from resilient_train.errors import ConfigError, unusable
from resilient_train.files import conf, read_yaml_text
from resilient_train.recover.own import unknown
from resilient_train.recover.prescription import Prescribed, number, prescribed
from resilient_train.types import Cause

SHIPPED = conf() / "recovery"
_JOURNAL = "journal.jsonl"  # by which a run directory is known
UNLIMITED = sys.maxsize  # strikes: null; the budget is the only limit


@dataclass(frozen=True, slots=True)
class Rung:
    """Remedies that are done together, in the order in which they are applied."""

    remedies: tuple[Prescribed, ...]
    strikes: int | None = None  # None: those of the policy
    within: int | None = None  # count strikes of so many ticks only; None: all since the cause was forgiven
    landed: bool = False  # only for what reached the weights
    at_start: bool = False  # begun only while no state is proven but the first, and until it is forgiven


@dataclass(frozen=True, slots=True)
class Budget:
    """Where it ends, whatever the ladders say."""

    incidents: int = 10  # within the window, that took more than passing over an update
    run: int = 100  # the same, in the whole run
    refused: int = 500  # updates passed over within the window
    in_a_row: int = 50  # updates refused without an accepted one
    window: int = 1000  # ticks
    rows: int = 1000  # in quarantine
    share: float = 0.05  # of the data set in quarantine, at least one row

    def rows_of(self, count: int) -> int:
        """Return how many rows of so many may be in quarantine; one has to be left to train on."""
        share = max(int(self.share * count), 1) if self.share else 0
        return min(self.rows, share, count - 1)


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done about which cause, how often, and where it ends."""

    ladders: Mapping[str, tuple[Rung, ...]]  # by cause; `default` for all others
    strikes: Mapping[str, int] = field(default_factory=lambda: {"default": 1})  # incidents to a rung, by cause
    forgive_after: int = 200  # steps beyond its last incident after which a cause begins at the first rung again
    relax_after: int = 100  # healthy steps between two steps of relaxing the knobs
    crashes: int = 2  # ends of the process at the same samples, after which these are passed over
    halvings: int = 4  # of the micro-batch, where the device is out of memory
    budget: Budget = field(default_factory=Budget)

    def ladder(self, cause: Cause) -> tuple[Rung, ...]:
        """Return the rungs for a cause."""
        return self.ladders.get(cause, self.ladders["default"])

    def strikes_of(self, rung: Rung, cause: Cause) -> int:
        """Say how many incidents a rung may meet before it is the next one's turn."""
        return self.strikes.get(cause, self.strikes["default"]) if rung.strikes is None else rung.strikes


def named(name: str | Path) -> Policy:
    """Read one of the policies that come with the package, or a YAML file of a user's own."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path, names = SHIPPED / f"{name}.yaml", shipped()
        if name not in names:
            hint = "one of your own is named by the path of its YAML file"
            raise unusable("recovery", f"{unknown('policy', str(name), names)}; {hint}")
    try:
        tree = yaml.safe_load(read_yaml_text(path))
    except OSError as error:
        raise ConfigError("recovery", name, f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError("recovery", name, f"is not YAML: {' '.join(str(error).split())}") from error
    if (path.parent / _JOURNAL).exists() and (own := next(_own_names(tree), None)) is not None:
        why = f"lies in a run directory, from which nothing is imported, and names {own}: copy it to another place"
        raise ConfigError("recovery", name, why)
    return parse(tree)


def _own_names(tree: Any) -> Iterator[str]:
    """What in a policy looks like a remedy of a user's own."""
    if isinstance(tree, Mapping):
        for key, one in tree.items():
            yield from _own_names(key)
            yield from _own_names(one)
    elif _is_list(tree):
        for one in tree:
            yield from _own_names(one)
    elif isinstance(tree, str) and "." in tree:
        yield tree


def shipped() -> list[str]:
    """Return the names of the policies that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def parse(tree: Any, key: str = "recovery") -> Policy:
    """Turn plain data into a policy, or name the position of what is wrong."""
    tree = _mapping(key, tree, [one.name for one in fields(Policy)])
    if "ladders" not in tree:
        raise unusable(f"{key}.ladders", "has to be given: a policy is its ladders")
    plain: dict[str, Any] = {
        name: number(f"{key}.{name}", tree[name], at_least=1)
        for name in ("forgive_after", "relax_after")
        if name in tree
    }
    if "strikes" in tree:
        plain["strikes"] = _by_cause(f"{key}.strikes", tree["strikes"])
    if "halvings" in tree:
        plain["halvings"] = number(f"{key}.halvings", tree["halvings"], at_least=0)
    if "crashes" in tree:
        plain["crashes"] = _strikes(f"{key}.crashes", tree["crashes"])
    if "budget" in tree:
        plain["budget"] = _budget(f"{key}.budget", tree["budget"])
    return Policy(_ladders(f"{key}.ladders", tree["ladders"]), **plain)


def _ladders(key: str, tree: Any) -> dict[str, tuple[Rung, ...]]:
    tree = _mapping(key, tree, ["default", *Cause])
    if "default" not in tree:
        raise unusable(f"{key}.default", "has to be given: the ladder of every cause that has none of its own")
    return {cause: _ladder(f"{key}.{cause}", rungs) for cause, rungs in tree.items()}


def _ladder(key: str, rungs: Any) -> tuple[Rung, ...]:
    if not _is_list(rungs):
        raise ConfigError(key, rungs, "a ladder is a list of rungs, such as [[skip], [rewind, skip]]")
    return tuple(_rung(f"{key}[{place}]", rung) for place, rung in enumerate(rungs))


def _rung(key: str, node: Any) -> Rung:
    strikes = within = None
    at_start = landed = False
    where, remedies = key, node
    if isinstance(node, Mapping) and ("do" in node or len(node) != 1):
        node = _mapping(key, node, ["do", "strikes", "within", "landed", "at_start"])
        where, remedies = f"{key}.do", node.get("do")
        strikes = _strikes(f"{key}.strikes", node["strikes"]) if "strikes" in node else None
        within = number(f"{key}.within", node["within"], int | None, at_least=1) if "within" in node else None
        at_start = _yes_or_no(f"{key}.at_start", node.get("at_start", False))
        landed = _yes_or_no(f"{key}.landed", node.get("landed", False))
    if not _is_list(remedies):
        shape = "a rung is a list of remedies, such as [skip], or {do: [skip], strikes: 3, within: 10}"
        raise ConfigError(where, remedies, shape)
    if not remedies:
        raise unusable(where, "a rung needs a remedy; to leave things as they are, say [report]")
    return Rung(_in_order(where, remedies), strikes, within, landed, at_start)


def _yes_or_no(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(key, value, "must be true or false")
    return value


def _in_order(key: str, nodes: Sequence[Any]) -> tuple[Prescribed, ...]:
    """Build the remedies of a rung, and sort them into the order in which they are applied."""
    built = [prescribed(f"{key}[{place}]", node) for place, node in enumerate(nodes)]
    names = [one.action.remedy for one in built]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise unusable(f"{key}[{place}]", f"{name} stands twice in one rung")
    if "repeat" in names and (others := sorted({"rewind", "skip"} & set(names))):
        raise unusable(f"{key}[{names.index('repeat')}]", f"repeat makes no sense beside {' and '.join(others)}")
    return tuple(sorted(built, key=lambda one: one.place))


def _by_cause(key: str, node: Any) -> dict[str, int]:
    if not isinstance(node, Mapping):
        return {"default": _strikes(key, node)}
    table = _mapping(key, node, ["default", *Cause])
    return {"default": 1, **{cause: _strikes(f"{key}.{cause}", value) for cause, value in table.items()}}


def _strikes(key: str, value: Any) -> int:
    given = number(key, value, int | None, at_least=1)
    return UNLIMITED if given is None else int(given)


def _budget(key: str, node: Any) -> Budget:
    table = _mapping(key, node, [one.name for one in fields(Budget)])
    limits: dict[str, dict[str, Any]] = {"window": {"at_least": 1}, "share": {"wanted": float, "at_most": 1}}
    checked = {
        name: number(f"{key}.{name}", value, **{"at_least": 0, **limits.get(name, {})}) for name, value in table.items()
    }
    return Budget(**checked)


def _mapping(key: str, node: Any, known: Sequence[str]) -> dict[str, Any]:
    """Return a mapping whose keys are all known."""
    if not isinstance(node, Mapping):
        raise ConfigError(key, node, f"must be a mapping of {', '.join(known)}")
    for name in node:
        if name not in known:
            raise unusable(f"{key}.{name}", unknown("cause" if "default" in known else "key", str(name), known))
    return {str(name): value for name, value in node.items()}


def _is_list(node: Any) -> bool:
    return isinstance(node, Sequence) and not isinstance(node, str)
