"""Turn group_data into a Policy, or into errors that say which file, which key and what to do.

Pure: a mapping goes in, a Policy or a PolicyError comes out. Nothing is contacted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, fields
from typing import Any

from nodeready.policy.fields import Invalid, Kind, shown
from nodeready.policy.policy import Policy

#: The first words of our settings: an unknown key that begins with one of them is misspelt.
_PREFIXES = (
    "ptrace_", "core_", "limit_", "pdshrc_", "ssh_client_", "iommu_", "py_spy_", "gpu_", "xid_",
    "rdma_", "gate_",
)  # fmt: skip
_FIELDS: dict[str, Field[Any]] = {f.name: f for f in fields(Policy)}


class PolicyError(ValueError):
    """A policy that cannot be used. Each of ``problems`` is one line: file, key, meaning."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


#: Characters of the reason why a value is wrong: it may name a part of the value.
_WHY = 600


def kind_of(key: str) -> Kind:
    """What the setting of this name may be. Raises KeyError when there is none."""
    kind: Kind = _FIELDS[key].metadata["kind"]
    return kind


def reason(key: str) -> str:
    """What the setting of this name is for. Raises KeyError when there is none."""
    return str(_FIELDS[key].metadata["reason"])


def _misspelt(key: str) -> str:
    """What an unknown ``key`` of ours was probably meant to be; "" for somebody else's key."""
    import difflib

    close = difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.85)
    if close:
        return f"did you mean {close[0]}?"
    if key.startswith(_PREFIXES):
        ours = [name for name in _FIELDS if name.split("_")[0] == key.split("_", maxsplit=1)[0]]
        return "the settings are " + ", ".join(ours)
    return ""


def shown_key(key: str) -> str:
    """An unknown setting for a message: as it is, or like a wrong value."""
    return key if key.isprintable() and len(key) <= 60 else shown(key)


def check_settings(
    data: Mapping[str, Any], where: str, foreign: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The validated settings among ``data``; other people's keys are left out.

    where:   the file or other origin, for the error text
    foreign: keys that belong to pyinfra, never taken for a misspelt one of ours
    Raises PolicyError with every problem of this origin.
    """
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in data.items():
        if key in _FIELDS:
            try:
                settings[key] = kind_of(key).check(value)
            except Invalid as wrong:
                why = str(wrong)
                why = why if len(why) <= _WHY else f"{why[: _WHY - 3]}..."
                problems.append(f"{where}: {key} = {shown(value)}: {why}")
        elif isinstance(key, str) and not key.startswith("_") and key not in foreign:
            meant = _misspelt(key)
            if meant:
                problems.append(f"{where}: unknown setting {shown_key(key)}: {meant}")
    if problems:
        raise PolicyError(problems)
    return settings


def make_policy(data: Mapping[str, Any], where: str = "policy") -> Policy:
    """The Policy that ``data`` declares; settings that it does not name keep their default."""
    return Policy(**check_settings(data, where))


def as_data(policy: Policy) -> dict[str, Any]:
    """All settings as group_data, or JSON, holds them. `make_policy` is the way back."""
    return {name: kind_of(name).plain(vars(policy)[name]) for name in _FIELDS}


def digest(policies: Iterable[Policy]) -> str:
    """A short name for a set of policies, whatever their order: equal policies, equal names.

    A report says by which policies it judged, and a kept verdict holds for no other policy.
    """
    texts = {json.dumps(asdict(policy), sort_keys=True) for policy in set(policies)}
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]
