"""Where the nodes' verdicts are collected, and one host's record there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from nodeready.audit.web_request import web_address
from nodeready.subjects.result import Result
from nodeready.text import sanitise

_LABEL = r"[A-Za-z_][A-Za-z0-9_]*"
#: The text of a result that was read from a metric.
NO_TEXT = "told by a metric, which has no text"


class HostRecord(NamedTuple):
    """One host's record in a source.

    host:    its name in the source
    time:    when the node was judged, in seconds since 1970
    counts:  (status, number of further results with only a status)
    problem: why there is no verdict, in one line; "": there is one
    labels:  of its target, without those that name the host; records of one host with different
             labels are of different nodes
    """

    host: str
    time: float = 0.0
    policy_digest: str = ""
    version: str = ""
    results: tuple[Result, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    problem: str = ""
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Source:
    """A directory or a Prometheus with the verdicts of the nodes.

    shown:     the source in messages, without a user and password
    url:       of Prometheus, without a user and password; "": a directory
    labels:    of Prometheus's targets; other targets are ignored
    directory: "": Prometheus
    header:    value of the header Authorization; never shown
    """

    shown: str
    url: str = ""
    directory: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    header: str = field(default="", repr=False)


def source(text: str, token: str = "") -> Source:
    """The source that ``--recorded`` names. Raises ValueError.

    token: for ``Authorization: Bearer``; unused for a directory
    """
    from urllib.parse import parse_qsl

    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return Source(sanitise(text, 200), directory=text)
    parts, host, header = web_address(
        text, "must be a directory, or the address of a Prometheus: http://HOST:9090"
    )
    try:
        labels = tuple(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError:
        labels = (("", ""),) if parts.query else ()
    if not all(re.fullmatch(_LABEL, label) for label, _ in labels):
        raise ValueError("must have labels of targets behind its ?: http://HOST:9090?cluster=a")
    if header and token:
        raise ValueError("has a user, and there is a token: only one of them can be sent")
    if token:
        header = f"Bearer {token}"
    url = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
    shown = f"{url}?{parts.query}" if labels else url
    return Source(shown, url=url, labels=labels, header=header)
