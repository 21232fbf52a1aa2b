"""The node's own program as one file: a zip that Python runs, with the modules that a node needs.

The same modules and the same policy make the same bytes, on every machine: nothing is compressed,
because compressors differ, and nothing is compiled, because Pythons do.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from nodeready.agent import payload
from nodeready.core.policy import Policy, as_data

_PACKAGE = Path(__file__).parents[2]
#: Packages that are included whole: their modules are imported by name.
_WHOLE_PACKAGES = ("agent/gate", "agent/proofs")
#: The formats with `on_node` in nodeready.reports.registry, which imports them by name.
_REPORTS = ("audit_table", "json_report", "monitoring")
#: The supervisor of a rank, which agent/gate/__main__.py starts.
_SUPERVISOR = "nodeready.agent.run"
#: Never called on a node: it folds the names of many nodes.
_LEFT_OUT = ("nodeready.fleet.inventory.nodeset",)
_SHEBANG = b"#!/usr/bin/env python3\n"
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can hold


def modules() -> dict[str, str]:
    """Module that runs on a node -> its source: the commands, and the modules that they import."""
    roots = (
        f"nodeready.{package.replace('/', '.')}.{path.stem}"
        for package in _WHOLE_PACKAGES
        for path in (_PACKAGE / package).glob("*.py")
        if path.stem not in ("__init__", "__main__")
    )
    reports = (f"nodeready.reports.{name}" for name in _REPORTS)
    programs = (*roots, *reports, _SUPERVISOR)
    return payload.closure(programs, _LEFT_OUT)


def _entries(policy: Policy | None) -> Iterator[tuple[str, bytes]]:
    """Path in the zip -> content."""
    yield "__main__.py", (_PACKAGE / "agent" / "gate" / "__main__.py").read_bytes()
    for name, source in modules().items():
        ending = "/__init__.py" if payload.is_package(name) else ".py"
        yield name.replace(".", "/") + ending, source.encode()
    for path in (_PACKAGE / "sh").glob("*.sh"):
        yield path.relative_to(_PACKAGE.parent).as_posix(), path.read_bytes()
    if policy is not None:
        text = json.dumps(as_data(policy), indent=1, sort_keys=True) + "\n"
        yield "nodeready/agent/gate/policy.json", text.encode()


def build(policy: Policy | None = None) -> bytes:
    """The program's bytes. policy: by which it judges; None: the defaults"""
    archive = io.BytesIO(_SHEBANG)
    archive.seek(0, io.SEEK_END)
    with zipfile.ZipFile(archive, "w") as zipped:
        for name, content in sorted(_entries(policy)):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            zipped.writestr(entry, content)
    return archive.getvalue()


@lru_cache(maxsize=1)
def program() -> bytes:
    """The program without a policy: the same for all nodes, whose gate has the policy's file.

    Made once: every node's plan asks for its digest.
    """
    return build()
