"""A verdict about a node never depends on a file or a name of the machine that judges.

Whenever a test observes or judges, a read of this machine by a module of `subjects` fails the
test. The functions of pwd, grp and locale tell no audit hook of their reads: the test of the walls
keeps these modules out.
"""

import os
import sys
from typing import Any

import pytest

from tests.paths import PACKAGE, ROOT

_SUBJECTS = f"{PACKAGE / 'subjects'}{os.sep}"
#: nodeready's own installation is the same on every machine.
_OWN = (str(PACKAGE), str(ROOT / "templates"))
#: Events of sys.audit: a file or a directory is read, a name is looked up, a program is started.
_READS = ("open", "os.listdir", "os.scandir", "os.posix_spawn", "subprocess.Popen", "socket.get")


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: fails the test for a read of this machine by a module of `subjects`."""
    if not event.startswith(_READS) or "".join(map(str, arguments[:1])).startswith(_OWN):
        return
    frame = sys._getframe(1)
    while frame:
        path = frame.f_code.co_filename
        if path.startswith("<frozen importlib"):
            # A module that is imported late.
            return
        if path.startswith(_SUBJECTS):
            # Not an exception: a mistake in a parser becomes a result elsewhere.
            pytest.fail(f"{path}:{frame.f_lineno} reads this machine: {event} {arguments!r:.200}")
        frame = frame.f_back
