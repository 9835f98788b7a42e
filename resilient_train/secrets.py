"""Masks secrets in everything that is written, printed or sent.

These are: credentials in a URL (`scheme://user:password@host`, `scheme://token@host`); values named as a password or
token (`?token=...`, `password=...`); tokens of well-known services, by their format; and, wherever they occur, values
of environment variables such as HF_TOKEN and DB_PASSWORD, and of settings with such names. These may be plain words or
numbers: they are masked as whole words only.
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

_LEAST = 4  # characters: shorter values occur in ordinary text as well
_EVERYDAY = {"true", "false", "none", "null", "test", "auto", "default"}  # ordinary words, never masked

_VARIABLES = (
    *("TOKEN", "PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "APIKEY", "ACCESSKEY", "PRIVATEKEY", "SECRETKEY"),
    *("_KEY", "_PIN", "_PASS", "_PWD", "CREDENTIAL", "CREDENTIALS"),
)
_WHOLE_NAMES = ("KEY", "PIN")  # of variables

# The tokens of services that training programs use, in their documented formats. Packages with such lists, such as
# detect-secrets, bring an HTTP client, take 0.3 s to import, have expressions that take forever on some texts, and lack
# the tokens of Hugging Face and the newer ones of GitHub and OpenAI.
_FORMATS = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      hf_(?=[a-z]{0,40}+[A-Z0-9])[A-Za-z0-9]{16,200}+          # Hugging Face
    | sk-(?=[A-Za-z_-]{0,60}+\d)[\w-]{16,300}+                  # OpenAI, Anthropic and others
    | (?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])       # AWS: key ids
    | (?:gh[oprsu]|npm|gsk|r8|[sr]k_(?:live|test))_[A-Za-z0-9]{16,300}+  # GitHub, npm, Groq, Replicate, Stripe
    | xox[a-z]-[A-Za-z0-9-]{10,300}+                            # Slack
    | (?:github_pat_|gl(?:pat|dt|rt|ptt|soat|ft|imt|agent|oas)-|xapp-|AIza|ya29\.|GOCSPX-|pypi-AgE|nvapi-
        |wandb_v\d_)[\w-]{16,2000}+                            # GitHub, GitLab, Slack, Google, PyPI, NVIDIA, W&B
    | hooks\.slack\.com/services/[\w/]{20,200}+ | dapi[0-9a-f]{32} | SG\.[\w-]{16,100}+\.[\w-]{16,100}+
    | eyJ[\w+/-]{20,8000}+(?:\.[\w-]{0,8000}+){0,4}+={0,2}      # JSON in base 64, as in a JWT
    )""",
    re.VERBOSE,
)
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[^-]|-(?!----)){1,20000}+(?:-----END [A-Z0-9 ]{0,50}-----)?"
)

# Repetitions are bounded and possessive: no text makes them take long.
_USERINFO = re.compile(
    r"""://(?P<user>[^\s/@:?\#"'<>\\\[]{0,4096}+)
    (?: :(?!\d{1,5}[/?\#,;)\]}]) (?P<word>[^\s@"'<>]{0,4096}+) )?  # what begins like a port and a path is no password
    @(?:[^\s@/?\#"'<>]{0,64}+@)*+""",  # to the last of several @
    re.VERBOSE,
)
_NO_SECRET = ("", "x-oauth-basic", MASK)  # passwords next to a token in the place of the user
_WITH_CONTAINER = ("wasb", "wasbs", "abfs", "abfss")  # Azure's storage: a container's name before the @

_HEADER = re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer|token)\s+)[^\s'\",]+")
_QUOTED = re.compile(
    r"""(?P<head>(?P<q>['"])(?P<name>[\w.\-]++)(?P=q)\s*:\s*(?P<w>['"]))(?P<value>(?:\\.|(?!(?P=w))[^\\])*)(?P=w)"""
)
_ASSIGNED = re.compile(
    r"""(?P<head>(?:[?&]|(?<![\w.\-]))(?P<name>[\w.\-]++)(?:=|[ ]=[ ]))"""
    r"""(?P<value>'[^']*'|"[^"]*"|[^\s=&;"'][^\s&;"']*)"""
)

_LINE = re.compile(r"(?m)^(\s*(?:- )*([\w.\-]++): )(\S.*)$")

_SECRET = {"password", "passwd", "passphrase", "secret", "apikey", "accesskey", "secretkey", "privatekey"}
_KEYS = {"api", "access", "private", "secret", "auth", "account", "signing", "encryption"}
_IN_QUERIES = {"key", "pwd", "sig", "signature", "credential", "token"}
_OF_A_VOCABULARY = {  # `pad_token` is a piece of text
    *("pad", "bos", "eos", "unk", "sep", "cls", "mask", "start", "begin", "end", "stop", "special", "separator"),
    *("image", "audio", "video", "decoder", "word", "prefix", "suffix", "middle", "newline", "prompt", "blank"),
    *("boundary", "first", "last", "next", "per", "target", "source", "text", "class", "head", "tail", "context"),
    "space",
}
_LIKE_A_TOKEN = re.compile(r"[^\s<\[{|$][^\s]{7,}")

_LONG = 12  # characters: shorter values, or ones of letters only, may be part of another word
_SHORT = 8
_MAY_BE_WORDS = re.compile(r"[A-Za-z _.\-]+|\d+")

# Fields of our own files that programs read, each with one of a few words.
_OWN_FIELDS = {"kind", "status", "signal", "cause", "outcome", "phase", "op", "remedy", "doing"}

_learned: set[str] = set()
_seen: set[str] = set()  # values of the environment


def masked(text: str) -> str:
    """Return the text with its secrets masked."""
    if (known := _forms(_known())) is not None:
        text = known.sub(MASK, text)
    text = _FORMATS.sub(MASK, text)
    if "PRIVATE KEY" in text:
        text = _PEM.sub(MASK, text)
    if "://" in text:
        text = _USERINFO.sub(_without_userinfo, text)
    if "=" in text:
        text = _ASSIGNED.sub(_without_value, text)
    if "':" in text or '":' in text:
        text = _QUOTED.sub(_without_value, text)
    return _HEADER.sub(rf"\1{MASK}", text)


def masked_tree(tree: Any, key: str = "") -> Any:
    """Return plain data with secrets masked: in its texts, and values under the name of a secret."""
    if key in _OWN_FIELDS and isinstance(tree, str) and tree.isidentifier() and tree.islower():
        return tree
    if is_secret(key, tree):
        return MASK
    match tree:
        case str():
            return masked(tree)
        case Mapping():
            return {name: masked_tree(value, str(name)) for name, value in tree.items()}
        case list() | tuple():
            return [masked_tree(one) for one in tree]
    return tree


def masked_override(word: str) -> str:
    """Mask an argument of the command line; the whole value if it sets a secret."""
    key, equals, value = word.partition("=")
    return f"{key}={MASK}" if equals and is_secret(key, value) else masked(word)


def masked_yaml(text: str) -> str:
    """Mask a text of YAML."""
    return _LINE.sub(lambda found: f"{found[1]}{MASK}" if is_secret(found[2], found[3]) else found[0], masked(text))


def is_secret(name: str, value: Any) -> bool:
    """Say whether a setting is a secret, by its name and its looks."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value in ("", "null", "None", "???"):
        return False
    words, text = _words(name), str(value)
    if words[-1] in _SECRET:
        return True
    if words[-1] in ("token", "accesstoken", "authtoken") and not {*words[-2:-1]} & _OF_A_VOCABULARY:
        return isinstance(value, str) and _LIKE_A_TOKEN.fullmatch(value) is not None
    looks_random = len(text) >= _LEAST and any(map(str.isdigit, text)) and any(map(str.isalpha, text))
    return _is_key_name(name) and looks_random  # else a readable word, such as the name of a column


def learn(tree: Any) -> None:
    """Mask the secrets of a configuration wherever they occur from now on."""
    _learned.update(filter(_can_be_hidden, _secrets_in(tree)))


class Masking(logging.Filter):
    """Masks secrets in all records of a logger, tracebacks included, for every handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # a broken call: logging itself reports it
            return True
        if (hidden := masked(message)) != message:
            record.msg, record.args = hidden, None
        if record.exc_info and not record.exc_text:
            record.exc_text = masked(logging.Formatter().formatException(record.exc_info))  # every formatter uses this
        return True


logging.getLogger("resilient_train").addFilter(Masking())  # the logger of the whole package


def _known() -> frozenset[str]:
    """Return all known values, those of the environment included: a variable may be removed later."""
    for name in os.environ:
        if _is_secret_variable(name):
            value = os.environ.get(name, "")
            if value not in _seen:
                _seen.add(value)
                if _can_be_hidden(value) and not (os.sep in value and os.path.exists(value)):  # the path of a file
                    _learned.add(value)
    return frozenset(_learned)


@lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    """Say whether the value of an environment variable is secret, however it looks."""
    name = name.upper()
    words = _words(name)
    if words[-1] == "token" and {*words[-2:-1]} & _OF_A_VOCABULARY:
        return False
    return name.endswith(_VARIABLES) or name in _WHOLE_NAMES or "CREDENTIAL" in name


def _can_be_hidden(value: str) -> bool:
    return len(value) >= _LEAST and MASK not in value and value.lower() not in _EVERYDAY


@lru_cache(maxsize=4)
def _forms(values: frozenset[str]) -> re.Pattern[str] | None:
    """Match each value as it is and as it may be quoted; long ones first, since one may contain another."""
    forms = {
        form
        for value in values
        for form in (value, quote(value, safe=""), quote(value), repr(value)[1:-1], json.dumps(value)[1:-1])
    }
    return re.compile("|".join(map(_as_a_word, sorted(forms, key=len, reverse=True)))) if forms else None


def _as_a_word(form: str) -> str:
    """Match short and plain values as whole words only: 4711, but not in 2.4711, 1,4711 or a_4711."""
    escaped = re.escape(form)
    if len(form) < _SHORT and form.isdigit():
        return rf"(?<![\w.,]){escaped}(?!\w|[.,]\d)"
    if len(form) < _LONG or _MAY_BE_WORDS.fullmatch(form):
        return rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"
    return escaped


def _without_userinfo(found: re.Match[str]) -> str:
    user, word = found["user"], found["word"]
    if word is None and (user in ("", "git") or found.string.endswith(_WITH_CONTAINER, 0, found.start())):
        return found[0]
    if word is None or (word in _NO_SECRET[:2] and user):
        return f"://{MASK}@"
    return f"://{user}:{MASK}@"


def _without_value(found: re.Match[str]) -> str:
    head, name, value = found["head"], found["name"], found["value"]
    if value.startswith(MASK):
        return found[0]
    if head.startswith(("?", "&")):
        hidden = _words(name)[-1] in _SECRET | _IN_QUERIES
    elif head.rstrip().endswith("="):  # `token=` may be an argument in a line of code, `data.train.token=` is a setting
        plain = value.strip("'\"")
        is_setting = "." in name or name.isupper() or _is_key_name(name)
        hidden = _words(name)[-1] in _SECRET or (is_setting and is_secret(name, plain))
        hidden = hidden or (name.isupper() and _is_secret_variable(name) and _can_be_hidden(plain))
    else:
        hidden = is_secret(name, value)
    end = head[-1] if head[-1] in "'\"" else ""
    return f"{head}{MASK}{end}" if hidden else found[0]


def _is_key_name(name: str) -> bool:
    """Say whether a name is like `api_key`, which may also be the name of a column."""
    words = _words(name)
    return len(words) > 1 and words[-1] == "key" and words[-2] in _KEYS


@lru_cache(maxsize=1024)
def _words(name: str) -> list[str]:
    """Return the words of a name in small letters: `data.train.apiKey` has four."""
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
