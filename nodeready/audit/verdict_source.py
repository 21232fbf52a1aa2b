"""Where the nodes' verdicts are collected, and one host's record there."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from nodeready.subjects.result import Result
from nodeready.text import sanitise

_LABEL = r"[A-Za-z_][A-Za-z0-9_]*"
#: The text of a result that is known by a metric alone.
NO_TEXT = "told by a metric, which has no text"


class HostRecord(NamedTuple):
    """One host's record in a source.

    host:    as the source calls it
    time:    when the node was judged, in seconds since 1970
    results: without those that are known by their number alone
    counts:  status -> how many results are known by their number alone
    problem: why there is no verdict, in one line; "": there is one
    labels:  of its target, beside those that name the host: two hosts with other ones are two
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
    """Where verdicts are collected.

    shown:     for people: without a user
    url:       of Prometheus, without a user; "": a directory
    labels:    that its targets must have
    directory: "": Prometheus
    header:    for Authorization; never shown
    """

    shown: str
    url: str = ""
    directory: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    header: str = field(default="", repr=False)


def source(words: str, token: str = "") -> Source:
    """What ``--recorded`` names. Raises ValueError.

    token: for ``Authorization: Bearer``; a directory has no use for it
    """
    from urllib.parse import parse_qsl, unquote, urlsplit

    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", words):
        return Source(sanitise(words, 200), directory=words)
    if re.search(r"[^\x21-\x7e]", words):
        raise ValueError("has a character that no address has")
    try:
        parts = urlsplit(words)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if not host or parts.scheme not in ("http", "https") or parts.fragment:
        raise ValueError("must be a directory, or the address of a Prometheus: http://HOST:9090")
    try:
        labels = tuple(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError:
        labels = (("", ""),) if parts.query else ()
    if not all(re.fullmatch(_LABEL, label) for label, _ in labels):
        raise ValueError("must have labels of targets behind its ?: http://HOST:9090?cluster=a")
    user, at, place = parts.netloc.rpartition("@")
    if at and token:
        raise ValueError("has a user, and there is a token: only one of them can be sent")
    header = f"Bearer {token}" if token else ""
    if at:
        name, _, password = user.partition(":")
        pair = f"{unquote(name)}:{unquote(password)}".encode()
        header = f"Basic {base64.b64encode(pair).decode()}"
    url = f"{parts.scheme}://{place}{parts.path.rstrip('/')}"
    shown = f"{url}?{parts.query}" if labels else url
    return Source(shown, url=url, labels=labels, header=header)
