"""What nobody is to read, hidden wherever something is written down, printed or sent.

Hidden are: who one is in an address (`scheme://user:password@host`, `scheme://token@host`); what is said of a password
or token by name (`?token=...`, `password=...`); and, wherever they turn up, the values of environment variables such as
HF_TOKEN and AWS_SECRET_ACCESS_KEY, and of settings whose names say that they are secret.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

MASK = "***"

_LEAST = 8  # characters: what is shorter stands in ordinary text as well

_VARIABLES = (
    *("TOKEN", "PASSWORD", "PASSWD", "PASSPHRASE", "SECRET"),
    *("API_KEY", "APIKEY", "ACCESS_KEY", "PRIVATE_KEY", "SECRET_KEY"),
)

# Repetitions are bounded and give nothing back: nobody's text makes them take long.
_USERINFO = re.compile(
    r"""://(?P<user>[^\s/@:?\#"'<>\\\[]{0,4096}+)
    (?: :(?!\d{1,5}[/?\#,;)\]}]) (?P<word>[^\s@"'<>]{0,4096}+) )?  # what begins like a port and a path is no password
    @(?:[^\s@/?\#"'<>]{0,64}+@)*+""",  # of several @ the last one ends it
    re.VERBOSE,
)
_NO_SECRET = ("", "x-oauth-basic", MASK)  # in the place of a password, where the user's place holds the token
_WITH_CONTAINER = ("wasb", "wasbs", "abfs", "abfss")  # Azure's storage: before the @ stands the name of a container

_HEADER = re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer|token)\s+)[^\s'\",]+")
_QUOTED = re.compile(
    r"""(?P<head>(?P<q>['"])(?P<name>[\w.\-]++)(?P=q)\s*:\s*(?P<w>['"]))(?P<value>(?:\\.|(?!(?P=w))[^\\])*)(?P=w)"""
)
_ASSIGNED = re.compile(r"""(?P<head>(?:[?&]|(?<![\w.\-]))(?P<name>[\w.\-]++)=)(?P<value>'[^']*'|"[^"]*"|[^\s&;"']+)""")

_LINE = re.compile(r"(?m)^(\s*(?:- )*([\w.\-]++): )(\S.*)$")

_SECRET = {"password", "passwd", "passphrase", "secret", "apikey", "accesskey", "secretkey", "privatekey"}
_KEYS = {"api", "access", "private", "secret", "auth", "account", "signing", "encryption"}
_IN_QUERIES = {"key", "pwd", "sig", "signature", "credential", "token"}
_OF_A_VOCABULARY = {  # these tokens are pieces of text
    *(
        "pad",
        "bos",
        "eos",
        "unk",
        "sep",
        "cls",
        "mask",
        "start",
        "begin",
        "end",
        "stop",
        "special",
        "blank",
        "separator",
    ),
    *("image", "audio", "video", "decoder", "space", "word", "boundary", "prefix", "suffix", "middle", "newline"),
    *("first", "last", "next", "per", "target", "source", "text", "class", "head", "tail", "context", "prompt"),
}
_LIKE_A_TOKEN = re.compile(r"[^\s<\[{|$][^\s]{7,}")

_PLAIN_WORD = re.compile(r"[a-z]{1,15}|[A-Z]{1,15}|\d{1,9}")

_MAY_BE_WORDS = re.compile(r"[A-Za-z _.\-]+|\d+")

_learned: set[str] = set()
_looked_at: set[str] = set()  # values of the environment


def masked(text: str) -> str:
    """Return the text with its secrets hidden; anything else stays as it is."""
    if (known := _forms(_known())) is not None:
        text = known.sub(MASK, text)
    if "://" in text:
        text = _USERINFO.sub(_without_userinfo, text)
    if "=" in text:
        text = _ASSIGNED.sub(_without_value, text)
    if "':" in text or '":' in text:
        text = _QUOTED.sub(_without_value, text)
    return _HEADER.sub(rf"\1{MASK}", text)


def masked_tree(tree: Any) -> Any:
    """Return plain data with the secrets in its texts hidden, and what stands under a name that says it is one."""
    match tree:
        case str():
            return masked(tree)
        case Mapping():
            return {key: MASK if is_secret(str(key), one) else masked_tree(one) for key, one in tree.items()}
        case list() | tuple():
            return [masked_tree(one) for one in tree]
    return tree


def masked_override(word: str) -> str:
    """The same for a word of the command line, of which the whole value goes."""
    key, equals, value = word.partition("=")
    return f"{key}={MASK}" if equals and is_secret(key, value) else masked(word)


def masked_yaml(text: str) -> str:
    """The same for YAML as it is written."""
    return _LINE.sub(lambda found: f"{found[1]}{MASK}" if is_secret(found[2], found[3]) else found[0], masked(text))


def is_secret(name: str, value: Any) -> bool:
    """Say whether a setting is one, by its name and by what it looks like: `pad_token` is a piece of text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value in ("", "null", "None", "???"):
        return False
    if _is_secret_name(name):
        return True
    return (_is_token_name(name) and _looks_like_token(value)) or (_is_key_name(name) and _looks_random(value))


def learn(tree: Any) -> None:
    """Take note of the secrets in a configuration: from now on they are hidden wherever they turn up."""
    _learned.update(value for value in _secrets_in(tree) if len(value) >= _LEAST and MASK not in value)


class Masking(logging.Filter):
    """Hides secrets in all that a logger is told, tracebacks included, whoever listens to it."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            said = record.getMessage()
        except Exception:  # a broken call: logging itself complains about it
            return True
        if (hidden := masked(said)) != said:
            record.msg, record.args = hidden, None
        if record.exc_info and not record.exc_text:
            record.exc_text = masked(logging.Formatter().formatException(record.exc_info))  # what every formatter takes
        return True


logging.getLogger("resilient_train").addFilter(Masking())  # the one that all of the package speaks through


def _known() -> frozenset[str]:
    """The secrets of the environment as it is now, and as it was when it was last looked at."""
    for name in os.environ:
        if name.upper().endswith(_VARIABLES):
            value = os.environ.get(name, "")
            if value not in _looked_at:
                _looked_at.add(value)
                # Some name a file that holds it, and a plain word (POSTGRES_PASSWORD=postgres) stands everywhere.
                if len(value) >= _LEAST and not _PLAIN_WORD.fullmatch(value) and not os.path.exists(value):
                    _learned.add(value)
    return frozenset(_learned)


@lru_cache(maxsize=4)
def _forms(values: frozenset[str]) -> re.Pattern[str] | None:
    """Each as it is and as it may be quoted, a word not within another; long ones first, as one may hold another."""
    forms = {
        form
        for value in values
        for form in (value, quote(value, safe=""), quote(value), repr(value)[1:-1], json.dumps(value)[1:-1])
    }
    ordered = [
        rf"(?<![A-Za-z0-9]){re.escape(form)}(?![A-Za-z0-9])" if _MAY_BE_WORDS.fullmatch(form) else re.escape(form)
        for form in sorted(forms, key=len, reverse=True)
    ]
    return re.compile("|".join(ordered)) if forms else None


def _without_userinfo(found: re.Match[str]) -> str:
    user, word = found["user"], found["word"]
    scheme = re.search(r"[\w+.\-]*$", found.string[max(0, found.start() - 20) : found.start()])
    if word is None and (user in ("", "git") or (scheme and scheme[0] in _WITH_CONTAINER)):
        return found[0]
    if word is None or (word in _NO_SECRET[:2] and user):
        return f"://{MASK}@"
    return f"://{user}:{MASK}@"


def _without_value(found: re.Match[str]) -> str:
    head, name, value = found["head"], found["name"], found["value"]
    if value.startswith(MASK):
        return found[0]
    if head.startswith(("?", "&")):
        hidden = _is_secret_name(name) or _words(name)[-1] in _IN_QUERIES
    elif head.endswith("="):  # `token=` may be an argument in a line of code, `data.train.token=` is a setting
        hidden = _is_secret_name(name) or ((("." in name) or name.isupper()) and is_secret(name, value.strip("'\"")))
    else:
        hidden = is_secret(name, value)
    end = head[-1] if head[-1] in "'\"" else ""
    return f"{head}{MASK}{end}" if hidden else found[0]


def _is_secret_name(name: str) -> bool:
    return _words(name)[-1] in _SECRET


def _is_key_name(name: str) -> bool:
    """`account_key`, which may be the name of a column as well."""
    words = _words(name)
    return len(words) > 1 and words[-1] == "key" and words[-2] in _KEYS


def _looks_random(value: Any) -> bool:
    """Say whether it is no word that a person chose to be read."""
    text = str(value)
    return len(text) >= _LEAST and any(map(str.isdigit, text)) and any(map(str.isalpha, text))


def _is_token_name(name: str) -> bool:
    words = _words(name)
    return words[-1] in ("token", "accesstoken", "authtoken") and not {*words[-2:-1]} & _OF_A_VOCABULARY


def _looks_like_token(value: Any) -> bool:
    return isinstance(value, str) and _LIKE_A_TOKEN.fullmatch(value) is not None


@lru_cache(maxsize=1024)
def _words(name: str) -> list[str]:
    """The words of a name, in small letters: `data.train.apiKey` has four."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return re.findall(r"[a-z0-9]+", parted) or [""]


def _secrets_in(tree: Any) -> Iterator[str]:
    match tree:
        case str():
            for found in _USERINFO.finditer(tree):
                if _without_userinfo(found) != found[0]:
                    secret = found["user"] if found["word"] in (None, *_NO_SECRET) else found["word"]
                    yield from {secret, unquote(secret)}
        case Mapping():
            for key, one in tree.items():
                if is_secret(str(key), one):
                    yield str(one)
                else:
                    yield from _secrets_in(one)
        case list() | tuple():
            for one in tree:
                yield from _secrets_in(one)
