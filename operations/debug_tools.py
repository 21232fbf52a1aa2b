"""Install the debugging tools: the distribution's packages, and the control machine's py-spy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from nodeready.deploy import py_spy_binary
from nodeready.deploy.actions import Action, PlanError, RemoveFile, Run, Script, WriteFile
from nodeready.deploy.step import step
from nodeready.policy import Policy
from nodeready.subjects.access import COMPANIONS, FOLDERS
from nodeready.subjects.debug_tools.facts import (
    DIGESTS,
    MANAGERS,
    PY_SPY,
    PY_SPY_NOTE,
    DebugTools,
    UnusablePackage,
    unusable,
)
from nodeready.subjects.snapshot import Snapshot

#: Seconds for a whole installation, the wait for the package manager's lock included.
_TIMEOUT_S = 600


@step(timeout_s=120)
def py_spy(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Put the control machine's static py-spy into /usr/local/bin: the node needs no network.

    Raises PlanError when the control machine has no py-spy for the node's kind of machine.
    """
    tools: DebugTools = seen["debug_tools"]
    there = tools.py_spy is not None
    # Those on the way to a constant path.
    yield from (Run(("chmod", "a+rx", path)) for path in tools.closed if is_on_the_way(path))
    note = Script("note", ("nr_note", PY_SPY, PY_SPY_NOTE), f"note the sha256 of {PY_SPY}")
    known = DIGESTS.get((want.py_spy_version, tools.machine))
    if there and (tools.exposed or (tools.linked and not tools.mode)):
        # No link of theirs is followed, or one that leads nowhere; no file keeps its owner.
        yield RemoveFile(PY_SPY)
        there = False
    elif there and tools.mode & 0o555 != 0o555:
        # An existing file keeps its mode when it is written.
        yield Run(("chmod", "0755", PY_SPY))
        if tools.py_spy == want.py_spy_version and known in (None, tools.sha256):
            yield note
            return
    try:
        content = py_spy_binary.binary(want.py_spy_version, tools.machine)
    except py_spy_binary.PySpyError as error:
        raise PlanError(str(error)) from None
    test = f'[ "$("$1" --version)" = "py-spy {want.py_spy_version}" ]'
    yield WriteFile(
        PY_SPY,
        content,
        b"" if there else None,
        mode="0755",
        validator=("sh", "-c", f"{test} || {{ echo 'it does not run'; exit 1; }}", "sh"),
        large=True,
    )
    yield note


def is_on_the_way(path: str) -> bool:
    """Whether it is a directory on the way to the py-spy of ours."""
    return path in map(str, PurePosixPath(PY_SPY).parents)


@step(touches=["pdsh", "ssh_client"], timeout_s=_TIMEOUT_S)
def packages(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Install the missing packages with one refresh of the index at most; open programs that are
    closed to users, and install those again whose files are gone or do not start."""
    tools: DebugTools = seen["debug_tools"]
    wait_s = min(want.package_lock_wait_s, _TIMEOUT_S - 60)
    # What the node says chooses among what the policy and this program name.
    manager = next((name for name in MANAGERS if name == tools.manager), "")
    missing = [name for name in want.packages if name in tools.missing]
    troubles = tuple(unusable(tools, want))
    closed = dict.fromkeys(one.stuck.path for one in troubles if one.stuck.mend == "chmod")
    yield from (Run(("chmod", "a+rx", path)) for path in closed)
    if not manager:
        return
    if missing:
        yield Script(
            "packages",
            ("nr_packages", manager, str(wait_s), *missing),
            f"install {' '.join(missing)} with {manager}",
        )
    again = [one for one in troubles if one.stuck.mend == "reinstall"]
    if again:
        names = " ".join(dict.fromkeys(one.package for one in again))
        pairs = [word for one in again for word in (one.package, _program(one))]
        yield Script(
            "packages",
            ("nr_again", manager, str(wait_s), *pairs),
            f"install {names} again with {manager}",
        )


def _program(one: UnusablePackage) -> str:
    """The program's path where it is one that the policy names; "-": another of its package."""
    folder, _, name = one.stuck.path.rpartition("/")
    known = (one.package, *COMPANIONS.get(one.package, ()))
    return one.stuck.path if folder in FOLDERS and name in known else "-"


STEPS = (py_spy, packages)
