"""Judge whether the tools for hung or crashed jobs are installed, and usable by every user."""

from __future__ import annotations

from nodeready import __version__
from nodeready.core.policy import Policy
from nodeready.core.result import FactKinds, Result, Subject, check, join_first
from nodeready.core.severity import hides_cause
from nodeready.core.shell import PACKAGES, quote
from nodeready.subjects.access import MAY_EXECUTE
from nodeready.subjects.debug_tools import facts
from nodeready.subjects.debug_tools.facts import PY_SPY, RUN, DebugTools, digest, unusable
from nodeready.subjects.proof.facts import NOEXEC

#: The machines for which py-spy's wheels hold a static binary.
MACHINES = ("x86_64", "aarch64")
_PYTHON_FIX = "install Python 3.9 or newer beside it"


@check("debug_tools.packages", hides_cause("deploy", "configure", "install"),
       settings=("packages",), fixed_by="debug_tools.packages", fix=(
    "install MISSING the way this distribution does",
    "chmod a+rx PATH",
    "remove PATH, or put a program there that runs",
    "install PACKAGE again the way this distribution does",
    "let every user run PATH, or name in job_user a member of that group",
))  # fmt: skip
def packages(observed: DebugTools, policy: Policy) -> Result:
    """The policy's packages are installed, and every user can run their programs.

    When a job hangs, it is too late to install packages. An installed package fails where its
    program is gone, empty, lacks a library (ld.so(8), --list), or where users may not execute it,
    by its own mode or by that of a directory on the way (path_resolution(7)).
    """
    if not policy.packages:
        return packages.na("the policy names no package")
    check, missing = packages.expecting(" ".join(policy.packages)), " ".join(observed.missing)
    unusable_packages = tuple(unusable(observed, policy))
    troubles = [program for _, program in unusable_packages]
    if not observed.missing and not troubles:
        return check.ok()
    problems = [f"missing: {missing}"] if missing else []
    problems += dict.fromkeys(trouble.words for trouble in troubles)
    actual, source = join_first(problems), troubles[0].path if troubles else ""
    without_manager = f"{actual}; none of {', '.join(facts.MANAGERS)}"
    repairs = {trouble.repair for trouble in troubles}
    if "chmod" in repairs or (observed.manager and (missing or "reinstall" in repairs)):
        return check.fixable(actual, source)
    if missing:
        fix = f"install {missing} the way this distribution does"
        return check.fail(without_manager, source, fix)
    trouble = troubles[0]
    if trouble.chosen:
        fix = f"let every user run {trouble.path}, or name in job_user a member of that group"
        return check.warn(actual, source, fix)
    if trouble.repair == "reinstall":
        fix = f"install {unusable_packages[0][0]} again the way this distribution does"
        return check.fail(without_manager, source, fix)
    paths = {quote(trouble.path): "has mode" in trouble.words for trouble in troubles}
    quoted_closed = " ".join(path for path, has_mode in paths.items() if has_mode)
    quoted_broken = " ".join(path for path, has_mode in paths.items() if not has_mode)
    fixes = [f"chmod a+rx {quoted_closed}"] if quoted_closed else []
    if quoted_broken:
        fixes.append(f"remove {quoted_broken}, or put a program there that runs")
    return check.fail(actual, source, "; ".join(fixes))


_NO_FILE, _REMOVE = "a directory or a device, no file", "remove {}, then nodeready deploy"


@check("debug_tools.py_spy", hides_cause("deploy", "configure"), settings=("py_spy_version",),
       fixed_by="debug_tools.py_spy",
       fix=("chown root PATH; chmod go-w PATH", MAY_EXECUTE.format("PATH"),
            _REMOVE.format("PATH")))  # fmt: skip
def py_spy(observed: DebugTools, policy: Policy) -> Result:
    """/usr/local/bin/py-spy has the policy's version, and all users but root may only execute it.

    All nodes need one version, since `stacks` reads its JSON. A job's user attaches to the job's
    processes, so all users must be able to execute the file. Root executes it, too, so only root
    may be able to change the file or a directory on the way to it. A sha256 identifies the
    versions that nodeready knows; any other program is asked for its version.
    """
    if not (version := policy.py_spy_version):
        return py_spy.na("the policy leaves py-spy alone")
    if observed.machine not in MACHINES:
        return py_spy.na(f"no static py-spy for {observed.machine}")
    check = py_spy.expecting(version)
    if PY_SPY in observed.no_files:
        return check.fail(_NO_FILE, PY_SPY, _REMOVE.format(PY_SPY))
    if observed.py_spy is None:
        return check.fixable("not installed", PY_SPY)
    if observed.lost:
        quoted = " ".join(map(quote, observed.lost))
        fix = f"chown root {quoted}; chmod go-w {quoted}"
        return check.fail(f"others can change {', '.join(observed.lost)}", PY_SPY, fix)
    if observed.exposed:
        return check.fixable(f"others can change {', '.join(observed.exposed)}", PY_SPY)
    if observed.closed:
        return check.fixable(f"users cannot enter {', '.join(observed.closed)}", PY_SPY)
    if observed.mode & 0o555 != 0o555:
        return check.fixable(f"{observed.py_spy or '?'} with mode {observed.mode:o}", PY_SPY)
    if observed.noexec:
        return check.fail(NOEXEC, PY_SPY, MAY_EXECUTE.format(PY_SPY))
    if observed.py_spy != version:
        return check.fixable(observed.py_spy or "does not run", PY_SPY)
    if (known_digest := facts.DIGESTS.get((version, observed.machine))) is None:
        return check.ok(f"{version}, by its own word: its sha256 is not known", PY_SPY)
    if observed.sha256 != known_digest:
        actual = f"another program that says {version} (sha256 {observed.sha256[:12]}…)"
        return check.fixable(actual, PY_SPY)
    return check.ok(version, PY_SPY)


@check("debug_tools.python", hides_cause("install"), expects="Python 3.9 or newer", fix=(
    "add 'PACKAGE' to packages in group_data and deploy, or MANAGER install PACKAGE",
    _PYTHON_FIX,
))  # fmt: skip
def python(observed: DebugTools, policy: Policy) -> Result:
    """The node has a Python of 3.9 or newer, which starts nodeready's programs there.

    The proofs of `ready`, `smoke`, `stacks`, `jobs`, `cores`, `tail`, `watch`, `incident` and the
    node's own check need it, and only its standard library. It need not be the default: python3,
    then python3.13 to python3.9 are tried. RHEL 8 and SLES 15 have Python 3.6, Ubuntu 20.04 has
    3.8, and a package with a newer one beside it: python3.11, python311, python3.9.
    """
    if observed.python:
        return python.ok(observed.python)
    package = PACKAGES.get(observed.manager)
    if observed.manager == "apt-get" and not observed.old_python:
        package = "python3"
    fix = _PYTHON_FIX
    if package:
        deploy_fix = f"add '{package}' to packages in group_data and deploy"
        fix = f"{deploy_fix}, or {observed.manager} install {package}"
    return python.fail(observed.old_python or "none", "", fix)


@check("debug_tools.run", hides_cause("deploy", "configure"), settings=("nodeready_run",),
       fixed_by="debug_tools.run", fix=_REMOVE.format("PATH"))  # fmt: skip
def run(observed: DebugTools, policy: Policy) -> Result:
    """/usr/local/bin/nodeready-run is that of this nodeready, and all users can execute it.

    It starts one rank of a job so that its hang can be examined, as `nodeready run` does, on nodes
    without an installation. It belongs to root, who alone may change what every user starts. One
    of another version is a warning: it still starts a rank, and stops no job.
    """
    program = observed.run
    if not policy.nodeready_run:
        return run.na("nodeready_run is False")
    if not observed.python:
        return run.na("no Python for it: see debug_tools.python")
    check = run.expecting(f"nodeready {__version__}")
    if RUN in observed.no_files:
        return check.fail(_NO_FILE, RUN, _REMOVE.format(RUN))
    if program is None:
        return check.fixable("not installed", RUN)
    if program.owner or program.mode != 0o755:
        actual = f"uid {program.owner}, mode {program.mode:o}"
        return run.fixable(actual, RUN, expected="uid 0, mode 755")
    if not program.sha256:
        return run.unknown(f"{RUN} cannot be read")
    if program.sha256 != digest():
        return check.fixable("another version, or changed", RUN, status="warn")
    return check.ok(source=RUN)


_ELEMENTS = {
    "broken": "package path", "access.seen": "", "access.links": "", "access.unloaded": "",
}  # fmt: skip
SUBJECT = Subject(
    "debug_tools", __doc__, checks=(packages, py_spy, python, run), probe=facts.PROBE,
    kinds=FactKinds(
        # Which of the policy's packages there are, the result and the subject host say.
        volatile="size_bytes missing registered",
        hardware="machine",
        versions="py_spy python old_python sha256",
        elements=_ELEMENTS,
    ),
)  # fmt: skip
