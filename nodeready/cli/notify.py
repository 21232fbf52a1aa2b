"""`--notify URL`: a webhook that gets the nodes whose status has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from nodeready import __version__
from nodeready.audit.document import NODE_STATUSES, Audit
from nodeready.audit.verdict import SourceError, gather
from nodeready.audit.web_request import open_answer, web_address
from nodeready.cli.options import Refused
from nodeready.cli.screen import Screen
from nodeready.files import private_file, state_directory, write_atomically
from nodeready.reports.notification import bad_statuses, notification
from nodeready.text import sanitise

#: Seconds for the whole request: a look that is repeated must not wait for a server that hangs.
LIMIT_S = 10.0


@dataclass(frozen=True)
class Webhook:
    """The server that is notified.

    shown: its scheme, host and port: a path or a query may hold a token
    key:   a name for the address and for what is compared there
    """

    url: str = field(repr=False)
    header: str = field(repr=False)
    shown: str
    key: str

    def _state_file(self) -> Path:
        return state_directory() / "notified" / f"{self.key}.json"

    def last_statuses(self) -> dict[str, str]:
        """`bad_statuses` at the last notification; {} where there is none that can be read."""
        try:
            statuses = json.loads(private_file(self._state_file(), make=False).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        rows = statuses.items() if isinstance(statuses, dict) else ()
        return {name: status for name, status in rows if status in NODE_STATUSES}

    def _keep(self, statuses: Mapping[str, str]) -> None:
        path = private_file(self._state_file(), make=True)
        write_atomically(path, [json.dumps(statuses)], 0o600)

    def notify(self, audit: Audit, command: str, inventory: str, screen: Screen) -> None:
        """Send what has changed, if anything has. A failure is one line, and tried again at the
        next look. An interrupted look is not compared: its missing nodes have no status."""
        before = self.last_statuses()
        changed = notification(audit, before, command, inventory) if audit.complete else None
        if changed is None:
            return
        names = {node.name for node in audit.nodes}
        unselected = {name: status for name, status in before.items() if name not in names}
        try:
            # All files stay open: gevent aborts the fork without those of its event loop.
            for _ in gather([partial(self._post, changed.body())], LIMIT_S, self.shown, None):
                pass
            self._keep({**unselected, **bad_statuses(audit)})
        except SourceError as error:
            screen.say(f"--notify: {error}; the next look tries again")
        except OSError as error:
            reason = f"{error.strerror or error}: {error.filename or self._state_file()}"
            screen.say(f"--notify: {reason}; the next look sends it again")

    def _post(self, body: bytes, send: Any) -> None:
        from urllib.request import Request

        headers = {"Content-Type": "application/json", "User-Agent": f"nodeready/{__version__}"}
        request = Request(self.url, body, headers, method="POST")
        if self.header:
            request.add_unredirected_header("Authorization", self.header)

        def refusal(code: int, answer: bytes) -> str:
            return f"{self.shown}: HTTP {code}"

        with open_answer(request, self.shown, LIMIT_S, refusal):
            pass


def webhook(words: str | None, *look: str | None) -> Webhook | None:
    """The webhook of ``--notify``; None without it. Raises Refused.

    look: what is compared: the command and its selection of checks
    """
    if words is None:
        return None
    try:
        parts, host, header = web_address(words, "must be an address: https://HOST/PATH")
    except ValueError as error:
        raise Refused(f"--notify: {error}") from None
    source = click.get_current_context().get_parameter_source("notify")
    if header and source is click.core.ParameterSource.COMMANDLINE:
        raise Refused(
            "--notify: a password on the command line is seen by everybody: put the URL into "
            "NODEREADY_NOTIFY or config.toml"
        )
    key = hashlib.sha256(json.dumps([words, *look]).encode()).hexdigest()[:16]
    url = parts._replace(netloc=host).geturl()
    return Webhook(url, header, sanitise(f"{parts.scheme}://{host}", 200), key)
