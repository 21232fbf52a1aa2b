"""Judge whether the tools are there with which a hung or crashed job is looked into."""

from __future__ import annotations

from nodeready.policy import Policy
from nodeready.shell import quote
from nodeready.subjects.debug_tools.facts import DIGESTS, MANAGERS, PROBE, PY_SPY, DebugTools
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


@check(
    "debug_tools.py_spy",
    settings=("py_spy_version",),
    fixed_by="debug_tools.py_spy",
    fix=("chown root PATH; chmod go-w PATH",),
)
def py_spy(seen: DebugTools, want: Policy) -> Result:
    """/usr/local/bin/py-spy is of the policy's version, root's alone, and everybody may run it.

    One version on all nodes: its JSON is what the stacks are read from. Jobs attach to their own
    processes as their own user, so the file needs the bits for everybody; root runs it, too, so
    nobody but root may be able to change it, or a directory on the way to it. The program of a
    version that nodeready knows is told by its sha256, any other by what it says of itself.
    """
    check, version = "debug_tools.py_spy", want.py_spy_version
    if not version:
        return na(check, "the policy leaves py-spy alone")
    if seen.machine not in MACHINES:
        return na(check, f"no static py-spy for {seen.machine}")
    if seen.py_spy is None:
        return fixable(check, version, "not installed", PY_SPY)
    if seen.lost:
        paths = " ".join(map(quote, seen.lost))
        fix = f"chown root {paths}; chmod go-w {paths}"
        return fail(check, version, f"others can change {', '.join(seen.lost)}", PY_SPY, fix)
    if seen.exposed:
        actual = f"others can change {', '.join(seen.exposed)}"
        return fixable(check, version, actual, PY_SPY)
    if seen.mode & 0o555 != 0o555:
        return fixable(check, version, f"{seen.py_spy or '?'} with mode {seen.mode:o}", PY_SPY)
    if seen.py_spy != version:
        return fixable(check, version, seen.py_spy or "does not run", PY_SPY)
    known = DIGESTS.get((version, seen.machine))
    if known is None:
        return ok(check, version, f"{version}, by its own word: its sha256 is not known", PY_SPY)
    if seen.sha256 != known:
        actual = f"another program that says {version} (sha256 {seen.sha256[:12]}…)"
        return fixable(check, version, actual, PY_SPY)
    return ok(check, version, version, PY_SPY)


SUBJECT = Subject(
    "debug_tools",
    __doc__,
    checks=(packages, py_spy),
    probe=PROBE,
)
