"""What a word that nobody knows was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that ``word`` begins, or else resembles most; "" when there is none."""
    # Few runs need it, and a node's own program starts often.
    import difflib

    names = list(known)
    begun = [name for name in names if len(word) > 1 and name.startswith(word)]
    if begun:
        return begun[0]
    # Hardly a run has a word that nobody knows.

    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=cutoff)), "")
