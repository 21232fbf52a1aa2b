"""The files of ours on a node, for diffs and so that a change knows what it replaces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nodeready.policy import Policy
from nodeready.probes.base import Output, Probe, Section, file_lines


def _script(patterns: tuple[str, ...]) -> str:
    return rf"""
    set --
    for nr_file in {" ".join(patterns)}; do
        if [ -f "$nr_file" ]; then set -- "$@" "$nr_file"; fi
    done
    if [ $# != 0 ]; then nr_lines "$@"; fi
    """


def parse(outputs: Mapping[str, Output], policy: Policy) -> dict[str, bytes]:
    """The content of each file of ours, by path; they all end with a newline."""
    lines: dict[str, list[str]] = {}
    for line in file_lines(outputs["ours"].require()):
        lines.setdefault(line.path, []).append(line.text + "\n")
    return {path: "".join(text).encode("utf-8", "surrogateescape") for path, text in lines.items()}


def probe(patterns: Iterable[str]) -> Probe:
    """The probe that reads every file of these shell patterns: the files that we own outright."""
    text = _script(tuple(dict.fromkeys(patterns)))
    return Probe("ours", (Section("ours", lambda policy: text),), parse)
