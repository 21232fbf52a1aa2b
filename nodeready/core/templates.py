"""The files that we own on a node, rendered from templates/SUBJECT/NAME.j2."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def _environment() -> Any:
    # Imported late: a help text needs no templates.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Nothing is escaped: the files are configuration, not HTML, and every value was validated.
    return Environment(
        loader=PackageLoader("nodeready", "templates"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )


def render(template: str, **values: Any) -> bytes:
    """The bytes of a file from its template. Raises jinja2.UndefinedError."""
    text: str = _environment().get_template(template).render(**values)
    return text.encode()
