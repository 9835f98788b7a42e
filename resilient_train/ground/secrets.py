"""Masks secrets: `Masking` in all that is logged, `masked_tree` in all that is written.

A value is secret by the name of its environment variable (HF_TOKEN, DB_PASSWORD) or setting (`api_key`): under that
name, and from 8 characters on wherever it occurs. So are passwords and tokens in URLs, what stands after `password=`,
and the tokens of a few services.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MASK = "***"

_LEAST = 8  # characters: shorter values occur in ordinary text as well

_NAMES = r"password|passwd|passphrase|secret|(?:api|access|account|private|secret|auth|signing|encryption)[_-]?key"
_SETTING = re.compile(rf"(?i)(?:{_NAMES})$")
_VARIABLE = re.compile(rf"(?i)(?:{_NAMES}|token|(?:^|_)(?:key|pin)|_(?:pass|pwd))$|credential")
_LIKE_A_TOKEN = re.compile(r"(?!\d+$)[^\s<\[{|$]\S{7,}")  # unlike pad_token=<pad>, eos_token=50256

_PASSWORD_IN_URL = re.compile(  # repetitions are bounded and possessive: no text makes them take long
    r"""(://[^\s/@:?\#"'<>]{0,1000}+:)
    (?!\d{1,5}[/?\#,;)\]}])  # a port
    [^\s@"'<>]{0,1000}+(?:@[^\s@/?\#"'<>]{0,64}+(?=@))*+@""",
    re.VERBOSE,
)
_TOKEN_IN_URL = re.compile(r"""(https?://)[^\s/@:?#"'<>]{1,1000}+:?@""")
_NAMED = re.compile(
    rf"""([?&][\w.-]{{0,60}}(?:token|key|sig|signature|credential)=
    |(?:{_NAMES})['"]?[ ]?[=:][ ]?['"]?
    |authorization['"]?[ ]?[=:][ ]?['"]?\w{{1,20}}[ ])
    [^\s&;'"]+""",
    re.VERBOSE | re.IGNORECASE,
)
_TOKENS = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      hf_[A-Za-z0-9]{30,200}+                                           # Hugging Face
    | sk-(?:proj|ant|svcacct)-[\w-]{16,300}+ | sk-[A-Za-z0-9]{32,300}+  # OpenAI, Anthropic
    | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])                          # AWS
    | gh[oprsu]_[A-Za-z0-9]{30,300}+ | github_pat_\w{22,300}+ | glpat-[\w-]{20,300}+  # GitHub, GitLab
    | xox[a-z]-[A-Za-z0-9-]{10,300}+                                    # Slack
    | eyJ[\w-]{10,2000}+\.[\w-]{10,8000}+\.[\w-]{0,2000}+               # a JSON web token
    )""",
    re.VERBOSE,
)

_known: set[str] = set()


def masked(text: str) -> str:
    for name in os.environ:
        if _is_secret_variable(name):
            _remember(os.environ.get(name, ""))  # for good: a program may remove the variable
    for value in sorted(_known, key=len, reverse=True):  # one may contain another
        text = text.replace(value, MASK)
    text = _TOKEN_IN_URL.sub(rf"\1{MASK}@", text)
    text = _PASSWORD_IN_URL.sub(rf"\1{MASK}@", text)
    text = _NAMED.sub(rf"\1{MASK}", text)
    return _TOKENS.sub(MASK, text)


def masked_tree(tree: Any, name: str = "") -> Any:
    """Return settings, or other plain data, as they are written: without the secrets in texts and under their names."""
    match tree:
        case Mapping():
            return {key: masked_tree(one, str(key)) for key, one in tree.items()}
        case list() | tuple():
            return [masked_tree(one) for one in tree]
    if _is_secret(name, tree):
        _remember(str(tree))
        return MASK
    return masked(tree) if isinstance(tree, str) else tree


def learn(tree: Any) -> None:
    """Mask the secrets of a configuration wherever they occur from now on."""
    masked_tree(tree)


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


def _is_secret(name: str, value: Any) -> bool:
    if name.lower().endswith("token"):
        return isinstance(value, str) and _LIKE_A_TOKEN.fullmatch(value) is not None
    is_plain = isinstance(value, str | int) and not isinstance(value, bool)
    return is_plain and _SETTING.search(name) is not None


@lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    return _VARIABLE.search(name) is not None


def _remember(value: str) -> None:
    if len(value) >= _LEAST and MASK not in value and not os.path.exists(value):  # the file that holds the secret
        _known.add(value)
