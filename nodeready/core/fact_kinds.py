"""The kinds of a subject's facts: what a comparison of two looks at a node compares, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

VOLATILE, COUNTER = "volatile", "counter"
HARDWARE, VERSION, SETTING = "hardware", "version", "setting"


@dataclass(frozen=True, eq=False)
class FactKinds:
    """The kinds of a subject's facts; a fact without a kind is a setting.

    Each text has words with white space between. A word is the end of a fact's path, which is its
    keys with dots, without the names of elements: ``clock.offset_ms``. It includes all facts below
    it that no other word names. Of two words for one path the longer counts.
    """

    # change by themselves or from run to run (temperatures, process ids, lines' numbers), or
    # repeat another fact: neither kept nor compared
    volatile: str = ""
    counters: str = ""  # totals that grow until the node boots
    hardware: str = ""  # what a machine consists of
    versions: str = ""  # of software and firmware
    counted: str = ""  # long lists; their number of elements and a digest are compared
    # hardware or settings that differ on healthy peers: serial numbers, addresses
    unique: str = ""
    # path of a list -> the keys that identify an element, with spaces between; path of a mapping
    # of names -> ""
    elements: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def kind(self, path: str) -> str:
        """The kind of the fact with this path.

        >>> FactKinds(versions="nvidia.vbios").kind("nvidia.vbios")
        'version'
        """
        return _nearest(_kinds(self.volatile, self.counters, self.hardware, self.versions), path)

    def is_counted(self, path: str) -> bool:
        """Whether only the number of the elements is shown of the list with this path."""
        return bool(_nearest(_kinds(self.counted), path, ""))

    def is_unique(self, path: str) -> bool:
        """Whether healthy peers differ in the fact with this path."""
        return bool(_nearest(_kinds(self.unique), path, ""))


@lru_cache(maxsize=256)
def _kinds(*texts: str) -> Mapping[str, str]:
    """Word -> its kind."""
    kinds = (VOLATILE, COUNTER, HARDWARE, VERSION)
    return {word: kind for kind, text in zip(kinds, texts) for word in text.split()}


def _nearest(kinds: Mapping[str, str], path: str, default: str = SETTING) -> str:
    """The kind of the longest word that ends the path, else of the nearest path above it."""
    while path:
        end = path
        while end:
            if end in kinds:
                return kinds[end]
            end = end.partition(".")[2]
        path = path.rpartition(".")[0]
    return default
