"""Lines of a table on a terminal, their layout, and texts that differ by a value."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, Union

from nodeready.core.outcome import FAILED_WORD, INCOMPLETE_WORD, UNREACHABLE_WORD, WORDS, NodeGap
from nodeready.core.severity import words as severity_words
from nodeready.core.text import counted, cut, sanitise
from nodeready.reports.registry import PLAIN, Options

#: Style -> the words that it belongs to; of ranks by their verdict or kind: see
#: nodeready.runs.stacks.document.
_WORDS_BY_STYLE = {
    "bold red": "fail unreachable failed missing dead no-data uninterruptible suspect",
    "red": "stopped frozen",
    "yellow": "warn blocked spinning",
    "magenta": "unknown traced unsure",
    "green": "changed ok progressing",
    "cyan": "change victim",
    "dim": "na waived",
    "bold": "stack",
}
STYLES = {word: style for style, words in _WORDS_BY_STYLE.items() for word in words.split()}
Key = TypeVar("Key", bound=Hashable)
Part = Union[str, tuple[str, str]]  # a text, or a text with its style


@dataclass(frozen=True)
class StyledLine:
    """One line of a report: pieces of sanitised text, each with its style or ""."""

    parts: tuple[tuple[str, str], ...]

    @property
    def plain(self) -> str:
        """The text without styles."""
        return "".join(text for text, _ in self.parts)

    def with_text(self, text: str) -> StyledLine:
        """This line with more text at its end."""
        return StyledLine((*self.parts, *line(text).parts))

    def cut(self, limit: int) -> StyledLine:
        """This line, cut after ``limit`` characters, with ``...``."""
        parts, room = [], limit
        for text, style in self.parts:
            parts.append((text[:room], style))
            room -= len(text)
            if room < 0:
                return StyledLine((*parts, ("...", "")))
        return self


def grouped(pairs: Iterable[tuple[Key, str]]) -> list[tuple[Key, list[str]]]:
    """Equal keys with the names of all their nodes, the most common key first.

    >>> grouped([("ok", "a"), ("bad", "b"), ("bad", "c")])
    [('bad', ['b', 'c']), ('ok', ['a'])]
    """
    names_of: dict[Key, list[str]] = {}
    for key, name in pairs:
        names_of.setdefault(key, []).append(name)
    return sorted(names_of.items(), key=lambda item: -len(item[1]))


class Safe(str):
    """A text that is already sanitised, and is never cut, such as a node set."""

    __slots__ = ()


def node_set(names: Iterable[str], limit: int = 60) -> Safe:
    """The folded node set; beyond ``limit`` characters it is cut, and ends with the count.

    >>> node_set(["gpu1", "gpu2"])
    'gpu[1-2]'
    """
    names = list(names)
    if len(names) == 1:
        return Safe(cut(sanitise(names[0]), limit, 1))
    # The node's own program has no ClusterShell, and only ever one name, its own.
    from nodeready.fleet.inventory.nodeset import folded

    return Safe(folded(names, limit))


def node_set_or_count(names: Sequence[str], limit: int) -> str:
    """The folded node set where it fits into the limit; else ``12 nodes``."""
    text = node_set(names, 1_000_000)
    return text if len(text) <= limit else counted(len(names), "node")


def line(*parts: Part) -> StyledLine:
    """One line of parts, each a text or (text, style); all but `Safe` texts are sanitised."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return StyledLine(
        tuple((text if isinstance(text, Safe) else sanitise(text), style) for text, style in pairs)
    )


def with_inventory(text: str, inventory: str) -> str:
    """A fix with the run's inventory in its commands."""
    return text.replace(" INVENTORY", f" {inventory}")


def cost_text(severity: str, status: str) -> str:
    """The severity of a finding in words; ``loses job?`` of what is unknown; "" of other results.

    >>> cost_text("loses_job", "unknown")
    'loses job?'
    """
    if status not in ("fail", "unknown", "warn") or not severity:
        return ""
    text = severity_words(severity)
    return f"{text}?" if status == "unknown" else text


# --- Fold texts that differ by a number, an address or the node's own name into one row.

Texts = tuple[str, ...]  # the texts about one node: a finding, and its fix
#: Texts in pieces: those between the words that may differ, and these words.
_SplitTexts = tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]
#: A number with its thousands apart, or a word: a device, a version, an address, a path's part.
_WORD = re.compile(r"\d{1,3}(?:,\d{3})+(?![\w,])|\w(?:[\w.:-]*\w)?")
_NUMBER = re.compile(r"(\D*)(\d[\d,]*(?:\.\d+)?)(\D*)")
_ADDRESS = re.compile(
    r"\d+(?:\.\d+){3}|[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[\w.:]*|\w[\w-]*(?:\.[\w-]+)*\.[A-Za-z]{2,}"
)
_DIGIT = re.compile(r"\d")
#: The placeholders of the node's own name, and of an address that differs on each node.
_NAME, _ADDRESS_WORD = "NODE", "ADDRESS"
_MAX_REASONS = 6  # maximum rows with different reasons
_MAX_VALUES = 3  # maximum values of one word that are all named; of more, the first and the last


class SimilarTexts(NamedTuple):
    """One row for nodes with equal texts, or with texts that differ by a few words."""

    # the texts; where they differ, with all values, or the minimum and maximum
    shared_texts: Texts
    names: list[str]  # the nodes
    example: str = ""  # one of the nodes, where no single node has the shared texts; else ""
    instance: Texts = ()  # the texts of that node
    variants: int = 1  # number of different texts

    @property
    def texts(self) -> Texts:
        """The shared texts, or the texts of the example."""
        return self.shared_texts or self.instance


def fold_similar(
    pairs: Iterable[tuple[Texts, str]], max_rows: int = _MAX_VALUES, *, reasons: bool = False
) -> list[SimilarTexts]:
    """The texts of all nodes in few rows, the row of most nodes first.

    pairs:    texts and their node, whose own name in them is ignored
    max_rows: maximum number of rows; beyond it, texts of one shape become one row
    reasons:  the texts are errors: an address that differs on each node is ignored

    >>> fold_similar([(("71 C",), "gpu1"), (("84 C",), "gpu2")], 1)[0].shared_texts
    ('71, 84 C',)
    """
    names_of: dict[Texts, list[str]] = {}
    for texts, name in pairs:
        names_of.setdefault(texts, []).append(name)
    shapes: dict[object, _TextShape] = {}
    for texts, names in names_of.items():
        # In a text of several nodes, no name is the node's own.
        shared, words = _split_words(texts, names[0] if len(names) == 1 else "")
        shapes.setdefault(shared, _TextShape(shared)).add(words, names, [texts])
    kinds = sorted(shapes.values(), key=lambda shape: -shape.count)
    if reasons:
        for shape in kinds:
            shape.forget_addresses()
    if sum(len(shape.rows) for shape in kinds) <= max_rows:
        rows = [row for shape in kinds for row in map(shape.row, shape.rows)]
    elif len(kinds) <= max_rows:
        rows = [shape.merged() for shape in kinds]
    else:
        rows = [shape.merged() for shape in kinds[: max_rows - 1]]
        # One row for texts of many shapes: an example.
        further = [row for shape in kinds[max_rows - 1 :] for row in shape.rows.values()]
        row_names, row_texts = further[0]
        names = [name for names, _ in further for name in names]
        rows.append(SimilarTexts((), names, row_names[0], row_texts[0], len(further)))
    return sorted(rows, key=lambda row: -len(row.names))


def reasons(
    node_reasons: Iterable[tuple[str, str]], verbose: int = 0
) -> list[tuple[str, list[str]]]:
    """Why nodes gave no answer, in few rows: the reason, or an example, with the nodes."""
    pairs = (((reason.removeprefix(f"{name}: "),), name) for name, reason in node_reasons)
    if verbose:
        return [(reason, names) for (reason,), names in grouped(pairs)]
    return [
        (row.texts[0] if row.shared_texts else f"e.g. {row.example}: {row.texts[0]}", row.names)
        for row in fold_similar(pairs, _MAX_REASONS, reasons=True)
    ]


def _split_words(texts: Texts, name: str) -> _SplitTexts:
    """The texts split at numbers, dotted words, words before a colon, and the node's name."""
    shared, words = [], []
    for text in texts:
        between, end = [], 0
        for match in _WORD.finditer(text):
            word = match[0]
            if name and (word == name or word.startswith(f"{name}.")):
                word = _NAME
            elif not (_DIGIT.search(word) or "." in word or text.startswith(": ", match.end())):
                continue
            between.append(text[end : match.start()])
            words.append(word)
            end = match.end()
        shared.append((*between, text[end:]))
    return tuple(shared), tuple(words)


class _TextShape:
    """Texts that are equal except for some words."""

    def __init__(self, shared: tuple[tuple[str, ...], ...]) -> None:
        self.shared = shared
        # The words -> the nodes with these words, and their texts.
        self.rows: dict[tuple[str, ...], tuple[list[str], list[Texts]]] = {}
        before = (text for between in shared for text in between[:-1])
        # For each word: it is no part of a path.
        self.may_be_address = tuple(not text.endswith("/") for text in before)

    @property
    def count(self) -> int:
        return sum(len(names) for names, _ in self.rows.values())

    def add(self, words: tuple[str, ...], names: list[str], texts: list[Texts]) -> None:
        row_names, row_texts = self.rows.setdefault(words, ([], []))
        row_names.extend(names)
        row_texts.extend(texts)

    def forget_addresses(self) -> None:
        """Merge the rows that differ only by an address of the node."""
        words_of: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for words in self.rows:
            plain = tuple(
                _ADDRESS_WORD if may_be and _ADDRESS.fullmatch(word) else word
                for word, may_be in zip(words, self.may_be_address)
            )
            words_of.setdefault(plain, []).append(words)
        for plain, several in words_of.items():
            if len(several) > 1:
                merged: tuple[str, ...] = several[0]
                for index, word in enumerate(plain):
                    if len({words[index] for words in several}) > 1:
                        merged = (*merged[:index], word, *merged[index + 1 :])
                for words in several:
                    self.add(merged, *self.rows.pop(words))

    def filled_in(self, words: Sequence[str]) -> Texts:
        """The texts with these words, without a node's name or address at the beginning."""
        remaining, texts = list(words), []
        for between in self.shared:
            own_words, remaining = remaining[: len(between) - 1], remaining[len(between) - 1 :]
            text = "".join(part for pair in zip(between, [*own_words, ""]) for part in pair)
            for placeholder in (_NAME, _ADDRESS_WORD):
                if own_words[:1] == [placeholder] and not between[0]:
                    text = text.removeprefix(f"{placeholder}: ")
            texts.append(text)
        return tuple(texts)

    def row(self, words: tuple[str, ...]) -> SimilarTexts:
        names, texts = self.rows[words]
        return SimilarTexts(texts[0] if len(texts) == 1 else self.filled_in(words), names)

    def merged(self) -> SimilarTexts:
        """All texts of the shape as one row."""
        if len(self.rows) == 1:
            return self.row(next(iter(self.rows)))
        counts = [len(names) for names, _ in self.rows.values()]
        words, differing_words = [], 0
        for may_be_address, column in zip(self.may_be_address, zip(*self.rows)):
            values: Counter[str] = Counter()
            for word, count in zip(column, counts):
                values[word] += count
            differing_words += len(values) > 1
            words.append(_values_text(values, may_be_address))
        names = [name for row_names, _ in self.rows.values() for name in row_names]
        row_names, texts = max(self.rows.values(), key=lambda row: len(row[0]))
        example = (row_names[0], texts[0]) if differing_words > 1 else ("", ())
        return SimilarTexts(self.filled_in(words), names, *example, variants=len(self.rows))


def _values_text(values: Counter[str], may_be_address: bool) -> str:
    """All values of one word: ``71.2 to 84.9``, ``eth0, eth1``, ``a, b and 17 more``.

    may_be_address: addresses that differ on each node become a placeholder
    """
    if len(values) == 1:
        return next(iter(values))
    matches = [_NUMBER.fullmatch(value) for value in values]
    around = {(match[1], match[3]) for match in matches if match}
    if None in matches or len(around) > 1:
        is_unique = len(values) == sum(values.values()) > _MAX_VALUES
        if may_be_address and is_unique and all(map(_ADDRESS.fullmatch, values)):
            return _ADDRESS_WORD
        first = [value for value, _ in values.most_common(_MAX_VALUES)]
        if len(values) <= _MAX_VALUES:
            return ", ".join(first)
        return f"{', '.join(first[:2])} and {len(values) - 2} more"
    numbers = {match[0]: float(match[2].replace(",", "")) for match in matches if match}
    ranked = sorted(values, key=numbers.__getitem__)
    if len(ranked) <= _MAX_VALUES:
        return ", ".join(ranked)
    text = f"{ranked[0]} to {ranked[-1]}"
    majority, count = values.most_common(1)[0]
    return f"mostly {majority} ({text})" if count * 2 > sum(values.values()) else text


# --- The columns and the limits of a table on a terminal, and the sections that fit on a screen.


class RowSection(NamedTuple):
    """Rows of one kind, the most important one first."""

    rows: Sequence[Any]
    full: Callable[[Any], Iterable[StyledLine]]  # makes all lines of a row
    # makes the only line of a row, where there is no room for more
    short: Callable[[Any], StyledLine]
    count_line: Callable[[int], StyledLine]  # makes the line that counts the hidden rows
    max_rows: int = 30  # maximum number of shown rows, unless all rows of all sections are shown
    title: StyledLine | None = None  # the line above the rows, if any


def fitted(
    sections: Sequence[RowSection], room: int, width: int, few: int = 0
) -> Iterator[StyledLine]:
    """The sections in at most ``room`` lines of a screen; 0: without a limit. If there is too
    little room, each section first gets its share of lines, one for each row. Lines that are left
    show the first rows whole. few: up to this number of rows in all sections, every row is shown
    whole
    """
    titles = [[section.title] if section.rows and section.title else [] for section in sections]
    if not room or sum(len(section.rows) for section in sections) <= few:
        for section, title in zip(sections, titles):
            yield from title
            for row in section.rows:
                yield from section.full(row)
        return
    room -= sum(map(len, titles))
    demands = [
        min(len(section.rows), section.max_rows) + (len(section.rows) > section.max_rows)
        for section in sections
    ]
    shares = _shares(demands, room)
    spare = room - sum(shares)
    for section, share, title in zip(sections, shares, titles):
        yield from title
        shown = section.rows if len(section.rows) <= share else section.rows[: max(0, share - 1)]
        has_room = True
        for row in shown:
            lines = list(section.full(row)) if has_room else []
            cost = sum(_height(full_line, width) for full_line in lines) - 1
            has_room = has_room and cost <= spare
            if has_room:
                spare -= cost
                yield from lines
            else:
                short_line = section.short(row)
                yield short_line if len(short_line.plain) <= width else short_line.cut(width - 3)
        if len(shown) < len(section.rows) and share:
            yield section.count_line(len(section.rows) - len(shown))


def _height(row: StyledLine, width: int) -> int:
    """Lines of a screen that a line takes: `Screen.show` wraps a long one with an indent."""
    text = row.plain
    if len(text) <= width:
        return 1
    return -(-len(text) // max(20, width - (len(text) - len(text.lstrip()) + 4)))


def _shares(demands: Sequence[int], room: int) -> list[int]:
    """Lines for each section: its demand, or an equal share; the remainder goes to the first.

    >>> _shares([1, 9, 9], 9)
    [1, 4, 4]
    """
    shares = [0] * len(demands)
    while room > 0 and shares != [*demands]:
        unmet = [index for index, demand in enumerate(demands) if shares[index] < demand]
        share = max(1, room // len(unmet))
        for index in unmet:
            addition = min(share, demands[index] - shares[index], room)
            shares[index] += addition
            room -= addition
    return shares


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The head and the rows as texts, their cells in columns of one width."""
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    return ["  ".join(map(str.ljust, row, widths)) for row in table]


NO_LIMIT = 1_000_000  # characters of a node set or of a text that is not cut
MAX_WIDTH = 160  # columns beyond which a node set is cut even where nothing wraps
MAX_TEXT = 500  # characters of a text from a node that are shown without -v
_MAX_NODES, _SHORT_NODES = 60, 30  # columns of a node set without -v, and of one in a short line
#: Word of a gap -> its style.
_GAP_STYLES = {UNREACHABLE_WORD: "unreachable", FAILED_WORD: "failed", INCOMPLETE_WORD: "warn"}
Reason = tuple[str, list[str]]  # a reason, and the nodes that have it


class TableLayout:
    indent = 9  # columns of the words on the left

    def __init__(self, options: Options) -> None:
        self.verbose, self.width = options.verbose, options.width
        # Nothing is cut or left out: -v, a pipe or a file.
        self.is_whole = bool(options.verbose) or not options.lines

    def names(self, names: Iterable[str], room: int = 0) -> tuple[str, str]:
        """A node set, cut after ``room`` columns."""
        return node_set(names, NO_LIMIT if self.is_whole else room or _MAX_NODES), "bold"

    def head(self, word: str, style: str, *parts: Part) -> StyledLine:
        """The first line of a row: its word on the left, in a style of STYLES or ""."""
        return line((f"{word:<{self.indent}}", STYLES.get(style, "")), *parts)

    def sentence(self, *parts: Part) -> StyledLine:
        """A further line of a row in nodeready's words, such as a repair, which is never cut."""
        return line(" " * self.indent, *parts)

    def detail(self, *parts: Part) -> StyledLine:
        """A further line of a row."""
        text = self.sentence(*parts)
        return text if self.is_whole else text.cut(MAX_TEXT)

    def count_line(self, count: int) -> StyledLine:
        return self.detail((f"and {count} more (-v shows them)", "bold"))

    def hidden(self, count: int, *nouns: str) -> Iterator[StyledLine]:
        """The line that counts what a row hides, if anything."""
        if count > 0:
            yield self.detail((f"{counted(count, *nouns)} (-v shows them)", "dim"))

    def limited(
        self, rows: Sequence[Any], maximum: int, full: Callable[[Any], Iterable[StyledLine]]
    ) -> Iterator[StyledLine]:
        """The first rows, and the number of the hidden ones; all rows of a whole table."""
        shown = rows if self.is_whole else rows[:maximum]
        for row in shown:
            yield from full(row)
        if len(rows) > len(shown):
            yield self.count_line(len(rows) - len(shown))

    def by_reason(self, word: str, style: str, rows: list[Reason]) -> RowSection:
        """Nodes without a complete answer, a row for each reason."""

        start = f"{word:<{self.indent - 2}}  "

        def full(row: Reason) -> Iterable[StyledLine]:
            names = self.names(row[1], max(20, self.width - len(start)))
            return self.head(start, style, names), self.sentence(row[0])

        def short(row: Reason) -> StyledLine:
            names = node_set_or_count(row[1], _SHORT_NODES)
            return self.head(start, style, (names, "bold"), f"  {row[0]}")

        return RowSection(rows, full, short, self.count_line)

    def gaps(self, gaps: Iterable[NodeGap]) -> list[RowSection]:
        """The nodes without a complete answer: a section for each word, a row for each reason."""
        reasons_of: dict[str, list[tuple[str, str]]] = {word: [] for word in WORDS}
        for gap in gaps:
            reasons_of[gap.gap.word].append((gap.node, gap.reason))
        return [
            self.by_reason(word, _GAP_STYLES[word], reasons(pairs, self.verbose))
            for word, pairs in reasons_of.items()
        ]

    def partial(self) -> StyledLine:
        """The line that says that the report was interrupted."""
        return self.head("partial", "warn", "interrupted: not all nodes answered")


def show_gaps(gaps: Iterable[NodeGap], options: Options = PLAIN) -> Iterator[StyledLine]:
    """The nodes without a complete answer, a row for each reason."""
    return fitted(TableLayout(options).gaps(gaps), 0, options.width)
