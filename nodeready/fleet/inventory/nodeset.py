"""Node sets: ``gpu[001-064]`` as names, and names as ``gpu[001-064]``.

A thin layer over ClusterShell. Only `group`, for a word of the command line, reads the group
sources of this machine (/etc/clustershell/groups.conf), so that a node set means the same
everywhere. ClusterShell's operators (``!``, ``&``, ``^``) are refused: they are shell characters,
and a list of names does the same.
"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from ClusterShell.Defaults import config_paths
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from ClusterShell.NodeUtils import GroupResolverError

from nodeready.core.text import cut, sanitise
from nodeready.fleet.inventory.trust import distrust

#: More names than the largest Slurm cluster has nodes (MAX_SLURM_NODES is 65,536): a typing error.
MAX_NODES = 65_536
MAX_NAME = 253  # RFC 1035, section 2.3.4: the longest host name

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_GLOB = re.compile(r"[A-Za-z0-9_.*?][A-Za-z0-9_.*?-]*")
# A pyinfra connector, with its argument: @local, @ssh/host, @docker/ubuntu:22.04.
_CONNECTOR = re.compile(r"@[A-Za-z0-9_]+(/[A-Za-z0-9_./][A-Za-z0-9_./:@%+=-]*)?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?:/([1-9][0-9]{0,8}))?)?")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_NUMBER = re.compile(r"([0-9]+)")
_DIGITS = 18  # digits of a number that a node set can count


class NodeSetError(ValueError):
    """A text that names no nodes. The message is one line: the text, and its problem."""


def host_name(text: str) -> str:
    """``text`` when it is a host name, an address or a connector (``@local``).

    Raises NodeSetError for anything else: a leading dash would be an option, and white space,
    shell and control characters have no place in a name (RFC 952, RFC 1123, and underscores).
    """
    if _CONNECTOR.fullmatch(text) if text.startswith("@") else _is_plain(text):
        return text
    raise NodeSetError(f"{_shown(text)} is no host name{_hint(text)}")


def too_many(count: int, shown: str) -> str:
    """The problem of more than `MAX_NODES` nodes; "": there are no more. shown: what has them"""
    return f"{shown} has more than {MAX_NODES:,} nodes" if count > MAX_NODES else ""


def _is_plain(text: str) -> bool:
    is_name = _NAME.fullmatch(text) is not None or (":" in text and is_ipv6(text))
    return is_name and len(text) <= MAX_NAME


def is_ipv6(text: str) -> bool:
    """Whether ``text`` is an IPv6 address, with or without a scope (``fe80::1%eth0``)."""
    address, percent, scope = text.partition("%")
    if percent and not _NAME.fullmatch(scope):
        return False
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def _shown(text: str) -> str:
    """``text`` quoted, on one line, and not longer than a line."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def _hint(text: str) -> str:
    if text.startswith("-"):
        return ": it begins with a dash"
    if "@" in text[1:]:
        return ": set the user as ssh_user in group_data"
    if re.fullmatch(r"[\w.-]+:\d+", text):
        return ": set the port as ssh_port in group_data"
    if "[" in text and not _GLOB.fullmatch(text):
        return ': expand a node set with nodeready.nodesets.nodes("...")'
    if any(char in text for char in "!&^"):
        return ": name the nodes; set operators are not taken"
    return ""


def split(text: str) -> list[str]:
    """The parts of a comma list; a comma within brackets does not part. Empty parts are dropped.

    >>> split("gpu[001-003,007],login1")
    ['gpu[001-003,007]', 'login1']
    """
    parts: list[str] = []
    depth = start = 0
    for position, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part.strip(" ") for part in parts if part.strip(" ")]


def _size(item: str) -> int:
    """The count of numbers in a range (``7``, ``001-064``, ``0-62/2``); 0 for no range."""
    match = _RANGE.fullmatch(item)
    if not match:
        return 0
    first, last = match[1], match[2] or match[1]
    padded = first[0] == "0" or last[0] == "0"
    if padded and len(first) != len(last) and first != "0":
        return 0
    return max(0, (int(last) - int(first)) // int(match[3] or 1) + 1)


def _count(text: str) -> int:
    """The count of names in ``text``, without making them. Raises NodeSetError."""
    total = 1
    for brackets in _BRACKETS.findall(text):
        sizes = [_size(item) for item in brackets.split(",")]
        if 0 in sizes:
            item = brackets.split(",")[sizes.index(0)]
            raise NodeSetError(f"node set {_shown(text)}: {_shown(item)} is no range like 001-064")
        total *= sum(sizes)
        if total > 10**18:
            # Too many already, and a number of thousands of digits cannot be shown.
            break
    return total


def expand_one(text: str, globs: bool = False) -> list[str]:
    """The names of one part (``gpu[001-064]``, ``login1``, ``@local``, ``[fe80::1]``), ascending.

    globs: also let ``*`` and ``?`` through, for a caller that matches them itself.
    Raises NodeSetError.
    """
    if text.startswith("[") and text.endswith("]") and is_ipv6(text[1:-1]):
        return [text[1:-1]]
    if text.startswith("@") or not ("[" in text or "]" in text):
        return [text if globs and _GLOB.fullmatch(text) else host_name(text)]
    frame = _BRACKETS.sub("0", text)
    if "[" in frame or "]" in frame:
        # Only counted ranges are expanded, and these cannot be counted.
        surplus = text.count("[") - text.count("]")
        problem = "missing bracket" if surplus > 0 else "unmatched closing bracket"
        problem = problem if surplus else "brackets within brackets"
        raise NodeSetError(f"node set {_shown(text)}: {problem}")
    if not (globs and _GLOB.fullmatch(frame)):
        try:
            host_name(frame)
        except NodeSetError as error:
            reason = _hint(frame) or ": a node set is letters, digits, dots, dashes and ranges"
            raise NodeSetError(f"{_shown(text)} is no node set{reason}") from error
    if reason := too_many(_count(text), f"node set {_shown(text)}"):
        raise NodeSetError(reason)
    try:
        return list(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise NodeSetError(f"node set {_shown(text)}: {_reason(error)}") from error
    except AssertionError as error:
        # ClusterShell appends digits behind a bracket to its numbers: gpu[1-64]999999999.
        raise NodeSetError(f"node set {_shown(text)}: its numbers are too large") from error


def _reason(error: NodeSetException) -> str:
    """ClusterShell's message without the text, which our message already has."""
    return " ".join(str(error).split(": ")[0].split()) if str(error) else "not understood"


_GROUP = re.compile(r"@(?:([A-Za-z0-9_.-]+):)?([A-Za-z0-9_.*-]+)")


def group(word: str) -> list[str] | None:
    """The names in ClusterShell's group ``@group`` or ``@source:group``; None: no such word.

    Its sources are ClusterShell's configuration here (groups.conf(5)): files, or programs such as
    sinfo, which it runs. ``@*`` is every node of the default source. Raises NodeSetError when no
    source has the group, one line.
    """
    if not _GROUP.fullmatch(word):
        return None
    reasons = map(distrust, config_paths("groups.conf"))
    distrusted = next(filter(None, reasons), "")
    if distrusted:
        raise NodeSetError(distrusted)
    problem = f"no group {_shown(word)} in ClusterShell's sources"
    try:
        names = list(NodeSet(word))
    except (NodeSetException, GroupResolverError, OSError) as error:
        reason = sanitise(" ".join(str(error).split())[:120]) or type(error).__name__
        raise NodeSetError(f"{problem}: {reason}") from error
    if not names:
        raise NodeSetError(problem)
    if reason := too_many(len(names), f"group {_shown(word)}"):
        raise NodeSetError(reason)
    return sorted((host_name(name) for name in names), key=natural)


def natural(name: str) -> list[tuple[str, int, str, str]]:
    """The sort key that puts ``gpu9`` before ``gpu10``, however many digits there are."""
    parts = _NUMBER.split(name)
    numbers = [*parts[1::2], ""]
    return [
        (word, len(number.lstrip("0")) if number else -1, number.lstrip("0"), number)
        for word, number in zip(parts[0::2], numbers, strict=True)
    ]


def unique(names: Iterable[str]) -> list[str]:
    """``names`` without repetitions, in the order of their first appearance."""
    return list(dict.fromkeys(names))


def expand(text: str) -> list[str]:
    """The names in ``text``, a comma list of names and node sets: natural order, each once.

    Raises NodeSetError, one line, when a part is no node set or no name, or when there are more
    than `MAX_NODES` names.
    """
    names: set[str] = set()
    for part in split(text):
        names.update(expand_one(part))
        if reason := too_many(len(names), _shown(text)):
            raise NodeSetError(reason)
    return sorted(names, key=natural)


def nodes(text: str) -> list[str]:
    """`expand` for an inventory file: ``h100 = nodes("gpu[001-064]")``.

    Raises pyinfra's InventoryError, which pyinfra and nodeready show as one line.
    """
    from pyinfra.api.exceptions import InventoryError

    try:
        names = expand(text)
    except NodeSetError as error:
        raise InventoryError(str(error)) from None
    if not names:
        raise InventoryError(f"node set {_shown(text)} names no node")
    return names


def fold(names: Iterable[str]) -> str:
    """``names`` in the shortest form: ``gpu[001-063],login1``; "" for no name.

    Names that are no plain host name (``@local``, IPv6 addresses) come last, joined by commas.
    ClusterShell compares all names with two numbers pairwise: 27 s for 10,000 names that do not
    fold. Here the cost is linear, and each set is a product of ranges.
    """
    shapes: defaultdict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    unfolded: list[str] = []
    for name in unique(names):
        if len(name) > MAX_NAME or not _NAME.fullmatch(name):
            unfolded.append(name)
            continue
        parts = _NUMBER.split(name)
        if any(len(number) > _DIGITS for number in parts[1::2]):
            shapes[(name,)].append(())
        else:
            shapes[tuple(parts[0::2])].append(tuple(parts[1::2]))
    blocks = [
        (natural(_joined(words, first)), _joined(words, ranges))
        for words, rows in shapes.items()
        for first, ranges in _blocks(rows)
    ]
    return ",".join([*(text for _, text in sorted(blocks)), *unfolded])


def _joined(words: Sequence[str], numbers: Sequence[str]) -> str:
    shown = (f"[{number}]" if "-" in number or "," in number else number for number in numbers)
    return "".join(part for pair in zip(words, [*shown, ""], strict=True) for part in pair)


def _blocks(rows: list[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Tuples of numbers as products of ranges: the first tuple of each, and its ranges."""
    folded = {row: row for row in rows}
    for index in reversed(range(len(rows[0]))):
        if len({row[index] for row in folded}) == 1:
            continue
        groups: defaultdict[tuple[str, ...], dict[str, tuple[str, ...]]] = defaultdict(dict)
        for row in folded:
            groups[row[:index] + row[index + 1 :]][row[index]] = row
        joined = {}
        for key, row_by_number in groups.items():
            numbers = _ascending(row_by_number)
            joined_row = (*key[:index], _ranges(numbers), *key[index:])
            joined[joined_row] = folded[row_by_number[numbers[0]]]
        folded = joined
    return ((first, ranges) for ranges, first in folded.items())


def _ascending(numbers: Collection[str]) -> list[str]:
    """Numbers without leading zeros first, then each width with leading zeros: 9, 10, 008, 010."""
    padded = {len(number) for number in numbers if number[0] == "0" and number != "0"}
    ordered = sorted(numbers, key=int)
    if not padded:
        return ordered
    return sorted(ordered, key=lambda number: len(number) if len(number) in padded else 0)


def _ranges(numbers: Sequence[str]) -> str:
    """``001-063,070`` of ascending numbers. ``9-10`` is one range, ``09-100`` is not."""
    runs: list[list[str]] = []
    for number in numbers:
        first, last = runs[-1] if runs else ("", "")
        grows = len(number) > len(last) and number[0] != "0" and (first == "0" or first[:1] != "0")
        if last and int(number) == int(last) + 1 and (len(number) == len(last) or grows):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(first if first == last else f"{first}-{last}" for first, last in runs)


def folded(names: Iterable[str], limit: int = 60) -> str:
    """`fold` for a person: safe to print; a very long node set is cut, with the count."""
    names = list(names)
    text = fold(names)
    return cut(sanitise(text, len(text)), limit, len(names))
