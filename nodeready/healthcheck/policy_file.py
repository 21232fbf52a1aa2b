"""The policy on the node: a given file, the site's file, the bundle's, and then the defaults.

Each file is a JSON object with the keys of group_data; the first file that has a key counts.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any

from nodeready.policy import Policy
from nodeready.policy.fields import closest
from nodeready.policy.load import PolicyError, check_settings, shown_key

#: The site's policy on this node.
PATH = "/etc/nodeready/policy.json"
#: Where the bundle has its policy, beside this module.
EMBEDDED = "policy.json"


def load(given: str | None = None) -> Policy:
    """The policy of this node: of ``given`` (a file), PATH, the bundle, or the defaults.

    Raises PolicyError, a line per problem, also when ``given`` is not there.
    """
    settings = _settings(_embedded(), "the bundle's policy")
    site = _read(PATH, missing=None)
    if site is not None:
        settings.update(_settings(site, PATH))
    if given is not None:
        settings.update(_settings(_read(given), given))
    return Policy(**settings)


def _embedded() -> bytes:
    path = os.path.join(os.path.dirname(__file__), EMBEDDED)
    try:
        data: bytes = globals()["__loader__"].get_data(path)
    except OSError:
        return b"{}"
    return data


def _read(path: str, missing: str | None = "there is no such file") -> Any:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        if missing is None:
            return None
        raise PolicyError([f"{path}: {missing}"]) from None
    except OSError as error:
        raise PolicyError([f"{path}: {error.strerror}"]) from None


def _settings(text: bytes, where: str) -> dict[str, Any]:
    """The settings of one JSON text. Raises PolicyError, also for a key that is no setting."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError([f"{where}: is no JSON: {error}"]) from None
    if not isinstance(data, dict):
        raise PolicyError([f"{where}: must be a JSON object: {{'ptrace_scope': 0}}"])
    names = [field.name for field in fields(Policy)]
    problems = []
    for key in data.keys() - set(names):
        close = closest(key, names)
        meant = f"did you mean {close}?" if close else "there is no such setting"
        problems.append(f"{where}: unknown setting {shown_key(key)}: {meant}")
    try:
        found = check_settings({key: data[key] for key in names if key in data}, where)
    except PolicyError as error:
        problems += error.problems
    if problems:
        raise PolicyError(sorted(problems))
    return found
