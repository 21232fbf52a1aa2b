"""A request to a web server that an option names: its address, and its answer or one line."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from nodeready.audit.verdict import SourceError
from nodeready.text import sanitise

if TYPE_CHECKING:
    from urllib.request import Request


class WebAddress(NamedTuple):
    """An address by http or https.

    parts:  of the address
    host:   the host and port, without a user
    header: value of the header Authorization for the address's user; "": none. Never shown
    """

    parts: SplitResult
    host: str
    header: str


def web_address(text: str, form: str) -> WebAddress:
    """The parts of an address. Raises ValueError, with ``form`` for a text that is none."""
    if re.search(r"[^\x21-\x7e]", text):
        raise ValueError("has a character that no address has")
    try:
        parts = urlsplit(text)
        name, _ = parts.hostname, parts.port
    except ValueError:
        name, parts = None, urlsplit("")
    if not name or parts.scheme not in ("http", "https") or parts.fragment:
        raise ValueError(form)
    credentials, has_user, host = parts.netloc.rpartition("@")
    header = ""
    if has_user:
        user, _, password = credentials.partition(":")
        pair = f"{unquote(user)}:{unquote(password)}".encode()
        header = f"Basic {base64.b64encode(pair).decode()}"
    return WebAddress(parts, host, header)


@contextlib.contextmanager
def open_answer(
    request: Request, shown: str, limit_s: float, refusal: Callable[[int, bytes], str]
) -> Iterator[Any]:
    """The answer to a request. A redirect is not followed: its address would get the password.

    shown:   the address in errors, without secrets
    refusal: (HTTP status, beginning of the answer) -> the error of a refused request
    Raises SourceError, also for an error while the answer is read.
    """
    import http.client
    import urllib.error
    import urllib.request

    class RefuseRedirects(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: Any, fp: Any, code: int, *details: Any) -> None:
            # Without its path and query, which may repeat a secret of the address.
            parts = urlsplit(str(details[-1]))
            address = sanitise(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", 200)
            raise SourceError(f"{shown}: leads to {address}: name that, if it is right")

    opener = urllib.request.build_opener(RefuseRedirects)
    try:
        with opener.open(request, timeout=limit_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        with contextlib.suppress(OSError, http.client.HTTPException):
            raise SourceError(refusal(error.code, error.read(4096))) from None
        raise SourceError(f"{shown}: HTTP {error.code}") from None
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise SourceError(f"{shown}: {sanitise(str(reason), 300)}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise SourceError(f"{shown}: {sanitise(str(reason), 300)}") from None
