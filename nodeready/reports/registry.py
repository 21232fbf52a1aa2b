"""The formats of every command's document, a row each: a format is a file and its rows here; and
the pieces that they are made of on a terminal.

A row's module is imported when its format is used: ``--help`` imports none of them, and a node
needs only the modules of its own formats.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, Union

from nodeready.subjects.result import Result
from nodeready.text import counted, cut, sanitise

# --- Pieces of a terminal report: sanitised, aligned, the meaning never carried by colour alone.
#
# A style is a word here, which the control machine hands to rich; a node shows the plain text.

STYLES = {
    "fail": "bold red",
    "warn": "yellow",
    "unknown": "magenta",
    "unreachable": "bold red",
    "failed": "bold red",
    "changed": "green",
    "change": "cyan",
    "ok": "green",
    "na": "dim",
    "waived": "dim",
    # Groups of ranks, by their verdict or kind: see nodeready.triage.stacks.document.
    "missing": "bold red",
    "dead": "bold red",
    "no-data": "bold red",
    "uninterruptible": "bold red",
    "stopped": "red",
    "traced": "magenta",
    "blocked": "yellow",
    "spinning": "yellow",
    "unsure": "magenta",
    "suspect": "bold red",
    "victim": "cyan",
    "progressing": "green",
    "stack": "bold",
}

Key = TypeVar("Key", bound=Hashable)
#: A text, or a text with its style.
Part = Union[str, tuple[str, str]]


@dataclass(frozen=True)
class Line:
    """One line of a report: pieces of safe text, each with its style, or ""."""

    parts: tuple[tuple[str, str], ...]

    @property
    def plain(self) -> str:
        """The text alone."""
        return "".join(text for text, _ in self.parts)

    def with_(self, text: str) -> Line:
        """This line, and more text."""
        return Line((*self.parts, *line(text).parts))

    def cut(self, limit: int) -> Line:
        """This line, cut after ``limit`` characters, with ``...``."""
        kept, room = [], limit
        for text, style in self.parts:
            kept.append((text[:room], style))
            room -= len(text)
            if room < 0:
                return Line((*kept, ("...", "")))
        return self


def grouped(pairs: Iterable[tuple[Key, str]]) -> list[tuple[Key, list[str]]]:
    """Equal keys with the names of all their nodes, the most common key first."""
    found: dict[Key, list[str]] = {}
    for key, name in pairs:
        found.setdefault(key, []).append(name)
    return sorted(found.items(), key=lambda item: -len(item[1]))


class Safe(str):
    """A text that is safe to show already, and is not cut, however long it is: a node set."""

    __slots__ = ()


def nodes(names: Iterable[str], limit: int = 60) -> Safe:
    """A folded node set; a very long one is cut, with the count."""
    names = list(names)
    if len(names) == 1:
        return Safe(cut(sanitise(names[0]), limit, 1))
    # A node has no ClusterShell, and knows one name only: its own.
    from nodeready.inventory.nodeset import folded

    return Safe(folded(names, limit))


def fits(names: Sequence[str], limit: int) -> str:
    """A folded node set where it has room; else how many nodes it has."""
    whole = nodes(names, 1_000_000)
    return whole if len(whole) <= limit else counted(len(names), "node")


def line(*parts: Part) -> Line:
    """One line of parts, each a text or (text, style); everything is sanitised."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Line(
        tuple((text if isinstance(text, Safe) else sanitise(text), style) for text, style in pairs)
    )


def told(result: Result) -> str:
    """What was observed, what is wanted, and the source, in one clause."""
    text = result.actual
    if result.expected and result.status in ("fail", "warn") and result.expected != result.actual:
        text = f"{text} (want {result.expected})"
    return f"{text}  [{result.source}]" if result.source else text


# --- Texts that differ by a number, an address or the node's own name: one row for all of them.

#: What a text can say of one node: what is, and its fix.
Texts = tuple[str, ...]
#: A text in pieces: what all texts of its kind share, and the words that may differ between them.
_Pieces = tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]

#: A number with its thousands apart, or a word: a device, a version, an address, a path's part.
_WORD = re.compile(r"\d{1,3}(?:,\d{3})+(?![\w,])|\w(?:[\w.:-]*\w)?")
_NUMBER = re.compile(r"(\D*)(\d[\d,]*(?:\.\d+)?)(\D*)")
_ADDRESS = re.compile(
    r"\d+(?:\.\d+){3}|[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[\w.:]*|\w[\w-]*(?:\.[\w-]+)*\.[A-Za-z]{2,}"
)
_DIGIT = re.compile(r"\d")
#: The node's own name in a text, and an address that is another one on each node.
_OWN, _EACH = "NODE", "ADDRESS"
#: So many reasons are all told, where they are not alike.
_REASONS = 6
#: So many values of one word are all named; of more, the first and the last.
_NAMED = 3


class Alike(NamedTuple):
    """One row for the nodes that say the same, or the same but for numbers.

    said:    the texts; where the nodes differ, with all values or the least and the most
    names:   the nodes
    example: one of the nodes, where ``said`` alone does not tell what one node says; ""
    instance: what that node says
    texts:   how many different texts there are
    """

    said: Texts
    names: list[str]
    example: str = ""
    instance: Texts = ()
    texts: int = 1


def alike(
    pairs: Iterable[tuple[Texts, str]], apart: int = _NAMED, *, reasons: bool = False
) -> list[Alike]:
    """What nodes say, in few rows: the most nodes first.

    pairs:   texts and the node that says them; a node's own name in them makes no difference
    apart:   so many different texts are all shown; of more, those of one shape are one row
    reasons: why nodes have no answer: an address that is another one on each node makes no
             difference, however few they are
    """
    found: dict[Texts, list[str]] = {}
    for said, name in pairs:
        found.setdefault(said, []).append(name)
    shapes: dict[object, _Shape] = {}
    for said, names in found.items():
        # Of a text that several nodes say, the name is nobody's own.
        shared, words = _pieces(said, names[0] if len(names) == 1 else "")
        shapes.setdefault(shared, _Shape(shared)).add(said, words, names)
    kinds = sorted(shapes.values(), key=lambda one: -one.count)
    if reasons:
        for one in kinds:
            one.forget_addresses()
    if sum(len(one.rows) for one in kinds) <= apart:
        rows = [row for one in kinds for row in one.each()]
    elif len(kinds) <= apart:
        rows = [one.merged() for one in kinds]
    else:
        rows = [one.merged() for one in kinds[: apart - 1]]
        rows.append(_others(kinds[apart - 1 :]))
    return sorted(rows, key=lambda row: -len(row.names))


def reasons(found: Iterable[tuple[str, str]], verbose: int = 0) -> list[tuple[str, list[str]]]:
    """Why nodes have no answer, in few rows: the reason, or one of many, and its nodes.

    found: node and reason
    """
    pairs = (((why.removeprefix(f"{name}: "),), name) for name, why in found)
    if verbose:
        return [(why, names) for (why,), names in grouped(pairs)]
    return [
        (row.said[0] if row.said else f"e.g. {row.example}: {row.instance[0]}", row.names)
        for row in alike(pairs, _REASONS, reasons=True)
    ]


def _pieces(said: Texts, name: str) -> _Pieces:
    shared, words = [], []
    for text in said:
        between, end = [], 0
        for match in _WORD.finditer(text):
            word = match[0]
            if name and (word == name or word.startswith(f"{name}.")):
                word = _OWN
            elif not (_DIGIT.search(word) or "." in word or text.startswith(": ", match.end())):
                continue
            between.append(text[end : match.start()])
            words.append(word)
            end = match.end()
        shared.append((*between, text[end:]))
    return tuple(shared), tuple(words)


class _Shape:
    """The texts that share all but some words.

    rows: the words -> the nodes that say them, and their own texts
    """

    def __init__(self, shared: tuple[tuple[str, ...], ...]) -> None:
        self.shared = shared
        self.rows: dict[tuple[str, ...], tuple[list[str], list[Texts]]] = {}

        before = (text for between in shared for text in between[:-1])
        #: Whether a word can be an address: it is no part of a path.
        self.free = tuple(not text.endswith("/") for text in before)

    @property
    def count(self) -> int:
        return sum(len(names) for names, _ in self.rows.values())

    def add(self, said: Texts, words: tuple[str, ...], names: list[str]) -> None:
        known, texts = self.rows.setdefault(words, ([], []))
        known.extend(names)
        texts.append(said)

    def forget_addresses(self) -> None:
        """Make one row of the rows that differ by an address of each node's own alone."""
        found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for words in self.rows:
            plain = tuple(
                _EACH if free and _ADDRESS.fullmatch(word) else word
                for word, free in zip(words, self.free)
            )
            found.setdefault(plain, []).append(words)
        for plain, several in found.items():
            if len(several) > 1:
                kept: tuple[str, ...] = several[0]
                for at, word in enumerate(plain):
                    if len({words[at] for words in several}) > 1:
                        kept = (*kept[:at], word, *kept[at + 1 :])
                for words in several:
                    names, texts = self.rows.pop(words)
                    known, others = self.rows.setdefault(kept, ([], []))
                    known.extend(names)
                    others.extend(texts)

    def said(self, words: Sequence[str]) -> Texts:
        """The texts with these words; an own name or address in front of a reason goes."""
        left, texts = list(words), []
        for between in self.shared:
            here, left = left[: len(between) - 1], left[len(between) - 1 :]
            text = "".join(piece for pair in zip(between, [*here, ""]) for piece in pair)
            for own in (_OWN, _EACH):
                if here[:1] == [own] and not between[0]:
                    text = text.removeprefix(f"{own}: ")
            texts.append(text)
        return tuple(texts)

    def row(self, words: tuple[str, ...]) -> Alike:
        names, texts = self.rows[words]
        return Alike(texts[0] if len(texts) == 1 else self.said(words), names)

    def each(self) -> Iterator[Alike]:
        return map(self.row, self.rows)

    def merged(self) -> Alike:
        """All of them as one row."""
        if len(self.rows) == 1:
            return self.row(next(iter(self.rows)))
        counts = [len(names) for names, _ in self.rows.values()]
        words, differ = [], 0
        for free, column in zip(self.free, zip(*self.rows)):
            values: Counter[str] = Counter()
            for word, count in zip(column, counts):
                values[word] += count
            differ += len(values) > 1
            words.append(_values(values, free))
        names = [name for some, _ in self.rows.values() for name in some]
        some, texts = max(self.rows.values(), key=lambda row: len(row[0]))
        example = (some[0], texts[0]) if differ > 1 else ("", ())
        return Alike(self.said(words), names, *example, texts=len(self.rows))


def _values(found: Counter[str], free: bool) -> str:
    """The values that one word has: ``71.2 to 84.9``, ``eth0, eth1``, ``a, b and 17 more``.

    free: addresses that are another one on each node are not named
    """
    if len(found) == 1:
        return next(iter(found))
    matches = [_NUMBER.fullmatch(value) for value in found]
    around = {(match[1], match[3]) for match in matches if match}
    if None in matches or len(around) > 1:
        if (
            free
            and len(found) == sum(found.values()) > _NAMED
            and all(map(_ADDRESS.fullmatch, found))
        ):
            return _EACH
        first = [value for value, _ in found.most_common(_NAMED)]
        if len(found) <= _NAMED:
            return ", ".join(first)
        return f"{', '.join(first[:2])} and {len(found) - 2} more"
    ranked = sorted(found, key=_number)
    if len(ranked) <= _NAMED:
        return ", ".join(ranked)
    text = f"{ranked[0]} to {ranked[-1]}"
    most, count = found.most_common(1)[0]
    return f"mostly {most} ({text})" if count * 2 > sum(found.values()) else text


def _number(text: str) -> float:
    match = _NUMBER.fullmatch(text)
    return float(match[2].replace(",", "")) if match else 0.0


def _others(kinds: Sequence[_Shape]) -> Alike:
    """One row for texts of many shapes: an example."""
    names = [name for one in kinds for some, _ in one.rows.values() for name in some]
    some, texts = next(iter(kinds[0].rows.values()))
    return Alike((), names, some[0], texts[0], sum(len(one.rows) for one in kinds))


# --- A table that fits on a screen.


class Section(NamedTuple):
    """Rows of one kind, the most important one first.

    full, short: the lines of a row, and the one line that it has where there is no room for more
    more:        the line that counts the rows that are not shown
    most:        rows that are shown at most, where anything is left out
    title:       the line above the rows; None: there is none
    """

    rows: Sequence[Any]
    full: Callable[[Any], Iterable[Line]]
    short: Callable[[Any], Line]
    more: Callable[[int], Line]
    most: int = 30
    title: Line | None = None


def fitted(sections: Sequence[Section], room: int, width: int, few: int = 0) -> Iterator[Line]:
    """The sections in at most ``room`` lines of a screen; 0: all of them, without a limit.

    Where not everything has room, every row has one line before one row has several, a section
    gets its share before another one gets more, and the first rows are shown whole.

    few: so many rows in all are always shown whole
    """
    if not room or sum(len(section.rows) for section in sections) <= few:
        for section in sections:
            yield from _titled(section)
            for row in section.rows:
                yield from section.full(row)
        return
    room -= sum(1 for section in sections for _ in _titled(section))
    wanted = [
        min(len(section.rows), section.most) + (len(section.rows) > section.most)
        for section in sections
    ]
    shares = _shares(wanted, room)
    left = room - sum(shares)
    for section, share in zip(sections, shares):
        yield from _titled(section)
        shown = section.rows if len(section.rows) <= share else section.rows[: max(0, share - 1)]
        whole = True
        for row in shown:
            lines = list(section.full(row)) if whole else []
            cost = sum(_height(one, width) for one in lines) - 1
            whole = whole and cost <= left
            if whole:
                left -= cost
                yield from lines
            else:
                one = section.short(row)
                yield one if len(one.plain) <= width else one.cut(width - 3)
        if len(shown) < len(section.rows) and share:
            yield section.more(len(section.rows) - len(shown))


def _titled(section: Section) -> Iterator[Line]:
    if section.rows and section.title is not None:
        yield section.title


def _height(one: Line, width: int) -> int:
    """Lines of a screen that a line takes, where a long one goes on below its own text."""
    text = one.plain
    if len(text) <= width:
        return 1
    return -(-len(text) // max(20, width - (len(text) - len(text.lstrip()) + 4)))


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """Lines for each: what it wants, or an equal share; what is left over goes to the first."""
    shares = [0] * len(wanted)
    while room > 0:
        open_ = [at for at, want in enumerate(wanted) if shares[at] < want]
        if not open_:
            break
        each = max(1, room // len(open_))
        for at in open_:
            more = min(each, wanted[at] - shares[at], room)
            shares[at] += more
            room -= more
    return shares


# --- The formats.

#: Lines of a table on a screen, where nothing else is known.
SCREEN = 40


@dataclass(frozen=True)
class Options:
    """What the command line asks of a report. A format ignores the options that it has no use for.

    verbose: from 1 on, a table folds nothing by example, cuts nothing and leaves nothing out
    width:   columns of the terminal
    fail_on: "fail" or "warn": the mildest status with which a check fails the run
    diff:    a deploy's table shows the differences of its files
    quiet:   a table says nothing of what is well
    lines:   that a table has on a terminal, about; 0: a pipe or a file, where no row is left out
    """

    verbose: int = 0
    width: int = 80
    fail_on: str = "fail"
    diff: bool = False
    quiet: bool = False
    lines: int = SCREEN


#: The options of a command line without any.
PLAIN = Options()


@dataclass(frozen=True)
class Format:
    """One form of one command's document.

    document:  the command whose document is shown; `debuggable`: that of ``stacks --check``
    name:      the word of ``--format``
    renderer:  ``MODULE:FUNCTION`` of this room: ``(document, options) -> Iterator``, of texts, or
               of Lines where ``styled``
    extension: of a file in this format
    styled:    the format is made of lines with styles, for a terminal
    on_node:   the node's own program has the format, too: standard library and Python 3.9
    part:      the attribute of the document that is shown; "": the whole document
    facts:     ``MODULE:FUNCTION`` that makes the text of one observation, where the format shows
               them: an audit of many nodes has it made by several processes
    """

    document: str
    name: str
    renderer: str
    extension: str
    styled: bool = False
    on_node: bool = False
    part: str = ""
    facts: str = ""

    @property
    def tell(self) -> Callable[[Any], str] | None:
        """The function of ``facts``; None: the format shows none."""
        if not self.facts:
            return None
        module, _, name = self.facts.partition(":")
        found: Callable[[Any], str] = getattr(
            importlib.import_module(f"nodeready.reports.{module}"), name
        )
        return found

    @property
    def module(self) -> str:
        """The dotted name of the renderer's module."""
        return f"nodeready.reports.{self.renderer.partition(':')[0]}"

    def _made(self, document: Any, options: Options) -> Iterator[Any]:
        function: Callable[[Any, Options], Iterable[Any]] = getattr(
            importlib.import_module(self.module), self.renderer.partition(":")[2]
        )
        return iter(function(getattr(document, self.part) if self.part else document, options))

    def render(self, document: Any, options: Options = PLAIN) -> Iterator[str]:
        """The text in pieces, as a file holds it."""
        made = self._made(document, options)
        return (f"{line.plain}\n" for line in made) if self.styled else made

    def lines(self, document: Any, options: Options = PLAIN) -> Iterator[Line]:
        """The lines with their styles. Raises ValueError for a format that has none."""
        if not self.styled:
            raise ValueError(f"{self.document} as {self.name} is not made of lines")
        return self._made(document, options)


#: Every format of every document; a command's first one is its default.
_ROWS = (
    Format("audit", "table", "table:show_audit", ".txt", styled=True, on_node=True),
    Format("audit", "junit", "junit:render", ".xml"),
    Format(
        *("audit", "json", "json_report:render", ".json"),
        on_node=True,
        facts="json_report:shown",
    ),
    Format("audit", "prometheus", "monitoring:prometheus", ".prom", on_node=True),
    Format("audit", "nagios", "monitoring:nagios", ".txt", on_node=True),
    Format("ready", "table", "table:show_ready", ".txt", styled=True, on_node=True),
    Format("ready", "junit", "junit:render", ".xml", part="audit"),
    Format("ready", "json", "json_report:render", ".json", on_node=True),
    Format("ready", "prometheus", "monitoring:prometheus", ".prom", part="audit"),
    Format("ready", "nagios", "monitoring:nagios", ".txt", part="audit"),
    Format("smoke", "table", "smoke_table:show", ".txt", styled=True),
    Format("smoke", "json", "json_report:render", ".json"),
    Format("smoke", "junit", "junit:smoke", ".xml"),
    Format("smoke", "prometheus", "monitoring:prometheus_smoke", ".prom"),
    Format("deploy", "table", "plan:show", ".txt", styled=True),
    Format("deploy", "json", "json_report:render_deploy", ".json"),
    Format("stacks", "table", "stacks_table:show", ".txt", styled=True),
    Format("stacks", "json", "json_report:render", ".json"),
    Format("stacks", "html", "stacks_html:render", ".html"),
    Format("stacks", "speedscope", "exports:speedscope", ".speedscope.json"),
    Format("debuggable", "table", "stacks_table:debuggable", ".txt", styled=True),
    Format("debuggable", "json", "json_report:render", ".json"),
    Format("cores", "table", "cores_table:show", ".txt", styled=True),
    Format("cores", "json", "json_report:render", ".json"),
    Format("tail", "table", "tail_table:show", ".txt", styled=True),
    Format("tail", "json", "json_report:render", ".json"),
    Format("incident", "table", "stacks_table:incident_index", ".txt", styled=True),
    Format("incident", "json", "json_report:render", ".json"),
    Format("env", "sh", "exports:shell_lines", ".env"),
    Format("env", "json", "json_report:render", ".json"),
)

#: document -> name -> its format, in the order in which ``--help`` names them.
FORMATS: dict[str, dict[str, Format]] = {}
for _row in _ROWS:
    FORMATS.setdefault(_row.document, {})[_row.name] = _row


def names(document: str, *, on_node: bool = False) -> tuple[str, ...]:
    """The words of a command's ``--format``; the first one is its default.

    on_node: only those that the node's own program has
    """
    rows = FORMATS[document].values()
    return tuple(row.name for row in rows if row.on_node or not on_node)


def find(document: str, name: str) -> Format:
    """The format of this document and name. Raises KeyError when there is none."""
    return FORMATS[document][name]
