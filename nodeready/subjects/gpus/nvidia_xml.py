"""Read nvidia-smi's XML safely, and its values, each of which may be missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from xml.etree import ElementTree


#: The words for a value that the device does not have (nvidia-smi(1)), with or without brackets.
ABSENT = ("n/a", "not supported")
#: The word in the place of a value that this driver shows under another name, or no longer.
_MOVED = "requested functionality has been deprecated"
#: Words in the place of any value that report a fault of the device or its driver
#: (nvmlErrorString). A missing permission is the caller's fault, and is not among them.
BROKEN = (
    "unknown error",
    "err!",
    "timeout",
    "inforom is corrupted",
    "driver/library version mismatch",
    "gpu access blocked by the operating system",
)

#: The words that are an error in the place of any value: none of them is a name.
ERRORS = (
    *BROKEN,
    "unknown",
    "error",
    "not found",
    "no data",
    "insufficient permissions",
    "gpu is lost",
    "gpu requires reset",
    "reset required",
    "function not found",
)

#: Introduced in an unknown driver release: absence means unsupported.
ANY_DRIVER = 10**6
SWITCH = {"enabled": "on", "disabled": "off"}
YES = {"yes": True, "no": False}
ACTIVE = {"active": True, "not active": False}
# A count with its unit: 31 C, 16x, 2560 bank(s), 700.00 W.
_NUMBER = re.compile(r"(-?[0-9]{1,15})(?:\.[0-9]{1,9})?(?: ?(?:C|x|W|MiB|(?:bank|group)\(s\)))?")
T = TypeVar("T")


def plain_word(text: str) -> str:
    return text.strip().lower().strip("[]")


def number(text: str) -> int | None:
    """The whole number of a count or a measure; None for any other text."""
    match = _NUMBER.fullmatch(text)
    return int(match[1]) if match else None


#: No counter is as high as this: all ones of 32 bits and more are the print of -1.
_MOST = (1 << 32) - 1
#: Lanes of a PCIe link (0: the tool's word for none), and its generations; the range of a chip's
#: sensor in C, and that of T.Limit. An unreadable register is all ones: 255, 65535, -1.
LANES = range(33)
GENERATIONS = range(8)
DEGREES = range(-60, 200)
DEGREES_LEFT = range(-200, 200)


def count(text: str) -> int | None:
    """A number of things; None for less than none, and for all ones."""
    return _among(range(_MOST))(text)


def _among(values: Container[int]) -> Callable[[str], int | None]:
    """The reader of a number that is one of these."""

    def read(text: str) -> int | None:
        parsed = number(text)
        # Python would search a range for None number by number.
        return parsed if parsed is not None and parsed in values else None

    return read


class Element:
    """An element of the XML: reads each value, and notes the values that cannot be read.

    Only this class turns the tool's words into values. The value is None where the device does not
    have it (N/A, Not Supported), or where the driver is too old to show it. The value is None and
    stands in ``unread`` where another text is in its place, where its text is empty, or where a
    driver of this version always prints the element and it is missing: it is unknown.

    driver: the driver's major version; None: not known
    """

    def __init__(self, node: ElementTree.Element, driver: int | None = None) -> None:
        self.node = node
        self.driver = driver
        self.unread: dict[str, str] = {}
        self.used: set[ElementTree.Element] = set()

    def _find(self, path: str) -> ElementTree.Element | None:
        """The element at the path, or its parent where that has only a text (N/A)."""
        node = self.node
        for name in path.split("/"):
            child = node.find(name)
            if child is None:
                return node if node is not self.node and not len(node) else None
            node = child
        return node

    def text(self, *paths: str) -> str | None:
        """The text of the first path with a value, or None: for facts that no check reads."""
        for path in paths:
            text = (self.node.findtext(path) or "").strip()
            if plain_word(text) not in ("", "not found", *ABSENT, *BROKEN):
                return text[:200]
        return None

    def note_unread(self, name: str, path: str, text: str) -> None:
        """Note that the value ``name`` is unreadable, with the text in its place."""
        words = " ".join(text.split())[:60] or "no value"
        self.unread.setdefault(name, f"{path.rpartition('/')[2]}: {words}")

    def read(
        self,
        name: str,
        parse: Callable[[str], T | None],
        *paths: str,
        since: int = 0,
        needed: bool = False,
    ) -> T | None:
        """The first value of the paths: the names of one value in several schemas.

        since:  from this major version on, every driver shows the value
        needed: each device has the value, so that N/A is an error
        """
        result: T | None = None
        lacks, moved, bad_text = False, False, ""
        for path in paths:
            node = self._find(path)
            if node is None:
                continue
            self.used.add(node)
            text = (node.text or "").strip()
            plain = plain_word(text)
            value = None if plain in ("", _MOVED, *ABSENT) else parse(text)
            result = value if result is None else result
            lacks = lacks or plain in ABSENT
            moved = moved or plain == _MOVED
            if value is None and plain not in (_MOVED, *ABSENT):
                bad_text = bad_text or text or "no value"
        if bad_text:
            self.note_unread(name, paths[0], bad_text)
        elif result is None and lacks and needed:
            self.note_unread(name, paths[0], "N/A")
        elif result is None and moved and not lacks:
            self.note_unread(name, paths[0], _MOVED)
        elif result is None and not lacks and (since == 0 or (self.driver or 0) >= since):
            self.note_unread(name, paths[0], "not shown")
        return result

    def word(self, name: str, words: Mapping[str, T], *paths: str, since: int = 0) -> T | None:
        """The value for the element's word."""
        return self.read(name, lambda text: words.get(plain_word(text)), *paths, since=since)

    def number(
        self, name: str, *paths: str, since: int = 0, among: Container[int] = range(_MOST)
    ) -> int | None:
        """The whole number with which the text begins, without its unit; a count, or ``among``."""
        return self.read(name, _among(among), *paths, since=since)

    def any(self, name: str, *paths: str, since: int = 0) -> bool | None:
        """True when one of the paths says yes, False when one says no; else None."""
        answers = [self.word(name, YES, path, since=since) for path in paths]
        return True if True in answers else False if False in answers else None

    def total(self, name: str, path: str, word: str, old: str) -> int | None:
        """The sum of the counters below ``path`` with ``word`` in their name.

        Schemas before v11, and boards before Ampere, count below ``old`` with a total.
        """
        counters = self._find(path)
        names = [] if counters is None else [child.tag for child in counters]
        if "single_bit" in names or "double_bit" in names:
            return self.number(name, f"{path}/{old}/total")
        names = [counter for counter in names if re.search(rf"(^|_){word}(_|$)", counter)]
        kinds = ("sram", "dram")
        names += [f"{kind}_{word}" for kind in kinds if not any(n.startswith(kind) for n in names)]
        return self.sum(name, [f"{path}/{counter}" for counter in names])

    def sum(self, name: str, paths: Iterable[str], since: int = 0) -> int | None:
        """The sum of these counters; None if the tool shows no counter."""
        counts = [self.number(name, path, since=since) for path in paths]
        readable = [count for count in counts if count is not None]
        return sum(readable) if readable else None


def _escaped(text: str) -> str:
    """The text with the processes' names escaped: a user can choose a name that breaks the XML.

    A name ends before the last element that follows a name in its process.
    """
    # Here: its table of entities is a hundredth of the start of every command.
    import html

    first, *sections = text.split("<process_info>")
    escaped = [first]
    for section in sections:
        processes = section.find("</processes>")
        tail = section.rfind("<used_memory>", 0, processes if processes >= 0 else len(section))
        start = section.find("<process_name>") + len("<process_name>")
        end = section.rfind("</process_name>", start, max(tail, 0))
        if start < len("<process_name>") or end < 0:
            escaped.append(section)
        else:
            name = html.escape(html.unescape(section[start:end]))
            escaped.append(section[:start] + name + section[end:])
    return "<process_info>".join(escaped)


def _without_processes(text: str) -> str:
    """The text without its processes."""
    sections = []
    for section in text.split("<gpu id="):
        before, opening, rest = section.partition("<processes>")
        _, closing, after = rest.rpartition("</processes>")
        cut = f"{before}{opening}left out{closing}{after}"
        sections.append(cut if opening and closing else section)
    return "<gpu id=".join(sections)


def tree(text: str) -> ElementTree.Element | None:
    """The XML of the answer; None when the answer holds no whole XML.

    The text before the root is left out with its DOCTYPE: so no DTD is read and no entity can be
    declared, and the use of an entity is an error. Where a process's name imitates the tool's XML
    and breaks it, the processes are left out.
    """
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < start:
        return None
    body = text[start : end + len("</nvidia_smi_log>")]
    clean = re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]", "\ufffd", body)
    # Imported late: the import is slow, and many nodes that audit themselves have no XML to read.
    from xml.etree import ElementTree

    for xml in (_escaped(clean), _without_processes(clean)):
        try:
            return ElementTree.fromstring(xml)
        except (ElementTree.ParseError, ValueError):
            continue
    return None


def own_elements(gpu: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """The elements with the GPU's own values, without the processes, whose names users choose."""
    yield gpu
    for child in gpu:
        if child.tag not in ("processes", "accounted_processes"):
            yield from child.iter()
