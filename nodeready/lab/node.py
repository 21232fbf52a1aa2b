"""The nodes of a lab: start and stop them, log in to one, look into it, break it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodeready.lab import boot, faults, network, processes, slurm, state
from nodeready.lab.boot import STASH
from nodeready.lab.image import new_key
from nodeready.lab.network import listening, port
from nodeready.lab.processes import Content, Done
from nodeready.lab.state import LabError, LabState, NodeState

if TYPE_CHECKING:
    from nodeready.lab.cluster import Lab

# --- Start and stop nodes, while this process holds the lab's lock.

# Told the number of nodes that are ready, and of how many.
Progress = Callable[[int, int], None]
Files = Mapping[str, Content]

_SSH_CONFIG = """\
Host *
    User root
    IdentityFile {ssh}/id_ed25519
    IdentitiesOnly yes
    UserKnownHostsFile {ssh}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
    LogLevel ERROR
"""


def alive(one: NodeState) -> bool:
    """Does its process 1 live?"""
    return one.pid > 0 and processes.started_at(one.pid) == one.started


def kill(one: NodeState) -> None:
    """Take its power away."""
    if alive(one):
        group = boot.freezer_group_of(one.pid)
        processes.end(one.pid, meanwhile=lambda: boot.thaw_group(group) if group else None)


def new_node(lab: LabState, number: int) -> NodeState:
    """Node `number` of the lab, not started yet."""
    # The default lab's nodes are called what the examples call them. Elsewhere a name that
    # ends in a digit needs something between itself and the number.
    prefix = "node" if lab.name == "lab" else lab.name
    dash = "-" if prefix[-1].isdigit() else ""
    return _new_machine(lab, number, f"{prefix}{dash}{number:03d}")


def new_controller(lab: LabState) -> NodeState:
    """The machine of Slurm's controller, not started yet."""
    name = "slurmctl" if lab.name == "lab" else f"{lab.name}-slurmctl"
    return _new_machine(lab, slurm.CONTROLLER_NUMBER, name)


def _new_machine(lab: LabState, number: int, name: str) -> NodeState:
    key = new_key(f"root@{name}")
    address = str(network.address(lab.index, number).ip)
    return NodeState(name, number, address, key.private, key.public)


def grow(
    lab: LabState,
    count: int,
    files: Files | None,
    progress: Progress | None = None,
    fault: str | None = None,
) -> int:
    """Start what is dead, or missing to `count` nodes; how many that were.

    With a `fault` the last node has it, and is started again if it ran without it; with "", no
    node has one. On an exception the missing ones are missing again.
    """
    _end_strays(lab)
    network.make_room(count)
    if processes.started_at(lab.switch) != lab.switch_started:
        # Without its switch no node can be reached: they get a new one, and new wires.
        lab.switch = 0
        network.delete_interface(lab.index)
        for one in lab.machines():
            kill(one)
    old = list(lab.nodes)
    before = [one.fault for one in old]
    if fault == "":
        _change_faults(old, fault)
    elif fault and count <= len(old):
        _change_faults(old[-1:], fault)
    dead = [one for one in old if not alive(one)]
    # A controller that never ran has no disk to keep.
    first = [one for one in lab.beside() if not one.pid]
    again = [one for one in lab.beside() if one.pid and not alive(one)]
    new = [new_node(lab, number) for number in range(len(old) + 1, count + 1)]
    if new and fault:
        new[-1].fault = fault
    try:
        start(lab, again, None, keep_disk=True)
        start(lab, dead, None, progress, keep_disk=True)
        lab.nodes = old + new
        # A node that finds no controller, or one that does not know it, asks again a second later.
        if first:
            start(lab, first, None)
        elif new:
            slurm.spread(lab)
        start(lab, new, files, progress)
        if new:
            _tell_hosts([*old, *(one for one in lab.beside() if one not in first)], new)
    except BaseException:
        if new:
            processes.end_all(state.directory(lab.name), [one.name for one in new])
        for one in new:
            shutil.rmtree(_home(lab, one), ignore_errors=True)
        lab.nodes = old
        for one, had in zip(old, before, strict=True):
            one.fault = had
        state.save(lab)
        with contextlib.suppress(LabError):
            slurm.spread(lab)
        raise
    return len(dead) + len(new)


def _change_faults(nodes: Sequence[NodeState], fault: str) -> None:
    for one in nodes:
        if one.fault != fault:
            kill(one)
            one.fault = fault


def _end_strays(lab: LabState) -> None:
    """End what a killed command began and nobody knows of."""
    known = {lab.switch, *(one.pid for one in lab.machines())}
    for pid in processes.of_lab(state.directory(lab.name)):
        if pid not in known:
            processes.end(pid)


def start(
    lab: LabState,
    nodes: Sequence[NodeState],
    files: Files | None,
    progress: Progress | None = None,
    keep_disk: bool = False,
) -> None:
    """Start these nodes, all of them new or dead, and wait until they can be logged in to.

    On an exception none of them runs.
    """
    if not nodes:
        return
    specs = []
    for one in nodes:
        _prepare_disk(lab, one, keep_disk)
        content = {} if keep_disk else {**_own_files(lab, one), **(files or {})}
        content.update(slurm.files(lab, one))
        gone: list[str] = []
        if one.fault:
            _keep(lab, one, content)
            wrong, gone = faults.changes(one.fault, lab.profile)
            content = {**content, **wrong}
        specs.append(processes.spec(lab.index, one, content, gone, slurm.group(lab, one)))
    _write_ssh(lab)
    try:
        _boot(lab, {one.name: one for one in nodes}, specs, progress)
        for one in nodes:
            if one.fault:
                faults.act(one.fault, one.pid)
                _note(lab, one, new=not keep_disk)
        slurm.wait_until_known(lab, nodes)
    except BaseException:
        # Some may run that had no time to say so.
        processes.end_all(state.directory(lab.name), [one.name for one in nodes])
        raise
    finally:
        state.save(lab)


def _boot(
    lab: LabState,
    nodes: Mapping[str, NodeState],
    specs: list[dict[str, Any]],
    progress: Progress | None,
) -> None:
    """Have the helper start them, and note what it answers."""
    problems: list[str] = []
    ready = 0
    with contextlib.closing(processes.boot(lab, specs)) as answers:
        for answer in answers:
            if "switch" in answer:
                lab.switch = answer["switch"]
                lab.switch_started = processes.started_at(lab.switch) or 0
            elif "error" in answer:
                problems.append(f"{answer.get('node', 'network')}: {answer['error']}")
            else:
                one = nodes[answer["node"]]
                one.pid = answer["pid"]
                one.started = processes.started_at(one.pid) or 0
                ready += 1
                if progress:
                    progress(ready, len(nodes))
    if ready < len(nodes):
        log = (state.directory(lab.name) / processes.LOG).read_text(errors="replace").split("\n")
        first = [*problems, *log[-2:], "their helper ended early"]
        why = next(line for line in first if line)
        raise LabError(f"{len(nodes) - ready} of {len(nodes)} nodes did not start: {why}")


def _home(lab: LabState, one: NodeState) -> Path:
    return state.directory(lab.name) / "fs" / "nodes" / one.name


def _prepare_disk(lab: LabState, one: NodeState, keep: bool) -> None:
    """An empty disk, or the one there is without what does not survive a power cycle."""
    home = _home(lab, one)
    disk = home / f"g{one.generation}"
    if keep:
        _take_back(lab, one)
        for gone in (STASH, "/run", "/tmp", "/dev"):
            shutil.rmtree(disk / "upper0" / gone.lstrip("/"), ignore_errors=True)
    elif disk.exists():
        # The kernel may still be letting go of the old one: never use it again.
        one.generation += 1
        shutil.rmtree(disk, ignore_errors=True)
    home.mkdir(exist_ok=True)
    shutil.rmtree(home / _BEFORE, ignore_errors=True)


# --- What a fault changes on a node's disk is taken back at the next start.
#
# All writes of a node are in the upper layers of its overlays, a few hundred files. Before a node
# starts with a fault they are copied; when the fault is there, what differs is noted. At the next
# start each path that is still as the fault made it becomes what it was. So a fault may break any
# file, a deploy may repair it, and what others write in the meantime stays.

_BEFORE = "before"
_NOTED = "fault.json"


def _states(disk: Path) -> dict[str, list[Any]]:
    """Each path of the disk's upper layers, with what tells one state of it from another."""
    found = {}
    for layer in disk.glob("upper*"):
        for path in layer.rglob("*"):
            seen = path.lstat()
            told: list[Any] = [seen.st_mode, seen.st_uid, seen.st_gid]
            if stat.S_ISDIR(seen.st_mode):
                told.append("trusted.overlay.opaque" in os.listxattr(path))
            else:
                told += [seen.st_rdev, seen.st_size, seen.st_mtime_ns]
            found[str(path.relative_to(disk))] = told
    return found


def _keep(lab: LabState, one: NodeState, content: Files) -> None:
    """Copy its disk as it is before its fault, with the content that a new one gets."""
    home = _home(lab, one)
    disk, kept = home / f"g{one.generation}", home / _BEFORE
    kept.mkdir()
    for layer in disk.glob("upper*"):
        _copy(layer, kept / layer.name)
    for path, item in content.items():
        text, mode = item if isinstance(item, tuple) else (item, 0o644)
        file = kept / "upper0" / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        file.write_bytes(raw)
        file.chmod(mode)


def _copy(what: Path, where: Path) -> None:
    """With all attributes: some say what of the layers below is hidden (overlayfs)."""
    processes.run(["cp", "-a", "-T", str(what), str(where)]).check_returncode()


def _like(old: Path, directory: Path) -> None:
    shutil.copystat(old, directory)
    seen = old.stat()
    os.chown(directory, seen.st_uid, seen.st_gid)


def _note(lab: LabState, one: NodeState, new: bool) -> None:
    """Note how the fault has left what it changed, on a new disk or an old one."""
    home = _home(lab, one)
    disk, kept = home / f"g{one.generation}", home / _BEFORE
    if new:
        for directory in kept.glob("upper*/**/"):
            if (same := disk / directory.relative_to(kept)).is_dir():
                _like(same, directory)
    before, after = _states(kept), _states(disk)
    changed = {
        path: after.get(path)
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path)
    }
    state.write(home / _NOTED, json.dumps(changed))


def _take_back(lab: LabState, one: NodeState) -> None:
    """Undo what the fault of its last start has changed on its disk."""
    home = _home(lab, one)
    disk, kept, noted = home / f"g{one.generation}", home / _BEFORE, home / _NOTED
    if not noted.exists():
        return
    now = _states(disk)
    made = json.loads(noted.read_text())
    changed = [path for path, told in made.items() if now.get(path) == told]
    # The deepest first: a directory that the fault made goes when nothing is left in it.
    for path in sorted(changed, reverse=True):
        there, old = disk / path, kept / path
        if there.is_dir() and not there.is_symlink():
            with contextlib.suppress(OSError):
                there.rmdir()
        else:
            # Where its directory was removed, something else may have the directory's place.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                there.unlink()
            if os.path.lexists(old) and there.parent.is_dir() and not old.is_dir():
                _copy(old, there)
    for path in sorted(changed):
        there, old = disk / path, kept / path
        if not os.path.lexists(there) and os.path.lexists(old):
            _copy(old, there)
        elif there.is_dir() and old.is_dir():
            _like(old, there)
    noted.unlink()


def _own_files(lab: LabState, one: NodeState) -> dict[str, Content]:
    own = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
    return {
        "/etc/hostname": f"{one.name}\n",
        "/etc/hosts": own + "".join(_host_line(node) for node in lab.machines()),
        "/etc/ssh/ssh_host_ed25519_key": (one.host_key, 0o600),
        "/etc/ssh/ssh_host_ed25519_key.pub": f"{one.host_key_public}\n",
    }


def _host_line(one: NodeState) -> str:
    return f"{one.address} {one.name}\n"


def _tell_hosts(old: Sequence[NodeState], new: Sequence[NodeState]) -> None:
    """Append, so that what a person wrote there stays."""
    lines = "".join(_host_line(one) for one in new)
    for one in old:
        processes.enter(one.pid, ["sh", "-c", "cat >> /etc/hosts"], lines)


def _write_ssh(lab: LabState) -> None:
    """What a client needs to log in: names, addresses and keys of all nodes."""
    ssh = state.directory(lab.name) / "ssh"
    known, hosts = "", ""
    for one in lab.machines():
        kind, key = one.host_key_public.split()[:2]
        known += f"{one.name},{one.address} {kind} {key}\n"
        hosts += f"Host {one.name}\n    HostName {one.address}\n"
    state.write(ssh / "known_hosts", known)
    state.write(ssh / "ssh_config", hosts + _SSH_CONFIG.format(ssh=ssh))


# --- One node, for tests and people.


class Node:
    """A node, by its name in the lab; `name`, `address` and `number` never change."""

    def __init__(self, lab: Lab, known: NodeState) -> None:
        self.lab = lab
        self.name = known.name
        self.address = known.address
        self.number = known.number

    def __repr__(self) -> str:
        return f"Node({self.name}, {self.address}, {self.status})"

    @property
    def _state(self) -> NodeState:
        return self.lab.state_of(self.name)

    @property
    def pid(self) -> int:
        """Its process 1, as this machine numbers it. Raises LabError when the node is dead."""
        if not self.alive:
            raise LabError(f"{self.name} is dead; `nodeready lab up` starts it again")
        return self._state.pid

    @property
    def alive(self) -> bool:
        """Does its process 1 live?"""
        return alive(self._state)

    @property
    def status(self) -> str:
        """`up`, `no sshd` or `dead`."""
        if not self.alive:
            return "dead"
        return "up" if listening(self._state.pid) else "no sshd"

    @property
    def fault(self) -> str:
        """The name of what is wrong with it; "": nothing."""
        return self._state.fault

    @property
    def log(self) -> Path:
        """What its init and sshd said."""
        return self.lab.directory / "fs" / "nodes" / self.name / "log"

    def run(
        self,
        command: str,
        user: str = "root",
        input: str | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> Done:
        """Run a shell command over ssh, with a session of its own, as any client would.

        Raises LabError with the command's own message when `check` and it fails,
        subprocess.TimeoutExpired after `timeout` seconds.
        """
        argv = ["ssh", "-F", str(self.lab.ssh_config), "-l", user, self.name, "--", command]
        return self._checked(command, processes.run(argv, input or "", timeout), check)

    def enter(
        self,
        argv: Sequence[str],
        input: str | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> Done:
        """Run a program as root in the node's namespaces without ssh: works on a broken node."""
        done = processes.enter(self.pid, argv, input or "", timeout)
        return self._checked(shlex.join(argv), done, check)

    def _checked(self, shown: str, done: Done, check: bool) -> Done:
        if check and done.returncode:
            raise LabError(
                f"{self.name}: `{shown}`: exit {done.returncode}: {done.stderr.strip()}"
            )
        return done

    def read(self, path: str) -> str:
        """A file's content."""
        return self.enter(["cat", "--", path]).stdout

    def write(self, path: str, content: str | bytes, mode: int | None = None) -> None:
        """Write a file in place, through a link if it is one; directories are made."""
        if isinstance(content, bytes):
            content = content.decode("utf-8", "surrogateescape")
        # `cat > file` keeps owner and mode of what is there, and works on bind-mounted files.
        script = 'mkdir -p -- "${1%/*}/" && cat > "$1" && { [ -z "$2" ] || chmod "$2" "$1"; }'
        self.enter(["sh", "-c", script, "sh", path, f"{mode:o}" if mode else ""], input=content)

    def inventory_data(self) -> tuple[str, dict[str, Any]]:
        """The node as a pyinfra host, with all that it takes to log in."""
        data = {
            "ssh_hostname": self.address,
            "ssh_user": "root",
            "ssh_key": str(self.lab.ssh_key),
            "ssh_known_hosts_file": str(self.lab.known_hosts),
            "ssh_strict_host_key_checking": "yes",
        }
        return self.name, data

    def testinfra(self, user: str = "root") -> Any:
        """A testinfra host for this node, over plain ssh."""
        import testinfra

        # No shared connection: it would outlive the test, and keep the limits of its login.
        spec = f"ssh://{user}@{self.name}?controlpersist=0"
        return testinfra.get_host(spec, ssh_config=str(self.lab.ssh_config))

    def kill(self) -> None:
        """The node loses power: nothing answers at its address."""
        kill(self._state)

    def freeze(self) -> None:
        """The cable is pulled: connections neither answer nor close."""
        self.lab.switch_ip(f"link set dev {port(self.number)} down")

    def thaw(self) -> None:
        """The cable is back."""
        self.lab.switch_ip(f"link set dev {port(self.number)} up")

    def stop_sshd(self) -> None:
        """Connections are refused; those that are open stay."""
        # It is told, and goes a moment later: until then it takes connections.
        script = """
            pid=$(cat /run/sshd.pid) && kill "$pid" || exit 1
            for i in $(seq 200); do kill -0 "$pid" 2>/dev/null || exit 0; sleep 0.05; done
            exit 1
        """
        self.enter(["sh", "-c", script])

    def pause_sshd(self) -> None:
        """Connections open, and no banner ever comes."""
        self.enter(["sh", "-c", 'kill -STOP "$(cat /run/sshd.pid)"'])

    def resume_sshd(self) -> None:
        """Undo `pause_sshd`, or start sshd after `stop_sshd`; it takes connections then."""
        # sshd goes into the background before it listens, and writes its number after that.
        script = """
            kill -CONT "$(cat /run/sshd.pid)" 2>/dev/null && exit 0
            rm -f /run/sshd.pid
            /usr/sbin/sshd || exit 1
            for i in $(seq 200); do [ -s /run/sshd.pid ] && exit 0; sleep 0.05; done
            exit 1
        """
        self.enter(["sh", "-c", script])

    def reboot(self, fault: str | None = None) -> None:
        """Power off and on: the disk stays, /run, /tmp and live kernel values do not.

        With `fault` this is wrong with it from now on; "": nothing is.
        """
        self.lab.restart([self], keep_disk=True, fault=fault)

    def reset(
        self,
        files: Mapping[str, Content] | None = None,
        new_host_key: bool = False,
        fault: str = "",
    ) -> None:
        """Make it as fresh as on the first day, plus these files and this fault.

        With `new_host_key` it is a re-imaged node: whoever knew it must refuse it.
        """
        self.lab.restart(
            [self], keep_disk=False, files=files, new_host_key=new_host_key, fault=fault
        )
