"""Secrets are left out of texts and documents: by their name, by their form, by their place."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

#: What stands in the place of a secret.
LEFT_OUT = "(left out)"
# Words of a name, however they are joined: `apiKey`, `API_KEY`, `x-api-key`.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_STRONG = frozenset(
    (
        "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential",
        "credentials", "cred", "creds", "apikey", "authorization", "cookie", "cookies",
        "private", "accesskey", "secretkey", "privatekey", "sessionid", "bearer", "dsn",
        "connectionstring", "netrc", "pgpass", "pgpassword",
    )
)  # fmt: skip
#: Words that name a secret, or a tensor, a mask, a number: `key`, `max_token`, `auth`.
_WEAK = frozenset(
    (
        "key", "keys", "token", "auth", "authtoken", "jwt", "session", "signature", "salt",
        "pass", "pat", "pw", "webhook", "otp", "pin", "oauth", "sas",
    )
)  # fmt: skip
# Values that are no secret under a weak name: a number, True, None, an object without its text,
# or a list of such.
_PLAIN = re.compile(
    r"\s*(?:[-+]?[0-9][0-9.eE+-]*|True|False|true|false|None|<[^<>\"']*>|\[[-+0-9., eE]*\]?"
    r"|\([-+0-9., eE]*\)?|\{\}|\.\.\.|[\"']{2})\s*"
)
# The last word of a name whose value is a secret: HF_TOKEN, --api-key, db.password, WANDB_API_KEY.
# What training logs name (pad_token, num_tokens, token_id) is no secret, but for the first, which
# costs nothing.
_SECRET = (
    r"(?:token|secret|passwd|password|passphrase|pass|pw|credentials?|cookie|dsn|webhook"
    r"|authorization|auth|signature|sig|connection[_-]?string"
    r"|(?:api|access|secret|private|account|encryption|signing|ssh|auth|session|master|license"
    r"|wandb|comet|neptune|clearml|mlflow|hf|huggingface|openai|anthropic|aws|gcp|azure|s3|storage)"
    r"[_-]?key(?:[_-]?id)?|secret[_-]?access[_-]?key)"
)
_NAMED = (
    rf"(?:[A-Za-z0-9]+[_.-]){{0,12}}{_SECRET}|[A-Za-z]{{0,30}}(?:PASSWORD|Password|Token|ApiKey)"
)
_VALUE = (
    # What is left out already stays as it is.
    r"(?![\"']?(?:[A-Za-z]{5,9}\s{1,3})?\(left out\))"
    r"(?:\"(?:[^\"\\]|\\.){0,4000}\"?|'(?:[^'\\]|\\.){0,4000}'?|[^\s,;&)\]}\"']+)"
)
#: How tokens of vendors begin: the prefixes that gitleaks 8 and detect-secrets 1.5 know, by the
#: vendors' own pages. Behind one come 12 characters and more.
_PREFIXES = (
    # Models and experiments.
    *("hf_", "api_org_", "nvapi-", "sk-", "pplx-", "gsk_", "xai-", "r8_", "rpa_", "wandb_v1_"),
    *("lsv2_pt_", "lsv2_sk_", "pcsk_", "dapi"),
    # Code, packages, images.
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "gldt-", "glrt-", "glptt-"),
    *("glcbt-", "glft-", "glsoat-", "glagent-", "gloas-", "glimt-", "GR1348941", "ATATT3", "AKCp"),
    *("npm_", "pypi-", "rubygems_", "oy2", "dckr_pat_", "dckr_oat_", "sgp_", "PMAK-", "CLOJARS_"),
    # Clouds and what runs in them.
    *("AKIA", "ASIA", "ABIA", "ACCA", "AIza", "ya29.", "GOCSPX-", "LTAI", "amzn.mws.", "tskey-"),
    *("dop_v1_", "doo_v1_", "dor_v1_", "pscale_tkn_", "pscale_pw_", "pscale_oauth_"),
    *("hvs.", "hvb."),
    *("pul-", "nfp_", "ico-", "dp.pt.", "dp.st.", "ops_eyJ", "AGE-SECRET-KEY-1", "FlyV1 fm"),
    # Watching, mail, talk, money.
    *("glsa_", "glc_", "NRAK-", "NRJS-", "NRII-", "sntrys_", "sntryu_", "phc_", "phx_", "SG."),
    *("xkeysib-", "xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "xapp-"),
    *("lin_api_", "figd_", "ntn_", "sk_live_", "sk_test_", "rk_live_", "rk_test_", "whsec_"),
    *("shpat_", "shpca_", "shppa_", "shpss_", "sq0csp-", "sq0atp-", "EZAK", "EZTK", "duffel_"),
)


def _either(is_name: bool) -> str:
    prefixes = (prefix for prefix in _PREFIXES if prefix.endswith("_") == is_name)
    return "|".join(map(re.escape, prefixes))


_KNOWN = re.compile(
    # Where a prefix may begin the name of a function, letters and digits alone follow at first.
    rf"(?<![A-Za-z0-9])(?:(?:{_either(True)})[A-Za-z0-9]{{12}}|(?:{_either(False)})[\w.=-]{{12}})"
    r"[\w.=-]*"
    # A JSON Web Token; a hash of crypt(5), and of those that took on its form.
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?|hooks\.slack\.com/services/[\w/]+"
    r"|\$(?:[1567]|2[abxy]?|g?y|sm3|sha1|md5|apr1|argon2i?d?|scrypt|pbkdf2[\w-]{0,20})"
    r"\$[A-Za-z0-9./+=,$-]{8,}"
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

# Where a tool's password is a separate word, or the end of one: curl -u NAME:PASSWORD.
_ON = r"\b[^|;&\n]{0,400}?[ \t]"

_TOOLS = (
    rf"(?:sshpass|(?:docker|podman|helm) login|mongo\w{{0,9}}){_ON}-p[ \t]*",
    rf"(?:mysql|mariadb)\w{{0,9}}{_ON}-p(?=\S)",
    rf"redis-cli{_ON}-a[ \t]+",
    rf"ldap[a-z]{{2,9}}{_ON}-w[ \t]+",
    rf"curl{_ON}(?:-[uU]|--(?:proxy-)?user)[ \t=]*[\"']?[^\s:\"']{{1,100}}:",
    rf"openssl{_ON}-pass(?:in|out)?[ \t]+pass:",
)

_TOOL = re.compile(rf"(?<![\w.-])({'|'.join(_TOOLS)})({_VALUE})")

# A text without one of these has no secret by its form, and without a hint none by its place: most
# have none, and this is quick.
_MARKS = (*_PREFIXES, "eyJ", "$", "hooks.slack", "-----BEGIN")

_HINT = re.compile(
    r"(?i)tok|secr|pass|pw|_pat|cred|cook|dsn|hook|auth|sig|conn|key|bearer|basic|negot|://"
    r"|curl|mysql|mariadb|redis-cli|ldap|mongo|login|openssl"
)

# A long word of letters and digits without any structure: a hexadecimal or base64 key.
_RANDOM = re.compile(
    r"(?<![A-Za-z0-9+/_.-])(?=[A-Za-z+]*[0-9])(?=[0-9+]*[A-Za-z])[A-Za-z0-9+]{32,}={0,2}"
)


def is_secret(name: str, value: str) -> bool:
    """Whether a value is left out for its name alone: `api_key`, `HF_TOKEN`, `password`."""
    words = [word.lower() for word in _WORD.findall(name[-200:])]
    joined = {"".join(pair) for pair in zip(words, words[1:])}
    if _STRONG & {*words, *joined}:
        return not _PLAIN.fullmatch(value) or bool(re.search(r"[0-9]", value))
    return bool(_WEAK.intersection(words)) and not _PLAIN.fullmatch(value)


def redact(name: str, value: str) -> str:
    """The value without what must not be shown.

    name: of a variable, an attribute, an option; "": the value is a text, such as a line of a log
          or a command line. There a word of letters and digits may be a commit or a function, and
          only what is a secret by its name, by its form, or by its place in a URL is left out
    """
    if name and is_secret(name, value):
        return LEFT_OUT
    if any(mark in value for mark in _MARKS):
        value = _KNOWN.sub(LEFT_OUT, value)
    if _HINT.search(value):
        value = _URL.sub(rf"\1{LEFT_OUT}@", value)
        value = _SCHEME.sub(rf"\1\2{LEFT_OUT}", value)
        value = _VARIABLE.sub(_hidden, _ASSIGN.sub(_hidden, value))
        value = _TOOL.sub(_hidden, _OPTION.sub(_hidden, value))
    return _RANDOM.sub(LEFT_OUT, value) if name else value


def _hidden(match: re.Match[str]) -> str:
    value = match[2]
    quote = value[0] if value[0] in "\"'" else ""
    end = quote if quote and len(value) > 1 and value.endswith(quote) else ""
    return f"{match[1]}{quote}{LEFT_OUT}{end}"


Kept = TypeVar("Kept")

#: The first and the last line of a private key.
_KEY_BEGINS, _KEY_ENDS = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----"), "-----END "

#: Characters of a text that is remembered with what became of it.
_REMEMBERED = 4096

#: The same texts come again and again: 10,000 ranks have one command line.
_redact = lru_cache(maxsize=65536)(partial(redact, ""))


def redacted(value: Kept) -> Kept:
    """The same value with `redact` applied to all texts in it: a dataclass, or plain data.

    The value of a key that names a secret goes whole. No text is longer than it was, or than
    `LEFT_OUT`.
    """
    return _redacted(value)  # type: ignore[no-any-return]


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        safe = _redact(value) if len(value) < _REMEMBERED else redact("", value)
        return safe[: max(len(value), len(LEFT_OUT))]
    if isinstance(value, Mapping):
        return {
            _redacted(key): LEFT_OUT
            if isinstance(item, str) and item and isinstance(key, str) and is_secret(key, item)
            else _redacted(item)
            for key, item in value.items()
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
    """The values of a list; the lines of a private key are left out."""
    within = False
    for value in values:
        if isinstance(value, str):
            if within or _KEY_BEGINS.search(value):
                within = _KEY_ENDS not in value
                yield LEFT_OUT
                continue
        else:
            within = False
        yield _redacted(value)
