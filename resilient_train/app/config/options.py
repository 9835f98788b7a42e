"""The words of a command line that begin with a dash: all of them are Hydra's, and what is set has no dashes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resilient_train.app.config.meanings import meanings
from resilient_train.errors import ConfigError, unusable
from resilient_train.imports import similar
from resilient_train.secrets import MASK, is_secret

_WITH_A_VALUE = {
    "--config-path": "-cp",
    "--config-name": "-cn",
    "--config-dir": "-cd",
    "--cfg": "-c",
    "--package": "-p",
    "--experimental-rerun": "",
}
_WITHOUT = {
    "--help": "-h",
    "--hydra-help": "",
    "--version": "",
    "--resolve": "",
    "--run": "-r",
    "--multirun": "-m",
    "--shell-completion": "-sc",
    "--info": "-i",
}
_KNOWN = _WITH_A_VALUE | _WITHOUT
_CONFIGS = ("job", "hydra", "all")  # that --cfg can print


def options_first(words: Sequence[str]) -> list[str]:
    """Put Hydra's options before the overrides: its parser takes no override behind one that has a value."""
    options: list[str] = []
    overrides: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        (options if word.startswith("-") else overrides).append(word)
        if _takes_next(word) and left:
            options.append(left.pop(0))
    return options + overrides


def is_option(word: str, name: str) -> bool:
    """Say whether a word is this option, perhaps cut short as far as Hydra's parser understands it."""
    return _meant(word) == name


def refuse_unknown(words: Sequence[str]) -> None:
    """Say in one line what Hydra's parser would answer with a page: raises ConfigError."""
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word == "--":
            continue
        name = _meant(word)
        if name is None:
            raise _no_such(word, left[0] if left else "")
        value = left.pop(0) if _takes_next(word) and left else word.partition("=")[2]
        if name in _WITH_A_VALUE and not value:
            raise unusable(word, f"needs a value: {name} VALUE")
        if name == "--cfg" and value not in _CONFIGS:
            raise ConfigError(name, value, f"there are {', '.join(_CONFIGS)}")


def _meant(word: str) -> str | None:
    """The option that a word stands for; it may be cut short as long as it can be no other."""
    word = word.partition("=")[0]
    if not word.startswith("-"):
        return None
    if not word.startswith("--"):
        return next((name for name, short in _KNOWN.items() if word == short), None)
    found = [name for name in _KNOWN if name.startswith(word)]
    return word if word in _KNOWN else found[0] if len(found) == 1 else None


def _takes_next(word: str) -> bool:
    return "=" not in word and _meant(word) in _WITH_A_VALUE


def _no_such(word: str, behind: str) -> ConfigError:
    """What is set has no dashes: name the key that is likely to be meant, with the value that was given."""
    typed, equals, value = word.partition("=")
    if not equals and not behind.startswith("-") and "=" not in behind:
        value = behind
    key = next(_keys(typed.lstrip("-").replace("-", "_")), None)
    shown = MASK if key and is_secret(key.rstrip("="), value) else value or "..."
    hint = f"; did you mean {key}{shown}?" if key else similar(typed, _KNOWN) or "."
    return unusable(typed, f"no such option{hint} What is set has no dashes: key=value; --help explains every key")


def _keys(name: str) -> Iterator[str]:
    """The key, or group, of such a name; else the first whose last part it is."""
    known = {f"{word.partition('=')[0]}=": None for word in meanings() if not word.endswith(".")}
    by_end: dict[str, str] = {}
    for key in known:
        by_end.setdefault(key.rstrip("=").rpartition(".")[2], key)
    if f"{name}=" in known:
        yield f"{name}="
    if name in by_end:
        yield by_end[name]
