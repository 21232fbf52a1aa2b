"""Install the debugging tools: the distribution's packages, the control machine's py-spy, and the
program that starts a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from nodeready.core.policy import Policy
from nodeready.runs.deploy import actions, py_spy_binary
from nodeready.runs.deploy.pyinfra import step
from nodeready.subjects.access import COMPANIONS, FOLDERS
from nodeready.subjects.debug_tools import facts
from nodeready.subjects.snapshot import Snapshot

#: Seconds for a whole installation, the wait for the package manager's lock included.
_TIMEOUT_S = 600


@step(timeout_s=120)
def py_spy(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Put the control machine's static py-spy into /usr/local/bin: the node needs no network.

    Raises PlanError when the control machine has no py-spy for the node's kind of machine.
    """
    tools: facts.DebugTools = snapshot["debug_tools"]
    if facts.PY_SPY in tools.no_files:
        return  # a person removes what stands there
    is_installed = tools.py_spy is not None
    # What a node reports counts only where it is a parent directory of this constant path.
    parents = set(map(str, PurePosixPath(facts.PY_SPY).parents))
    closed = (path for path in tools.closed if path in parents)
    yield from (actions.RunCommand(("chmod", "a+rx", path)) for path in closed)
    note = actions.Script(
        "note", ("nr_note", facts.PY_SPY, facts.PY_SPY_NOTE), f"note the sha256 of {facts.PY_SPY}"
    )
    digest = facts.DIGESTS.get((policy.py_spy_version, tools.machine))
    if is_installed and (tools.exposed or (tools.linked and not tools.mode)):
        # No link of another user, and no broken link, is followed; no file keeps its owner.
        yield actions.RemoveFile(facts.PY_SPY)
        is_installed = False
    elif is_installed and tools.mode & 0o555 != 0o555:
        # An existing file keeps its mode when it is written.
        yield actions.RunCommand(("chmod", "0755", facts.PY_SPY))
        if tools.py_spy == policy.py_spy_version and digest in (None, tools.sha256):
            yield note
            return
    try:
        content = py_spy_binary.binary(policy.py_spy_version, tools.machine)
    except py_spy_binary.PySpyError as error:
        raise actions.PlanError(str(error)) from None
    test = f'[ "$("$1" --version)" = "py-spy {policy.py_spy_version}" ]'
    validator = ("sh", "-c", f"{test} || {{ echo 'it does not run'; exit 1; }}", "sh")
    old = b"" if is_installed else None
    yield actions.WriteFile(
        facts.PY_SPY, content, old, mode="0755", validator=validator, large=True
    )
    yield note


@step(touches=["pdsh", "ssh_client"], timeout_s=_TIMEOUT_S, settings=("package_lock_wait_s",))
def packages(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Install the missing packages with one refresh of the index at most; open programs that users
    cannot run, and reinstall packages whose programs are gone or do not start.
    """
    tools: facts.DebugTools = snapshot["debug_tools"]
    wait_s = min(policy.package_lock_wait_s, _TIMEOUT_S - 60)
    # The node's answer only chooses among names of the policy and of this program.
    manager = next((name for name in facts.MANAGERS if name == tools.manager), "")
    missing = [name for name in policy.packages if name in tools.missing]
    troubles = tuple(facts.unusable(tools, policy))
    closed = dict.fromkeys(program.path for _, program in troubles if program.repair == "chmod")
    yield from (actions.RunCommand(("chmod", "a+rx", path)) for path in closed)
    if not manager:
        return
    if missing:
        words = ("nr_packages", manager, str(wait_s), *missing)
        yield actions.Script("packages", words, f"install {' '.join(missing)} with {manager}")
    gone = [(name, program) for name, program in troubles if program.repair == "reinstall"]
    reinstalled = [(package, _program(package, program.path)) for package, program in gone]
    if reinstalled:
        names = " ".join(dict.fromkeys(package for package, _ in reinstalled))
        pairs = [word for pair in reinstalled for word in pair]
        words = ("nr_again", manager, str(wait_s), *pairs)
        yield actions.Script("packages", words, f"install {names} again with {manager}")


def _program(package: str, path: str) -> str:
    """The program's path where it is one that the policy names; "-": another of its package."""
    folder, _, name = path.rpartition("/")
    packages_ = (package, *COMPANIONS.get(package, ()))
    return path if folder in FOLDERS and name in packages_ else "-"


@step()
def run(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Write `nodeready run` as one file, which needs only the node's Python."""
    tools: facts.DebugTools = snapshot["debug_tools"]
    if facts.RUN in tools.no_files:
        return  # a person removes what stands there
    program = tools.run
    if program is not None and program.owner:
        # A file keeps its owner when it is written.
        yield actions.RemoveFile(facts.RUN)
        program = None
    if program is None or program.sha256 != facts.digest():
        test = 'sh "$0" --help >/dev/null || { echo "it does not run"; exit 1; }'
        old = None if program is None else b""
        validator = ("sh", "-c", test)
        yield actions.WriteFile(
            facts.RUN, facts.content(), old, mode="0755", validator=validator, large=True
        )
    if program is not None and program.mode != 0o755:
        yield actions.RunCommand(("chmod", "0755", facts.RUN))


STEPS = (py_spy, run, packages)
