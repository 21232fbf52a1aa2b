"""nvidia-smi's XML: made safe to read, and its values, any of which may be missing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xml.etree import ElementTree

#: What stands in the place of a value that there is not, with or without brackets.
NOTHING = (
    "",
    "n/a",
    "none",
    "not supported",
    "not found",
    "unknown error",
    "err!",
    "gpu is lost",
    "gpu requires reset",
    "requested functionality has been deprecated",
    "insufficient permissions",
)
_SWITCH = {"enabled": "on", "disabled": "off"}


class Element:
    """An element of the XML whose values may be missing, in any part of the path."""

    def __init__(self, node: ElementTree.Element) -> None:
        self.node = node

    def text(self, *paths: str) -> str | None:
        """The text of the first path that has one; None for N/A and the like."""
        for path in paths:
            text = (self.node.findtext(path) or "").strip()
            if text.lower().strip("[]") not in NOTHING:
                return text[:200]
        return None

    def number(self, *paths: str) -> int | None:
        """The whole number with which the text begins, without its unit."""
        match = re.match(r"(-?[0-9]{1,15})(?![0-9])", self.text(*paths) or "")
        return int(match[1]) if match else None

    def switch(self, *paths: str) -> str | None:
        return _SWITCH.get((self.text(*paths) or "").lower())

    def flag(self, *paths: str) -> bool | None:
        """Yes or no; True when one of the paths says yes."""
        said = [(self.text(path) or "").lower() for path in paths]
        return True if "yes" in said else False if "no" in said else None

    def total(self, path: str, word: str, old: str) -> int | None:
        """The sum of the counters below ``path`` with ``word`` in their name.

        Schemas before v11, and boards before Ampere, count below ``old`` with a total.
        """
        below = self.node.find(path)
        if below is None:
            return None
        here = Element(below)
        names = [child.tag for child in below if re.search(rf"(^|_){word}(_|$)", child.tag)]
        found = [value for name in names if (value := here.number(name)) is not None]
        total = here.number(f"{old}/total")
        found += [total] if total is not None else []
        return sum(found) if found else None


def _escaped(line: str) -> str:
    """A process can name itself what it likes: its name must not break the XML."""
    start, end = line.find("<process_name>"), line.rfind("</process_name>")
    if start < 0 or end < start:
        return line
    import html

    start += len("<process_name>")
    return line[:start] + html.escape(html.unescape(line[start:end])) + line[end:]


def tree(text: str) -> ElementTree.Element | None:
    """The XML of the answer, or None when there is none that is whole.

    What stands before the root is left out, the DOCTYPE too: so no DTD is read, no entity can be
    declared, and one that is used is an error.
    """
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < start:
        return None
    body = text[start : end + len("</nvidia_smi_log>")]
    clean = re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]", "\ufffd", body)
    lines = "\n".join(
        _escaped(line) if "<process_name>" in line else line for line in clean.split("\n")
    )
    # Most nodes that look at themselves have no XML to read, and the parser takes a while to load.
    from xml.etree import ElementTree

    try:
        return ElementTree.fromstring(lines)
    except (ElementTree.ParseError, ValueError):
        return None
