"""Parsed texts as templates: thousands of nodes print texts that differ by a few values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from typing import Any, Callable, Generic

from nodeready.core.base import T


def fast_replace(instance: T, **fields: Any) -> T:
    """The frozen dataclass with these fields; 30 times faster than `dataclasses.replace`."""
    copy: T = object.__new__(type(instance))
    vars(copy).update(vars(instance), **fields)
    return copy


@dataclass(frozen=True, eq=False)
class ParsedTemplate(Generic[T]):
    """A parsed text of lines ``PATH:VALUE``, a template for similar texts."""

    lines: tuple[str, ...]
    read: T  # the result of parsing
    # index of a line -> the text before its value, and the value's name, where another value
    # changes only the part of the result that is computed from it
    varies: Mapping[int, tuple[str, str]]
    context: tuple[object, ...] = ()  # other inputs of the parser

    @classmethod
    def of(cls, lines: list[str], read: T, varies: Callable[[str], bool]) -> ParsedTemplate[T]:
        """varies: whether the value of a path may vary; paths with several lines never may."""
        starts = [line[: line.find(":") + 1] for line in lines]
        counts = Counter(starts)
        varying = {
            index: (start, start[:-1])
            for index, start in enumerate(starts)
            if start and counts[start] == 1 and varies(start[:-1])
        }
        return cls(tuple(lines), read, varying)

    def differing(self, lines: list[str]) -> dict[str, str] | None:
        """Name -> differing value, for equally many lines; None where anything else differs."""
        differing_values: dict[str, str] = {}
        for index in compress(count(), map(ne, lines, self.lines)):
            start, name = self.varies.get(index, ("", ""))
            if not start or not lines[index].startswith(start):
                return None
            differing_values[name] = lines[index][len(start) :]
        return differing_values


class TemplateCache(Generic[T]):
    """The parsed templates of one section, the latest of each length."""

    #: Maximum templates of one length, and characters of a template.
    _EACH, _LONGEST = 4, 1 << 16

    def __init__(self, lengths: int = 64) -> None:
        self._lengths = lengths
        self._known: dict[tuple[object, ...], list[ParsedTemplate[T]]] = {}

    def adapted(
        self, adapt: Callable[[T, Mapping[str, str]], T | None], lines: list[str], *context: object
    ) -> T | None:
        """The result for these lines, adapted from a template's; None: no template fits.

        adapt: (the template's result, the differing values) -> the result, or None
        """
        templates = self._known.get((len(lines), lines[0], context), [])
        for template in templates:
            differing = template.differing(lines)
            read = None if differing is None else adapt(template.read, differing)
            if read is not None:
                # The last used comes first, so that texts of odd nodes do not evict it.
                templates.remove(template)
                templates.insert(0, template)
                return read
        return None

    def keep(self, template: ParsedTemplate[T]) -> None:
        if sum(map(len, template.lines)) > self._LONGEST:
            return
        key = len(template.lines), template.lines[0], template.context
        templates = self._known.pop(key, [])
        if len(self._known) >= self._lengths:
            del self._known[next(iter(self._known))]
        self._known[key] = [*templates[: self._EACH - 1], template]
