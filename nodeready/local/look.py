"""The look at this machine: the same script as over ssh, and the same reading of its answer."""

from __future__ import annotations

import os
from collections.abc import Iterable

from nodeready import shell, snapshot
from nodeready.local.child import Child
from nodeready.policy import Policy
from nodeready.probes import script
from nodeready.snapshot import Snapshot

#: Of the time, for what is left when a section was ended: no network is in between here, and a
#: second more or less decides whether a busy node is taken for a broken one.
_MARGIN_S = 1


class Look:
    """A look that has begun. `snapshot` is what it showed, once its child was gathered.

    subjects: what to look at; None: all
    limit_s:  seconds after which nobody waits for it any more; the script gives up what is slow
              before that, so that the rest of the answer still arrives
    """

    def __init__(self, policy: Policy, subjects: Iterable[str] | None, limit_s: float) -> None:
        self._policy, self._limit_s = policy, limit_s
        self._nonce = os.urandom(6).hex()
        self._probes = snapshot.probes(subjects)
        seconds = max(1, int(limit_s))
        sections = snapshot.sections(self._probes)
        text = script.make_script(sections, policy, self._nonce, seconds, _MARGIN_S)
        self.child = Child(shell.command(text, seconds + 1, f"nodeready:{self._nonce}"))

    def snapshot(self) -> Snapshot:
        """What was seen; every subject is Unknown when nothing came in time."""
        if not self.child.whole:
            reason = f"no answer within {self._limit_s:.0f} s"
            return snapshot.nothing(reason, self._probes, self.child.text[:200])
        return snapshot.read(self.child.text, self._probes, self._policy, self._nonce)
