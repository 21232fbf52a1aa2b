"""The files that we own on a node, rendered from templates/SUBJECT/NAME.j2.

The templates of a plugin's subject are in the folder of that name in its package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined

from nodeready.subjects import plugins


def _loaders() -> Iterator[BaseLoader]:
    yield PackageLoader("nodeready", "templates")
    for plugin in plugins.installed():
        # Raises ValueError where the package has no templates.
        with suppress(ValueError):
            yield PackageLoader(plugin.package, "templates")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    # Nothing is escaped: the files are configuration, not HTML, and every value was validated.
    return Environment(
        loader=ChoiceLoader([*_loaders()]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )


def render(template: str, **values: Any) -> bytes:
    """The bytes of a file from its template. Raises jinja2.UndefinedError."""
    return _environment().get_template(template).render(**values).encode()
