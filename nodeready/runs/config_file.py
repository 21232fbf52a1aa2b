"""The configuration files; the user's file precedes the system's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nodeready.core.exit_codes import Refused
from nodeready.core.files import read_regular
from nodeready.core.text import sanitise
from nodeready.fleet.inventory import trust

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The table of the memory, which is of no command.
MEMORY = "memory"

SYSTEM = Path("/etc/nodeready/config.toml")


def user_file() -> Path:
    """``$XDG_CONFIG_HOME/nodeready/config.toml``, or under ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "nodeready" / "config.toml"


def paths() -> tuple[Path, Path]:
    """The system's file and the user's, in the order in which they are read."""
    return SYSTEM, user_file()


def refuse_unsafe(path: str | Path, prefix: str = "") -> None:
    """For root: raise Refused, with this prefix, for a path that another user can write."""
    if reason := trust.distrust(path, remedy=trust.SET_VARIABLE):
        raise Refused(f"{prefix}{reason}")


def refuse_strangers(name: str, *, trusted: bool) -> None:
    """Raises Refused for a file or directory of the current one, which nobody named, if another
    user could have written it. trusted: the user trusts every inventory
    """
    if not trusted and (reason := trust.distrust(name, authors=())):
        raise Refused(sanitise(reason))


def read(path: Path) -> dict[str, Any]:
    """The tables and keys of a file; none where it is missing. Raises Refused."""
    refuse_unsafe(path)
    try:
        data: dict[str, Any] = tomllib.loads(read_regular(path).decode("utf-8"))
        return data
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"{path}: {error}") from None


def option_name(path: Path, key: str, options: Iterable[str]) -> str:
    """The option of a key. Raises Refused, with the most similar option, for an unknown key."""
    name = key.replace("-", "_")
    if name not in options:
        from nodeready.core.settings import suggestion

        raise Refused(f"{path}: unknown option {key}: {suggestion(name, options)}")
    return name


def memory_settings() -> dict[str, str]:
    """The keys of ``[memory]`` in both files, then NODEREADY_MEMORY and NODEREADY_MEMORY_KEY, as
    texts. Raises Refused for a key that means nothing.
    """
    keys = ("file", "days", "megabytes")
    settings: dict[str, str] = {}
    for path in paths():
        table = read(path).get(MEMORY, {})
        settings |= {option_name(path, key, keys): str(value) for key, value in table.items()}
    for key, name in zip(keys, ("", "_DAYS", "_MEGABYTES"), strict=True):
        if value := os.environ.get(f"NODEREADY_MEMORY{name}"):
            settings[key] = value
    return settings
