"""The one gate for text that came from a node: such text is data, never markup or a command.

Beside it, the small texts that all reports write alike: a moment, a count, a node set cut short.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

# C0 and C1 controls and DEL, lone surrogates (bytes that are no UTF-8), and the characters that
# reorder or hide what stands beside them, or are not seen at all (bidirectional marks, zero-width,
# line separators, annotations, tags; Unicode, Default_Ignorable_Code_Point).
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\ud800-\udfff"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def sanitise(text: str, limit: int = 4000) -> str:
    """``text`` as one line that is safe to show: control characters become visible escapes.

    limit: characters after which the rest is cut off, with ``...``
    """
    if len(text) > limit:
        text = text[:limit] + "..."
    return _UNSAFE.sub(_visible, text.replace("\t", "    "))


def now() -> str:
    """This moment as the reports write moments: ISO 8601, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 node``, ``3 nodes``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def cut(text: str, limit: int, count: int) -> str:
    """A folded node set of ``count`` nodes, cut behind a comma when longer than ``limit``."""
    if len(text) <= limit:
        return text
    more = f"... ({count} nodes)"
    kept = text[: limit - len(more)]
    return kept[: kept.rfind(",") + 1 or None] + more


# --- Secrets: what a command line, a log or a variable may hold and no report may show.

#: What stands in place of a secret.
REDACTED = "<redacted>"

# The last word of a name whose value is a secret: HF_TOKEN, --api-key, db.password, WANDB_API_KEY.
# What training logs name (pad_token, num_tokens, token_id) is no secret, but for the first, which
# costs nothing.
_SECRET = (
    r"(?:token|secret|passwd|password|passphrase|pass|pw|credentials?|cookie|dsn|webhook"
    r"|authorization|auth|signature|sig|connection[_-]?string"
    r"|(?:api|access|secret|private|account|encryption|signing|ssh|auth|session|master|license)"
    r"[_-]?key(?:[_-]?id)?|secret[_-]?access[_-]?key)"
)
_NAMED = (
    rf"(?:[A-Za-z0-9]+[_.-]){{0,12}}{_SECRET}|[A-Za-z]{{0,30}}(?:PASSWORD|Password|Token|ApiKey)"
)
_VALUE = r"\"(?:[^\"\\]|\\.){0,4000}\"?|'(?:[^'\\]|\\.){0,4000}'?|[^\s,;&)\]}\"']+"
_KNOWN = re.compile(
    # By their own form: Hugging Face, AWS, GitHub, GitLab, Slack, OpenAI and Anthropic, Google,
    # npm, PyPI, NVIDIA, Replicate, Stripe, JSON Web Tokens (the vendors' token formats).
    r"\bhf_[A-Za-z0-9]{8,}|\b(?:AKIA|ASIA)[0-9A-Z]{12,}|\bgh[pousr]_[A-Za-z0-9]{8,}"
    r"|\bgithub_pat_[A-Za-z0-9_]{8,}|\bglpat-[\w-]{8,}|\bxox[abeoprs]-[\w-]{8,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}|\bAIza[\w-]{20,}|\bya29\.[\w.-]{16,}|\bnpm_[A-Za-z0-9]{16,}"
    r"|\bpypi-[\w-]{16,}|\bnvapi-[\w-]{16,}|\br8_[A-Za-z0-9]{16,}|\b[rs]k_(?:live|test)_\w{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?|hooks\.slack\.com/services/[\w/]+"
    # A private key, as far as it goes.
    r"|-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_SCHEME = re.compile(r"(?i)\b(bearer|basic|negotiate)([ \t]+|%20)([A-Za-z0-9._~+/=-]{6,})")
# scheme://user:password@host, and a token alone before the @.
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^\s/?#@'\"]{1,4000}@")
_OPTION = re.compile(rf"(?i)(?<![\w-])(--?(?:[A-Za-z0-9]+[_-]){{0,12}}{_SECRET}[ \t]+)({_VALUE})")
_ASSIGN = re.compile(
    rf"(?i)(?<![A-Za-z0-9])((?:{_NAMED})[\"']?\s{{0,3}}(?:=|:)\s{{0,3}}"
    rf"(?:(?:bearer|basic|token)\s{{1,3}})?)({_VALUE})"
)
# Variables alone: a word with a _KEY at its end has no other meaning there.
_VARIABLE = re.compile(
    rf"(?<![A-Za-z0-9_])([A-Z][A-Z0-9_]{{0,60}}_(?:KEY|PAT|PWD|CREDS?)=)({_VALUE})"
)
_SECRET_NAME = re.compile(rf"(?i)(?:{_NAMED})")
# A text without one of these has no secret that we know: most have none, and this is quick.
_HINT = re.compile(
    r"(?i)tok|secr|pass|pw|_pat|cred|cook|dsn|hook|auth|sig|conn|key|bearer|basic|negot|://"
    r"|hf_|AKIA|ASIA|gh[pousr]_|github_|glpat|xox|sk[-_]|AIza|ya29|npm_|pypi-|nvapi|r8_|rk_|eyJ"
)


def secret_name(name: str) -> bool:
    """Whether the value of a variable or option of this name is a secret: ``HF_TOKEN``."""
    return _SECRET_NAME.fullmatch(name.lstrip("-")) is not None


def redact(text: str) -> str:
    """``text`` with `REDACTED` in place of every secret that can be known as one.

    By its name (``HF_TOKEN=...``, ``--password ...``, ``"api_key": "..."``), by its own form
    (``hf_...``, ``AKIA...``, ``ghp_...``, ``Bearer ...``, a private key), or by its place in a
    URL. What is a secret and looks like any other word stays: nobody can know it.
    """
    if not _HINT.search(text):
        return text
    text = _KNOWN.sub(REDACTED, text)
    text = _URL.sub(rf"\1{REDACTED}@", text)
    text = _SCHEME.sub(rf"\1\2{REDACTED}", text)
    text = _VARIABLE.sub(_hidden, _ASSIGN.sub(_hidden, text))
    return _OPTION.sub(_hidden, text)


def _hidden(match: re.Match[str]) -> str:
    value = match[2]
    quote = value[0] if value[0] in "\"'" else ""
    end = quote if quote and len(value) > 1 and value.endswith(quote) else ""
    return f"{match[1]}{quote}{REDACTED}{end}"


Kept = TypeVar("Kept")
#: A private key in lines of its own.
_KEY_BEGINS, _KEY_ENDS = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----"), "-----END "
#: Characters of a text that is remembered with what became of it.
_REMEMBERED = 4096
#: The same texts come again and again: 10,000 ranks have one command line.
_redact = lru_cache(maxsize=65536)(redact)


def redacted(value: Kept) -> Kept:
    """The same value with `redact` applied to all texts in it: a dataclass, or plain data.

    The value of a key that names a secret goes whole. No text is longer than it was, or than
    `REDACTED`.
    """
    return _redacted(value)  # type: ignore[no-any-return]


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        found = _redact(value) if len(value) < _REMEMBERED else redact(value)
        return found[: max(len(value), len(REDACTED))]
    if isinstance(value, Mapping):
        return {
            _redacted(key): REDACTED
            if isinstance(one, str) and one and isinstance(key, str) and secret_name(key)
            else _redacted(one)
            for key, one in value.items()
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_redacted, value))
    if isinstance(value, (list, tuple)):
        return type(value)(_listed(value))
    if isinstance(value, frozenset):
        return frozenset(map(_redacted, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: _redacted(getattr(value, name)) for name in names}
        return dataclasses.replace(value, **changed)
    return value


def _listed(values: Iterable[Any]) -> Iterator[Any]:
    """The values of a list; of a private key in lines of its own, no line."""
    within = False
    for value in values:
        if isinstance(value, str):
            if within or _KEY_BEGINS.search(value):
                within = _KEY_ENDS not in value
                yield REDACTED
                continue
        else:
            within = False
        yield _redacted(value)
