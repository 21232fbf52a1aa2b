"""What must not leave a process: secrets in variables, environments and lines, left out.

One rule for whatever shows a job's own values: its variables, its environment, what a core holds.
It knows a secret by its name, and by what it looks like where the name says nothing. It would
rather leave out a harmless value than show a secret.
"""

from __future__ import annotations

import re

#: What stands in the place of a secret.
LEFT_OUT = "(left out)"

# Words of a name, however they are joined: `apiKey`, `API_KEY`, `x-api-key`.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_STRONG = frozenset(
    [
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "cred",
        "creds",
        "apikey",
        "authorization",
        "cookie",
        "cookies",
        "private",
        "accesskey",
        "secretkey",
        "privatekey",
        "sessionid",
        "bearer",
        "dsn",
        "connectionstring",
        "netrc",
        "pgpass",
        "pgpassword",
    ]
)
#: Words that name a secret, or a tensor, a mask, a number: `key`, `max_token`, `auth`.
_WEAK = frozenset(
    [
        "key",
        "keys",
        "token",
        "auth",
        "authtoken",
        "jwt",
        "session",
        "signature",
        "salt",
        "otp",
        "pin",
        "oauth",
        "sas",
    ]
)
# What is no secret whatever its weak name says: a number, True, None, an object without its text,
# or a list of such.
_PLAIN = re.compile(
    r"\s*(?:[-+]?[0-9][0-9.eE+-]*|True|False|true|false|None|<[^<>\"']*>|\[[-+0-9., eE]*\]?"
    r"|\([-+0-9., eE]*\)?|\{\}|\.\.\.|[\"']{2})\s*"
)
# Where a value begins within a text: `"api_key": "`, `password=`, `--token `, `Authorization: `.
_PAIR = re.compile(
    r"(?P<name>[A-Za-z][A-Za-z0-9_.-]{0,60})(?P<joint>[\"']?\s{0,3}(?:[:=]|=>)\s{0,3})"
    r"(?P<value>(?:Bearer|Basic|Token)\s+[^\s\"',;]+|\"(?:[^\"\\]|\\.){0,2000}(?:\"|$)"
    r"|'(?:[^'\\]|\\.){0,2000}(?:'|$)|[^\s,;&\"'\]\)}]{1,2000})"
)
_OPTION = re.compile(r"(?P<name>--?[A-Za-z][A-Za-z0-9_-]{1,60})(?P<joint>\s+)(?P<value>[^\s-]\S*)")
#: What is a secret by its form: keys and tokens of services (their documented prefixes), a private
#: key, a JSON web token, the user's part of a URL, `Bearer ...`.
_FORMS = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}|\b(?:ghp|gho|ghu|ghs|ghr|github_pat|glpat|hf|xox[abeoprs]"
    r"|sk|pk|rk|npm|pypi|dckr_pat|wandb|nvapi|AIza|ya29|SG|shpat|lin_api)[_.-][A-Za-z0-9_.-]{12,}"
    r"|\bAIza[0-9A-Za-z_-]{30,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){0,2}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|\b(?:Bearer|Basic)\s+[A-Za-z0-9+/=_.~-]{8,}"
)
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]{1,20}://)[^/\s@\"']{1,200}@", re.I)
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

    name: of a variable, an attribute, an option; "": the value is a line of text
    """
    if name and is_secret(name, value):
        return LEFT_OUT

    value = _FORMS.sub(LEFT_OUT, value)
    value = _URL.sub(rf"\g<scheme>{LEFT_OUT}@", value)
    value = _without(_OPTION, _without(_PAIR, value))
    return _RANDOM.sub(LEFT_OUT, value)


def _without(pairs: re.Pattern[str], text: str) -> str:
    """The text without the values of the secret names in it."""
    kept, at = [], 0
    while found := pairs.search(text, at):
        begin = found.start("value")
        kept.append(text[at:begin])
        at = begin
        # What is none may begin with a name itself: `wandb: password=...`.
        if is_secret(found["name"], found["value"]):
            kept.append(LEFT_OUT)
            at = found.end()
    return "".join(kept) + text[at:]
