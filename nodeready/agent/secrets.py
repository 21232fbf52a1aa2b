"""Remove secrets from texts and documents, by their name, their form and their place."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

LEFT_OUT = "(left out)"  # the replacement of a secret
# The words of a name in any style: `apiKey`, `API_KEY`, `x-api-key`.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_STRONG = {
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials",
    "cred", "creds", "apikey", "authorization", "cookie", "cookies", "private", "accesskey",
    "secretkey", "privatekey", "sessionid", "bearer", "dsn", "connectionstring", "netrc", "pgpass",
    "pgpassword",
}  # fmt: skip
#: Words that may name a secret, or a tensor, a mask or a number: `key`, `max_token`, `auth`.
_WEAK = {
    "key", "keys", "token", "auth", "authtoken", "jwt", "session", "signature", "salt", "pass",
    "pat", "pw", "webhook", "otp", "pin", "oauth", "sas",
}  # fmt: skip
# Values that are no secret under a weak name: a number, True, None, an object without its text,
# or a list of these.
_PLAIN = re.compile(
    r"\s*(?:[-+]?[0-9][0-9.eE+-]*|True|False|true|false|None|<[^<>\"']*>|\[[-+0-9., eE]*\]?"
    r"|\([-+0-9., eE]*\)?|\{\}|\.\.\.|[\"']{2})\s*"
)
# The last word of a name whose value is a secret: HF_TOKEN, --api-key, db.password, WANDB_API_KEY.
# Names in training logs such as num_tokens and token_id are no secrets. pad_token is taken for
# one, which is harmless.
_SECRET = (
    r"(?:token|secret|passwd|password|passphrase|pass|pw|credentials?|cookie|dsn|webhook"
    r"|authorization|auth|signature|sig|connection[_-]?string"
    r"|(?:api|access|secret|private|account|encryption|signing|ssh|auth|session|master|license"
    r"|wandb|comet|neptune|clearml|mlflow|hf|huggingface|openai|anthropic|aws|gcp|azure|s3|storage)"
    r"[_-]?key(?:[_-]?id)?|secret[_-]?access[_-]?key)"
)
_SECRET_NAME = (
    rf"(?:[A-Za-z0-9]+[_.-]){{0,12}}{_SECRET}|[A-Za-z]{{0,30}}(?:PASSWORD|Password|Token|ApiKey)"
)
_VALUE = (
    # A value that is already replaced is not replaced again.
    r"(?![\"']?(?:[A-Za-z]{5,9}\s{1,3})?\(left out\))"
    r"(?:\"(?:[^\"\\]|\\.){0,4000}\"?|'(?:[^'\\]|\\.){0,4000}'?|[^\s,;&)\]}\"']+)"
)
#: Prefixes of the vendors' tokens, from gitleaks 8, detect-secrets 1.5 and the vendors' pages. At
#: least 12 characters follow a prefix.
_PREFIXES = (
    # Models and experiments.
    *("hf_", "api_org_", "nvapi-", "sk-", "pplx-", "gsk_", "xai-", "r8_", "rpa_", "wandb_v1_"),
    *("lsv2_pt_", "lsv2_sk_", "pcsk_", "dapi"),
    # Code, packages, images.
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "gldt-", "glrt-", "glptt-"),
    *("glcbt-", "glft-", "glsoat-", "glagent-", "gloas-", "glimt-", "GR1348941", "ATATT3", "AKCp"),
    *("npm_", "pypi-", "rubygems_", "oy2", "dckr_pat_", "dckr_oat_", "sgp_", "PMAK-", "CLOJARS_"),
    # Clouds and their services.
    *("AKIA", "ASIA", "ABIA", "ACCA", "AIza", "ya29.", "GOCSPX-", "LTAI", "amzn.mws.", "tskey-"),
    *("dop_v1_", "doo_v1_", "dor_v1_", "pscale_tkn_", "pscale_pw_", "pscale_oauth_"),
    *("hvs.", "hvb."),
    *("pul-", "nfp_", "ico-", "dp.pt.", "dp.st.", "ops_eyJ", "AGE-SECRET-KEY-1", "FlyV1 fm"),
    # Monitoring, mail, chat, payment.
    *("glsa_", "glc_", "NRAK-", "NRJS-", "NRII-", "sntrys_", "sntryu_", "phc_", "phx_", "SG."),
    *("xkeysib-", "xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "xapp-"),
    *("lin_api_", "figd_", "ntn_", "sk_live_", "sk_test_", "rk_live_", "rk_test_", "whsec_"),
    *("shpat_", "shpca_", "shppa_", "shpss_", "sq0csp-", "sq0atp-", "EZAK", "EZTK", "duffel_"),
)


def _either(is_name: bool) -> str:
    """The expression for the prefixes that can begin a name (they end in ``_``), or cannot."""
    prefixes = (prefix for prefix in _PREFIXES if prefix.endswith("_") == is_name)
    return "|".join(map(re.escape, prefixes))


_KNOWN = re.compile(
    # After a prefix that a function's name may have, the first characters are letters and digits.
    rf"(?<![A-Za-z0-9])(?:(?:{_either(True)})[A-Za-z0-9]{{12}}|(?:{_either(False)})[\w.=-]{{12}})"
    r"[\w.=-]*"
    # A JSON Web Token; a hash of crypt(5), and hashes of the same form.
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?|hooks\.slack\.com/services/[\w/]+"
    r"|\$(?:[1567]|2[abxy]?|g?y|sm3|sha1|md5|apr1|argon2i?d?|scrypt|pbkdf2[\w-]{0,20})"
    r"\$[A-Za-z0-9./+=,$-]{8,}"
    # A private key, up to its end or the end of the text.
    r"|-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)

_SCHEME = re.compile(r"(?i)\b(bearer|basic|negotiate)([ \t]+|%20)([A-Za-z0-9._~+/=-]{6,})")

# scheme://user:password@host, and a token alone before the @.
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^\s/?#@'\"]{1,4000}@")

_OPTION = re.compile(rf"(?i)(?<![\w-])(--?(?:[A-Za-z0-9]+[_-]){{0,12}}{_SECRET}[ \t]+)({_VALUE})")

_ASSIGN = re.compile(
    rf"(?i)(?<![A-Za-z0-9])((?:{_SECRET_NAME})[\"']?\s{{0,3}}(?:=|:)\s{{0,3}}"
    rf"(?:(?:bearer|basic|token)\s{{1,3}})?)({_VALUE})"
)

# Variables: only there, a name that ends in _KEY is always a secret.
_VARIABLE = re.compile(
    rf"(?<![A-Za-z0-9_])([A-Z][A-Z0-9_]{{0,60}}_(?:KEY|PAT|PWD|CREDS?)=)({_VALUE})"
)

# Tools whose password is a separate word, or the end of a word: curl -u NAME:PASSWORD.
_OPTIONS_BEFORE = r"\b[^|;&\n]{0,400}?[ \t]"

_TOOLS = (
    rf"(?:sshpass|(?:docker|podman|helm) login|mongo\w{{0,9}}){_OPTIONS_BEFORE}-p[ \t]*",
    rf"(?:mysql|mariadb)\w{{0,9}}{_OPTIONS_BEFORE}-p(?=\S)",
    rf"redis-cli{_OPTIONS_BEFORE}-a[ \t]+",
    rf"ldap[a-z]{{2,9}}{_OPTIONS_BEFORE}-w[ \t]+",
    rf"curl{_OPTIONS_BEFORE}(?:-[uU]|--(?:proxy-)?user)[ \t=]*[\"']?[^\s:\"']{{1,100}}:",
    rf"openssl{_OPTIONS_BEFORE}-pass(?:in|out)?[ \t]+pass:",
)

_TOOL = re.compile(rf"(?<![\w.-])({'|'.join(_TOOLS)})({_VALUE})")

# A text without a mark has no secret by its form, and a text without a hint has none by its place.
# Most texts have neither, so this test is fast.
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
    """Whether a value is a secret by its name: `api_key`, `HF_TOKEN`, `password`."""
    words = [word.lower() for word in _WORD.findall(name[-200:])]
    joined = {"".join(pair) for pair in zip(words, words[1:])}
    if _STRONG & {*words, *joined}:
        return not _PLAIN.fullmatch(value) or bool(re.search(r"[0-9]", value))
    return bool(_WEAK.intersection(words)) and not _PLAIN.fullmatch(value)


def redact(name: str, value: str) -> str:
    """The value without secrets.
    name: of a variable, an attribute or an option; "": the value is a text, such as a log's line
          or a command line. There a long word of letters and digits may be a commit or a
          function, so only secrets by their name, form or place are removed
    """
    if name and is_secret(name, value):
        return LEFT_OUT
    if any(mark in value for mark in _MARKS):
        value = _KNOWN.sub(LEFT_OUT, value)
    if _HINT.search(value):
        value = _URL.sub(rf"\1{LEFT_OUT}@", value)
        value = _SCHEME.sub(rf"\1\2{LEFT_OUT}", value)
        value = _VARIABLE.sub(_replace, _ASSIGN.sub(_replace, value))
        value = _TOOL.sub(_replace, _OPTION.sub(_replace, value))
    return _RANDOM.sub(LEFT_OUT, value) if name else value


def _replace(match: re.Match[str]) -> str:
    value = match[2]
    quote = value[0] if value[0] in "\"'" else ""
    end = quote if quote and len(value) > 1 and value.endswith(quote) else ""
    return f"{match[1]}{quote}{LEFT_OUT}{end}"


Value = TypeVar("Value")

#: The first and the last line of a private key.
_KEY_BEGINS, _KEY_ENDS = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----"), "-----END "

_MAX_CACHED = 4096  # maximum characters of a text whose result is cached

_redact = lru_cache(maxsize=65536)(partial(redact, ""))  # 10,000 ranks have one command line


def redacted(value: Value) -> Value:
    """The same value with `redact` applied to all texts in it: a dataclass, or plain data.

    A value whose key names a secret is replaced. No text gets longer than it was, or `LEFT_OUT`.
    """
    return _redacted(value)  # type: ignore[no-any-return]


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        safe = _redact(value) if len(value) < _MAX_CACHED else redact("", value)
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
        return type(value)(_without_private_keys(value))
    if isinstance(value, frozenset):
        return frozenset(map(_redacted, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: _redacted(getattr(value, name)) for name in names}
        return dataclasses.replace(value, **changed)
    return value


def _without_private_keys(values: Iterable[Any]) -> Iterator[Any]:
    """The values of a list without the lines of a private key."""
    is_in_key = False
    for value in values:
        if isinstance(value, str):
            if is_in_key or _KEY_BEGINS.search(value):
                is_in_key = _KEY_ENDS not in value
                yield LEFT_OUT
                continue
        else:
            is_in_key = False
        yield _redacted(value)
