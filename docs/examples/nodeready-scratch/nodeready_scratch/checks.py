"""Judge the scratch directory: every user can write there, and it has room."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.subjects.result import Result, Subject, check, fixable, na, ok, warn
from nodeready.subjects.severity import loses_job
from nodeready_scratch.facts import DIRECTORY, PROBE, Scratch

MODE = "1777"
#: Above this, a checkpoint of a large model may not fit.
MAX_USED_PCT = 90


@check("scratch.directory", loses_job("deploy"), fixed_by="scratch.directory")
def directory(observed: Scratch, policy: Policy) -> Result:
    """The directory /scratch exists, and all users may write there (mode 1777)."""
    if observed.mode == MODE:
        return ok("scratch.directory", MODE, source=DIRECTORY)
    return fixable("scratch.directory", MODE, observed.mode or "no directory", DIRECTORY)


@check("scratch.room", loses_job("clean_up"), fix=("remove old files below /scratch",))
def room(observed: Scratch, policy: Policy) -> Result:
    """At most 90 % of the file system of /scratch is in use."""
    check = "scratch.room"
    if observed.used_pct is None:
        return na(check, f"no directory {DIRECTORY}")
    expected, actual = f"at most {MAX_USED_PCT}% used", f"{observed.used_pct}% used"
    if observed.used_pct > MAX_USED_PCT:
        return warn(check, expected, actual, DIRECTORY, f"remove old files below {DIRECTORY}")
    return ok(check, expected, actual, DIRECTORY)


SUBJECT = Subject(
    "scratch",
    __doc__,
    checks=(directory, room),
    probe=PROBE,
    files=("/etc/tmpfiles.d/nodeready-scratch.conf",),
)
