"""The program on the node: become the job's user, run the canaries, print their results.

Started by root, the program opens a session for the user (``su -``, through PAM as every login)
and runs there once more; root's part observes what only root can see. Started by the user, it runs
as it is. From the user's session it goes by ssh to the node itself, and repeats the quick proofs
there. Each observation is printed as a line (`nodeready.core.wire`) when it is complete, so a
proof that hangs costs only its own observation.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import grp
import mmap
import os
import pwd
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nodeready.agent import payload
from nodeready.agent.proc import user_name
from nodeready.agent.proofs import attach, core, peers, session
from nodeready.agent.runtime import ProcessSupervisor, bug_text, hold_streams
from nodeready.core import wire
from nodeready.subjects.proof.facts import (
    FURTHER_SESSIONS,
    IN_EACH_SESSION,
    SHM,
    DeviceNode,
    JobDirectory,
    ProofConfig,
    Resources,
    SessionProof,
    User,
)

# --- The proof that the user can use directories, shared memory and device files as a job does.
#
# Each directory is tried with a file of 1 MiB that has no name.

#: The files that CUDA, ROCm, NCCL and MPI open.
_DEVICES = (
    "/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd",
    "/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm",
)  # fmt: skip
#: Bytes that are written, more than a file system reserves for a small file.
_BYTES = 1 << 20


def prove_resources(supervisor: ProcessSupervisor, config: ProofConfig) -> Resources:
    """Write to the directories, map the files, and try to open the device files."""
    home = pwd.getpwuid(os.geteuid()).pw_dir
    places = dict.fromkeys(("/tmp", SHM, home))
    devices = sorted(path for pattern in _DEVICES for path in glob.glob(pattern))
    if os.path.exists("/dev/kfd"):
        devices += sorted(glob.glob("/dev/dri/renderD*"))
    return Resources(
        tuple(_place(path) for path in places if os.path.isabs(path)),
        tuple(filter(None, map(_device, devices))),
        home,
        _memory_bytes("/"),
    )


def _place(path: str) -> JobDirectory:
    """Whether files in a directory can be written, mapped and executed."""
    number = -1
    try:
        # A file without a name leaves nothing behind, even if this process is killed.
        number = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o700)
    except OSError as problem:
        # Network file systems do not support files without a name.
        if isinstance(problem, (PermissionError, FileNotFoundError, NotADirectoryError)):
            return JobDirectory(path, _words(problem))
    try:
        if number < 0:
            number, name = tempfile.mkstemp(prefix=".nodeready-", dir=path)
            os.unlink(name)
        os.posix_fallocate(number, 0, _BYTES)
        with mmap.mmap(number, _BYTES) as shared:
            shared[:1] = b"x"
        free = os.fstatvfs(number)
    except OSError as problem:
        return JobDirectory(path, _words(problem))
    else:
        return JobDirectory(path, "", _executes(number), free.f_bavail * free.f_frsize)
    finally:
        if number >= 0:
            os.close(number)


def _memory_bytes(root: str) -> int | None:
    """The free memory and swap, at most the lowest memory.max of this session's cgroups (v2). A
    cgroup's current use is ignored, because it counts files that the kernel can drop. None:
    /proc/meminfo cannot be read.
    root: the directory of /proc and /sys
    """
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        names = ("MemAvailable", "SwapFree")
        memory_bytes = sum(int(fields[name].split()[0]) << 10 for name in names)
    except (OSError, ValueError, KeyError):
        return None
    with contextlib.suppress(OSError, UnicodeError):
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as file:
            groups = [line[3:].strip() for line in file if line.startswith("0::/")]
        for group in groups:
            parts = group.strip("/").split("/")
            for depth in range(len(parts)):
                path = Path(root, "sys/fs/cgroup", *parts[: depth + 1], "memory.max")
                # There is no limit if the file is missing or has "max".
                with contextlib.suppress(OSError, ValueError):
                    memory_bytes = min(memory_bytes, int(path.read_text(encoding="ascii")))
    return memory_bytes


def _executes(number: int) -> str:
    """Why the loader cannot map code from a file; "": it can."""
    try:
        mmap.mmap(number, _BYTES, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as problem:
        return _words(problem)
    return ""


def _words(problem: OSError) -> str:
    return problem.strerror or str(problem)


def _device(path: str) -> DeviceNode | None:
    """A device file whose mode or ACL excludes the user; None: the user may open it. A cgroup that
    reserves a device for other jobs gives EPERM, which is no fault of the file.
    """
    if os.access(path, os.R_OK | os.W_OK):
        return None
    try:
        # The kernel refuses before it calls the driver, so the device is not opened.
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError as problem:
        if problem.errno != errno.EACCES:
            return None
        status = os.stat(path)
        owner = f"{user_name(status.st_uid)}:{_group(status.st_gid)}"
        return DeviceNode(path, f"{stat.S_IMODE(status.st_mode):04o} {owner}")
    except OSError:
        return None
    return None


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# --- The program.

_PROVE: dict[str, Callable[[ProcessSupervisor, ProofConfig], Any]] = {
    "limits": session.prove,
    "attach": attach.prove,
    "tracers": attach.prove_tracers,
    "core": core.prove,
    "resources": prove_resources,
    "peers": peers.prove,
}

#: Minimum time limit for a login: with less, a login that hangs cannot be told from a slow one.
_LOGIN_S = 5

_printing = threading.Lock()


def _say(config: ProofConfig, name: str, observed: Any) -> None:
    with _printing:
        print(wire.line(config.nonce, name, observed), flush=True)


def _observe(config: ProofConfig, name: str, observe: Callable[[], Any]) -> None:
    """Make and print one observation. An exception is printed as an observation, so it costs no
    other proof.
    """
    try:
        observed = observe()
    except Exception as problem:  # noqa: BLE001
        observed = session.BrokenProof(bug_text(problem))
    _say(config, name, observed)


def _in_thread(config: ProofConfig, name: str, observe: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=_observe, args=(config, name, observe), daemon=True)
    thread.start()
    return thread


def _proofs(
    supervisor: ProcessSupervisor, config: ProofConfig, further: Mapping[str, Callable[[], Any]]
) -> None:
    """Run the requested proofs in parallel: py-spy's native unwinding alone takes seconds."""
    proofs = {name: partial(_PROVE[name], supervisor, config) for name in config.proofs}
    observations: dict[str, Callable[[], Any]] = {**further, **proofs}
    for thread in [_in_thread(config, name, observe) for name, observe in observations.items()]:
        # A little longer, because a proof reports by itself that its time is over.
        thread.join(supervisor.left_s + 0.5)


def _end_with_parent(supervisor: ProcessSupervisor) -> None:
    """End everything when our parent has ended: our standard input is a pipe of the parent."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        supervisor.end()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(config: ProofConfig, *, inside: bool = False) -> None:
    """Run all proofs.
    inside: this is the session that root opened for the user
    """
    hold_streams()
    supervisor = ProcessSupervisor(config.tag, config.limit_s)

    def leave(number: int, frame: object) -> None:
        # Nothing more is printed: the output of a killed tool is no observation. This thread may
        # already hold the lock.
        _printing.acquire(blocking=False)
        supervisor.end()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    with supervisor:
        if inside:
            _end_with_parent(supervisor)
            _in_own_session(supervisor, config, inside=True)
        elif os.geteuid() == 0 and config.user not in ("", "root"):
            _as_user(supervisor, config)
        else:
            control = os.geteuid() == 0 and "attach" in config.proofs
            _in_own_session(supervisor, config, control=control)
        _printing.acquire()


def _in_own_session(
    supervisor: ProcessSupervisor,
    config: ProofConfig,
    *,
    control: bool = False,
    inside: bool = False,
) -> None:
    """The proofs in this session.
    control: we are root, and also attach as root
    inside:  another nodeready program opened the session, and observes how the node opens sessions
    """
    uid = os.geteuid()
    login = user_name(uid)
    if config.user and login != config.user:
        reason = session.cannot_become(login, config.user)
        _say(config, "user", User(config.user, uid, True, reason))
        return
    if config.machine and session.identity() != config.machine:
        _say(config, "user", User(login, uid, True, f"{os.uname().nodename} answers"))
        return
    _say(config, "user", User(login, uid, bool(config.user), ""))
    parallel: dict[str, Callable[[], Any]] = {}
    if control:
        parallel["control"] = partial(attach.control, supervisor, config)
    if not inside and _depends_on_session(config):
        parallel["logins"] = partial(session.logins, supervisor, login)
    if not config.machine and _depends_on_session(config):
        parallel |= _other_sessions(supervisor, config)
    _proofs(supervisor, config, parallel)


def _depends_on_session(config: ProofConfig) -> bool:
    """Whether a proof is requested whose result depends on how the session was opened."""
    return not {*IN_EACH_SESSION}.isdisjoint(config.proofs)


def _other_sessions(
    supervisor: ProcessSupervisor, config: ProofConfig
) -> dict[str, Callable[[], Any]]:
    """The proofs in further sessions that this session can open, by name."""
    sessions: dict[str, Callable[[], Any]] = {}
    opened_by, name = session.opened_by()[0], user_name(os.geteuid())
    if opened_by != "ssh":
        sessions["ssh"] = partial(session.by_ssh, supervisor, config)
    elif session.shell_of(name):
        sessions["login"] = partial(session.by_shell, supervisor, config, name, "login")
    is_step_wanted = config.step and "limits" in config.proofs
    if is_step_wanted and session.step_matters(session.limits_of_daemon("slurmd")):
        sessions["step"] = partial(session.by_srun, supervisor, config)
    return sessions


def _as_user(supervisor: ProcessSupervisor, config: ProofConfig) -> None:
    """Run the user's session, and root's control in parallel."""
    try:
        uid = pwd.getpwnam(config.user).pw_uid
    except KeyError:
        _say(config, "user", User(config.user, -1, True, f"no such user: {config.user}"))
        return
    threads = []
    if "attach" in config.proofs:
        control = partial(attach.control, supervisor, config, uid)
        threads.append(_in_thread(config, "control", control))
    threads.append(_in_thread(config, "logins", partial(session.logins, supervisor, config.user)))
    inner = replace(
        config,
        limit_s=max(1, int(supervisor.left_s) - 2),
        # Inside a job of Slurm, there may be no room for another job.
        step=config.step and "SLURM_JOB_ID" not in os.environ,
    )
    has_begun = by_shell = False

    def relay(text: str) -> None:
        # The user can learn the nonce in the session and print observations of the session, but
        # none of root's observations.
        nonlocal has_begun, by_shell
        try:
            rows = dict(wire.lines(text, config.nonce))
            by_ssh_session = (
                wire.decode(SessionProof, rows["ssh"]) if "ssh" in rows else SessionProof("")
            )
        except wire.DecodeError:
            return
        if not rows or not {*rows} <= {"user", *inner.proofs, *FURTHER_SESSIONS}:
            return
        has_begun = has_begun or "user" in rows
        if by_ssh_session.error and not by_ssh_session.ended and not by_shell:
            by_shell = True
            observe = partial(session.by_shell, supervisor, config, config.user, "shell")
            threads.append(_in_thread(config, "shell", observe))
        # A profile's output may stand before the line.
        with _printing:
            print(text[text.index(f"{config.nonce} ") :], flush=True)

    make_program = partial(payload.inner_program, __name__, inner)
    ended = session.run(supervisor, config.user, make_program, relay)
    if not has_begun and not (ended.rc is None and config.limit_s < _LOGIN_S):
        reason = session.no_session(ended, config.user)
        _say(config, "user", User(config.user, uid, True, reason))
    for thread in threads:
        thread.join(supervisor.left_s)
