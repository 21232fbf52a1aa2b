"""Defaults from files: the user's wins over the system's, a flag or variable over both."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nodeready.cli.exits import Refused
from nodeready.policy.spelling import closest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SYSTEM = Path("/etc/nodeready/config.toml")

_COMMON = ("limit", "sudo", "ssh_user", "ssh_key", "color", "quiet", "verbose")
#: command -> the options that a file may set
OPTIONS: dict[str, tuple[str, ...]] = {
    "audit": (*_COMMON, "format", "output", "only", "skip", "fail_on", "timeout"),
    "ready": (
        *_COMMON,
        *("local", "format", "output", "only", "skip", "budget", "user", "ports", "gpus"),
        *("nodes_needed", "hostfile_out", "hostfile_format", "full_mesh"),
    ),
    "stacks": (
        *_COMMON,
        *("local", "source", "job", "pids", "match", "native", "all_threads", "samples"),
        *("interval", "via", "timeout", "output", "format"),
    ),
    "cores": (*_COMMON, "local", "format", "output", "since", "job", "pid", "yes"),
    "bundle": ("limit", "output"),
    "env": (*_COMMON, "format", "output", "ports"),
    "tail": (
        *_COMMON,
        *("local", "format", "output", "lines", "grep", "newer", "since", "max_files"),
    ),
    "learn": (*_COMMON, "output", "force"),
    "deploy": (*_COMMON, "format", "only", "check", "diff", "yes"),
}


def user_file() -> Path:
    """``$XDG_CONFIG_HOME/nodeready/config.toml``, or under ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "nodeready" / "config.toml"


def defaults() -> dict[str, dict[str, Any]]:
    """click's default map: per command the option values of both files.

    Top-level keys are options of all commands (``limit = "gpu[001-064]"``), a table is one
    command's (``[deploy]``). Raises Refused for a file that cannot be used.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in OPTIONS}
    for path in (SYSTEM, user_file()):
        data = _read(path)
        tables = {key: value for key, value in data.items() if isinstance(value, dict)}
        for key, value in data.items():
            if key not in tables:
                name = _name(path, key, _COMMON)
                for options in found.values():
                    options[name] = _value(value)
        for command, table in tables.items():
            if command not in OPTIONS:
                raise Refused(f"{path}: [{command}] is no command of nodeready")
            for key, value in table.items():
                found[command][_name(path, key, OPTIONS[command])] = _value(value)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return data
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"{path}: {error}") from None


def _name(path: Path, key: str, known: tuple[str, ...]) -> str:
    name = key.replace("-", "_")
    if name not in known:
        close = closest(name, known)
        advice = f"did you mean {close}?" if close else f"there are {', '.join(known)}"
        raise Refused(f"{path}: unknown option {key}: {advice}")
    return name


def _value(value: Any) -> Any:
    """A list stands for the comma-separated words of the command line."""
    return ",".join(map(str, value)) if isinstance(value, list) else value
