"""Judge whether the tools are there with which a hung or crashed job is looked into."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.subjects.debug_tools.facts import MANAGERS, PROBE, PY_SPY, DebugTools
from nodeready.subjects.declare import Subject, check
from nodeready.subjects.result import Result, fail, fixable, na, ok

#: The machines for which py-spy's wheels hold a static binary.
MACHINES = ("x86_64", "aarch64")


@check(
    "debug_tools.packages",
    settings=("packages",),
    fixed_by="debug_tools.packages",
    fix=("install MISSING the way this distribution does",),
)
def packages(seen: DebugTools, want: Policy) -> Result:
    """The policy's packages are installed: a hung job is no time to look for a mirror."""
    check = "debug_tools.packages"
    if not want.packages:
        return na(check, "the policy names no package")
    expected, missing = " ".join(want.packages), " ".join(seen.missing)
    if not seen.missing:
        return ok(check, expected)
    if not seen.manager:
        fix = f"install {missing} the way this distribution does"
        return fail(check, expected, f"missing: {missing}; none of {', '.join(MANAGERS)}", "", fix)
    return fixable(check, expected, f"missing: {missing}")


@check("debug_tools.py_spy", settings=("py_spy_version",), fixed_by="debug_tools.py_spy")
def py_spy(seen: DebugTools, want: Policy) -> Result:
    """/usr/local/bin/py-spy is of the policy's version and everybody may run it.

    One version on all nodes: its JSON is what the stacks are read from. Jobs attach to their own
    processes as their own user, so the file needs the bits for everybody.
    """
    check, version = "debug_tools.py_spy", want.py_spy_version
    if not version:
        return na(check, "the policy leaves py-spy alone")
    if seen.machine not in MACHINES:
        return na(check, f"no static py-spy for {seen.machine}")
    if seen.py_spy is None:
        return fixable(check, version, "not installed", PY_SPY)
    if seen.mode & 0o555 != 0o555:
        return fixable(check, version, f"{seen.py_spy or '?'} with mode {seen.mode:o}", PY_SPY)
    if seen.py_spy != version:
        return fixable(check, version, seen.py_spy or "does not run", PY_SPY)
    return ok(check, version, version, PY_SPY)


SUBJECT = Subject(
    "debug_tools",
    __doc__,
    checks=(packages, py_spy),
    probe=PROBE,
)
