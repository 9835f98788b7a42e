"""Masks secrets in what is written and shown: passwords in addresses, and values under names such as `api_key`.

In other text a secret cannot be recognized, and stays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_NAMES = r"password|passwd|passphrase|secret|(?:api|access|account|private|secret|auth|signing|encryption)[_-]?key"
_SETTING = re.compile(rf"(?i)(?:{_NAMES})$")
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
    |authorization['"]?[ ]?[=:][ ]?['"]?\w{{1,20}}[ ]
    |(?:\.\w{{0,60}}token=|\btoken:[ ])(?=[^\s<\[{{|$]\S{{7}}))
    [^\s&;'"]+""",
    re.VERBOSE | re.IGNORECASE,
)


def masked(text: str) -> str:
    text = _TOKEN_IN_URL.sub(rf"\1{MASK}@", text)
    text = _PASSWORD_IN_URL.sub(rf"\1{MASK}@", text)
    return _NAMED.sub(rf"\1{MASK}", text)


def masked_tree(tree: Any, name: str = "") -> Any:
    """Return settings, or other plain data, as they are written: without the secrets in texts and under their names."""
    match tree:
        case Mapping():
            return {key: masked_tree(one, str(key)) for key, one in tree.items()}
        case list() | tuple():
            return [masked_tree(one) for one in tree]
    if _is_secret(name, tree):
        return MASK
    return masked(tree) if isinstance(tree, str) else tree


class Masking(logging.Filter):
    """Masks secrets in all that the package logs, tracebacks included, for every handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = masked(record.getMessage()), None
        if record.exc_info:
            record.exc_text = masked(logging.Formatter().formatException(record.exc_info))  # every formatter uses this
        return True


logging.getLogger("resilient_train").addFilter(Masking())


def _is_secret(name: str, value: Any) -> bool:
    if name.lower().endswith("token"):
        return isinstance(value, str) and _LIKE_A_TOKEN.fullmatch(value) is not None
    is_plain = isinstance(value, str | int) and not isinstance(value, bool)
    return is_plain and _SETTING.search(name) is not None
