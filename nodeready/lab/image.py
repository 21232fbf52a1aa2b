"""The layer that every node of a lab shares: it makes an overlay of this machine a FRESH node.

`build` writes it once per lab; it is the middle layer of the nodes' overlays, between their writes
and this machine's root. An opaque directory hides this machine's; a whiteout hides one file. So no
configuration of this machine (ssh, sysctl, limits, home directories) reaches a node. Its packages
do, except those that differ between machines (Slurm's daemons, a vendor's GPU tool, csh's
settings).
"""

from __future__ import annotations

import contextlib
import glob
import grp
import os
import pwd
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodeready.lab.boot import REAL_SYS, STASH
from nodeready.lab.hardware import Link, Tree, read_toml
from nodeready.lab.host import can_raise_limits
from nodeready.lab.profiles import Profile
from nodeready.lab.state import LabError

# The directories, files, links and devices of a fresh node, and what of this machine it hides. All
# paths are those of the node.
_DATA = read_toml("image")
FRESH: dict[str, int] = _DATA["fresh"]

# The ordinary user of every node, who may become root there. Root of a node is close to root of
# this machine: no user of this machine has this user's number.
USER = "ml"
USER_IDS = range(2000, 60000)

# Slurm's daemons and their services.
SLURM = (
    *(os.path.realpath(f"/lib/systemd/system/slurm{d}.service") for d in ("d", "ctld", "dbd")),
    *(f"/usr/sbin/slurm{which}" for which in ("d", "ctld", "stepd", "dbd")),
)

OURS = ("/etc", "/usr/local", "/var/lib", "/var/cache")  # directories with files of nodeready


# --- The layer under construction: directories, files, links, devices, whiteouts.


class Image:
    """The layer under construction; paths are those of the node."""

    def __init__(self, base: Path) -> None:
        self.base = base
        base.mkdir(mode=0o755)

    def directory(self, path: str, mode: int | None = None, opaque: bool = False) -> Path:
        """A directory. Without a mode, it and its parents get this machine's attributes."""
        path_in_layer = self.base / path.lstrip("/")
        if not path_in_layer.is_dir():
            self.directory(os.path.dirname(path))
            path_in_layer.mkdir(mode=0o755)
            if os.path.isdir(path):
                shutil.copystat(path, path_in_layer)
                status = os.stat(path)
                os.chown(path_in_layer, status.st_uid, status.st_gid)
        if mode is not None:
            path_in_layer.chmod(mode)
        if opaque:
            os.setxattr(path_in_layer, "trusted.overlay.opaque", b"y")
        return path_in_layer

    def _path(self, path: str) -> Path:
        """The path in the layer, in a directory that exists."""
        return self.directory(os.path.dirname(path)) / os.path.basename(path)

    def file(self, path: str, content: str, mode: int = 0o644, owner: int = 0) -> None:
        path_in_layer = self._path(path)
        path_in_layer.write_text(content)
        path_in_layer.chmod(mode)
        os.chown(path_in_layer, owner, owner)

    def link(self, path: str, target: str) -> None:
        """A symbolic link, unless the path exists."""
        path_in_layer = self._path(path)
        if not os.path.lexists(path_in_layer):
            path_in_layer.symlink_to(target)

    def tree(self, path: str, tree: Tree) -> None:
        self.directory(path)
        for name, content in tree.items():
            if isinstance(content, Link):
                self.link(f"{path}/{name}", content.target)
            elif name.endswith("/"):
                self.directory(f"{path}/{name[:-1]}")
            else:
                self.file(f"{path}/{name}", content)

    def device(self, path: str, mode: int, number: Sequence[int] = (1, 3)) -> None:
        """A device file; without a number it behaves as /dev/null."""
        path_in_layer = self._path(path)
        os.mknod(path_in_layer, stat.S_IFCHR, os.makedev(*number))
        path_in_layer.chmod(mode)

    def hide(self, path: str) -> None:
        """Hide a path of this machine by a whiteout."""
        path_in_layer = self._path(path)
        if not os.path.lexists(path_in_layer):
            os.mknod(path_in_layer, stat.S_IFCHR, os.makedev(0, 0))


# --- The node's /proc, /sys and kernel log.
#
# They lie below STASH in the lab's layer; nodeready.lab.boot lays them over the real ones.

# Directories of this machine that a node does not show.
_HIDDEN = ("/sys/class/infiniband", "/sys/class/infiniband_verbs")


def build_kernel(image: Image, profile: Profile) -> None:
    """Write /proc, /sys and the kernel log to the layer."""
    hardware = profile.hardware
    image.directory(STASH, 0o755)
    image.file(f"{STASH}/proc/cmdline", profile.cmdline + "\n", 0o444)
    for path, content in _sysctls().items():
        image.file(f"{STASH}/proc/sys/{path}", content)
    for path, value in hardware.sysctls.items():
        image.file(f"{STASH}/proc/sys/{path}", f"{value}\n")
    image.directory(f"{STASH}/proc/sys/net", 0o555)
    for path, tree in trees(profile).items():
        image.tree(STASH + path, tree)
    for target in targets(profile):
        if target not in trees(profile):
            # The kernel allows no additions to /sys, so the directory above the addition is
            # replaced: it gets links to its real entries.
            image.directory(REAL_SYS)
            real = f"{REAL_SYS}{target.removeprefix('/sys')}"
            for name in os.listdir(target):
                image.link(f"{STASH}{target}/{name}", f"{real}/{name}")
    if hardware.start:
        image.file(f"{STASH}/start", hardware.start)
    # The real kernel's log is that of the whole machine.
    image.file("/usr/bin/dmesg", _DATA["dmesg"], 0o755)
    image.file(f"{STASH}/kernel.log", kernel_log(*hardware.kernel_log))


def kernel_log(*lines: tuple[float, str]) -> str:
    """The output of dmesg on a node: the log of any kernel at boot, and these lines."""
    rows = sorted([*map(tuple, _DATA["kernel_log"]), *lines])
    return "".join(f"[{seconds:12.6f}] {text}\n" for seconds, text in rows)


def trees(profile: Profile) -> dict[str, Tree]:
    """The trees over directories of /sys and /proc, by path."""
    empty: dict[str, Tree] = {path: {} for path in _HIDDEN if os.path.isdir(path)}
    return {**empty, **profile.hardware.trees}


def targets(profile: Profile) -> list[str]:
    """The hidden directories of this machine: each tree, or its closest parent that exists.

    A tree directly below /proc or /sys is left out: nothing can be added there.
    """
    directories = set()
    for tree in trees(profile):
        target = tree
        while not os.path.isdir(target):
            target = os.path.dirname(target)
        directories.add(target)
    return sorted(directories - {"/proc", "/sys"})


def _sysctls() -> dict[str, str]:
    """This machine's /proc/sys without `net`, as text by path; write-only keys are empty."""
    values: dict[str, str] = {}
    device = os.stat("/proc/sys").st_dev
    for directory, inner, files in os.walk("/proc/sys"):
        if directory == "/proc/sys":
            inner.remove("net")
        inner[:] = [d for d in inner if os.stat(f"{directory}/{d}").st_dev == device]
        for name in files:
            path = Path(directory, name)
            try:
                readable = path.stat().st_mode & stat.S_IROTH
                content = path.read_bytes().decode(errors="replace") if readable else ""
            except OSError:
                continue
            values[str(path.relative_to("/proc/sys"))] = content
    values.update({path: f"{value}\n" for path, value in _DATA["kernel"].items()})
    return values


# --- SSH keys, made in this process: an `ssh-keygen` per node costs more than the node.


@dataclass(frozen=True)
class Key:
    """An ed25519 key pair: the private half in OpenSSH's format, the public one as one line."""

    private: str
    public: str


def new_key(comment: str) -> Key:
    # This import takes longer than all of `nodeready lab status`.
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())
    public = key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
    return Key(private.decode(), f"{public.decode()} {comment}")


# --- The whole layer.


def build(base: Path, profile: Profile, key: Key) -> None:
    """Write the layer to `base`, which must not exist. Raises OSError."""
    image = Image(base)
    for path, mode in FRESH.items():
        image.directory(path, mode, opaque=True)
    for path in filter(os.path.isdir, _DATA["empty"]):
        image.directory(path, opaque=True)
    tools = (f"{directory}/{name}" for directory in _DATA["path"] for name in _DATA["tools"])
    for path in (*_DATA["hidden"], *_nodeready_paths(), *SLURM, *tools):
        if os.path.lexists(path) and path not in profile.hardware.files:
            image.hide(path)
    _system(image)
    _accounts(image, key)
    _pam(image)
    build_kernel(image, profile)
    for path, mode in profile.hardware.devices.items():
        image.device(path, mode)
    for path, file in profile.hardware.files.items():
        image.file(path, file.content, file.mode)


def submounts() -> list[str]:
    """Other file systems that hold parts of this machine's software (a separate /usr or /var)."""
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    tops = ("/usr", "/opt", "/var", "/etc")
    fresh = tuple(f"{path}/" for path in (*FRESH, *_DATA["empty"]))
    return sorted(
        path
        for path in mounts
        if f"{path}/".startswith(tuple(f"{top}/" for top in tops))
        and not f"{path}/".startswith(fresh)
        # mountinfo writes a space as \\040, and an overlay's options cannot say : or ,
        and not set("\\:,") & set(path)
        and os.path.isdir(path)
    )


def _nodeready_paths() -> Iterable[str]:
    for top in OURS:
        # It follows no link: an image of a container engine has links that lead out of it.
        for directory, inner, files in os.walk(top):
            own_names = {name for name in (*inner, *files) if "nodeready" in name}
            yield from (f"{directory}/{name}" for name in own_names)
            # What is below a hidden directory is hidden with it.
            inner[:] = [name for name in inner if name not in own_names]


def _system(image: Image) -> None:
    image.directory("/dev/pts")
    for path, mode in _DATA["directories"].items():
        image.directory(path, mode)
    for name, number in _DATA["devices"].items():
        image.device(f"/dev/{name}", 0o666, number)
    for path, target in _DATA["links"].items():
        image.link(path, target)
    for path, text in _DATA["files"].items():
        image.file(path, text)
    for path in _DATA["logs"]:
        image.file(path, "", 0o664)
    sftp = next(filter(os.path.exists, _DATA["sftp_servers"]), "internal-sftp")
    image.file("/etc/ssh/sshd_config", _DATA["sshd_config"].format(sftp=sftp))
    for path, text in _DATA["files_if_here"].items():
        if os.path.exists(path):
            image.file(path, text)
    if os.path.exists("/etc/sysctl.conf"):
        image.link("/etc/sysctl.d/99-sysctl.conf", "../sysctl.conf")
    if os.path.isdir("/etc/sudoers.d"):
        image.file(f"/etc/sudoers.d/{USER}", f"{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)


def free_id() -> int:
    """A number that no user and no group of this machine has.

    A user with it could trace the lab user's processes, and take the lab's key from them. Raises
    LabError when all are taken.
    """
    for number in USER_IDS:
        with contextlib.suppress(KeyError):
            pwd.getpwuid(number)
            continue
        with contextlib.suppress(KeyError):
            grp.getgrgid(number)
            continue
        return number
    raise LabError(f"all user ids from {USER_IDS.start} to {USER_IDS.stop - 1} are taken")


def without_password(line: str) -> str:
    """The line of shadow(5) without its password; unlike "!", "*" does not lock an account.

    >>> without_password("ml:$y$j9T:19000:0:99999:7:::")
    'ml:*:19000:0:99999:7:::'
    """
    name, password, *fields = line.split(":")
    return line if password[:1] in ("!", "*") else ":".join((name, "*", *fields))


def _accounts(image: Image, key: Key) -> None:
    number = free_id()
    account = f"{USER}:x:{number}:{number}::/home/{USER}:/bin/bash"
    _with_line(image, "/etc/passwd", account)
    _with_line(image, "/etc/group", f"{USER}:x:{number}:")
    # A password of this machine is not valid on a node.
    _with_line(image, "/etc/shadow", f"{USER}:*:19000:0:99999:7:::", without_password)
    for home, owner in (("/root", 0), (f"/home/{USER}", number)):
        path_in_layer = image.directory(home)
        os.chown(path_in_layer, owner, owner)
        for name in (".bashrc", ".profile"):
            skeleton = Path("/etc/skel", name)
            if skeleton.is_file():
                image.file(f"{home}/{name}", skeleton.read_text(), owner=owner)
        os.chown(image.directory(f"{home}/.ssh", 0o700), owner, owner)
        image.file(f"{home}/.ssh/authorized_keys", key.public + "\n", 0o600, owner)
        # Nodes reach each other with the lab's key, and know no host key: nodeready distributes
        # those.
        image.file(f"{home}/.ssh/id_ed25519", key.private, 0o600, owner)
        image.file(f"{home}/.ssh/id_ed25519.pub", key.public + "\n", 0o644, owner)


def _pam(image: Image) -> None:
    """Allow logins also where PAM cannot raise a limit; change nothing where it can."""
    if can_raise_limits():
        return
    for path in (*glob.glob("/etc/pam.d/*"), *glob.glob("/usr/lib/pam.d/*")):
        text = Path(path).read_text(errors="surrogateescape")
        changed = re.sub(
            r"^(session\s+)required(\s+pam_limits\.so)", r"\1optional\2", text, flags=re.M
        )
        if changed != text:
            image.file(path, changed)


def _with_line(image: Image, path: str, line: str, changed: Callable[[str], str] = str) -> None:
    """Write this machine's table of accounts with this account.

    changed: applied to each other line
    """
    table = Path(path)
    if not table.exists():
        return
    name = line.split(":", 1)[0] + ":"
    lines = [changed(old) for old in table.read_text().splitlines() if not old.startswith(name)]
    status = table.stat()
    image.file(path, "\n".join([*lines, line, ""]), stat.S_IMODE(status.st_mode))
    os.chown(image.base / path.lstrip("/"), status.st_uid, status.st_gid)
