"""The layer that every node of a lab shares: what makes an overlay of this machine a FRESH node.

`build` writes it once per lab; the nodes use it as the middle of their overlay, between their
own writes and this machine's root. A directory marked opaque hides this machine's; a whiteout
hides one file. So nothing that was ever configured here (ssh, sysctl, limits, home directories)
reaches a node. The packages installed here do, save what would make a node look other than on
another machine (Slurm's daemons, a vendor's GPU tool, csh's settings).
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from nodeready.lab import kernel
from nodeready.lab.fresh import (
    CLOCK,
    DEVICES,
    EMPTY,
    FRESH,
    FSTAB,
    HIDDEN,
    LIMITS_CONF,
    OURS,
    PATH,
    SFTP_SERVERS,
    SLURM,
    SSH_CONFIG,
    SSHD_CONFIG,
    SYSCTL_CONF,
    TOOLS,
    USER,
    USER_ID,
)
from nodeready.lab.keys import Key
from nodeready.lab.layer import Image
from nodeready.lab.needs import can_raise_limits
from nodeready.lab.profiles import Profile


def build(base: Path, profile: Profile, key: Key, *, slurm: bool = False) -> None:
    """Write the layer to `base`, which must not exist. Raises OSError.

    slurm: the nodes are Slurm's; else no service of it is on them, whatever is installed here
    """
    image = Image(base)
    for path, mode in FRESH.items():
        image.directory(path, mode, opaque=True)
    for path in filter(os.path.isdir, EMPTY):
        image.directory(path, opaque=True)
    tools = (f"{directory}/{name}" for directory in PATH for name in TOOLS)
    for path in (*HIDDEN, *_ours(), *tools, *(() if slurm else SLURM)):
        if os.path.lexists(path) and path not in profile.hardware.files:
            image.hide(path)
    _devices(image)
    _system(image, profile)
    _accounts(image, key)
    _pam(image)
    kernel.build(image, profile)
    for path, mode in profile.hardware.devices.items():
        image.device(path, mode)
    for path, file in profile.hardware.files.items():
        image.file(path, file.content, file.mode)


def submounts() -> list[str]:
    """Other file systems that hold parts of this machine's software (a separate /usr or /var)."""
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    tops = ("/usr", "/opt", "/var", "/etc")
    fresh = tuple(f"{path}/" for path in (*FRESH, *EMPTY))
    return sorted(
        path
        for path in mounts
        if f"{path}/".startswith(tuple(f"{top}/" for top in tops))
        and not f"{path}/".startswith(fresh)
        # mountinfo writes a space as \\040, and an overlay's options cannot say : or ,
        and not set("\\:,") & set(path)
        and os.path.isdir(path)
    )


def _ours() -> Iterable[str]:
    for top in OURS:
        yield from glob.glob(f"{top}/**/*nodeready*", recursive=True)


def _devices(image: Image) -> None:
    dev = image.directory("/dev")
    for name, (major, minor) in DEVICES.items():
        os.mknod(dev / name, stat.S_IFCHR, os.makedev(major, minor))
        (dev / name).chmod(0o666)
    for name, target in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        (dev / name).symlink_to(target)
    image.directory("/dev/pts")
    image.directory("/dev/shm", 0o1777)


def _system(image: Image, profile: Profile) -> None:
    image.directory("/run/sshd", 0o755)
    image.directory("/run/lock", 0o1777)
    image.directory("/run/user", 0o755)
    image.directory("/var/log/apt", 0o755)
    image.file(CLOCK, "")
    for path in ("/run/utmp", "/var/log/wtmp", "/var/log/btmp", "/var/log/lastlog"):
        image.file(path, "", 0o664)
    sftp = next((path for path in SFTP_SERVERS if os.path.exists(path)), "internal-sftp")
    image.file("/etc/fstab", FSTAB)
    image.file("/etc/ssh/sshd_config", SSHD_CONFIG.format(sftp=sftp))
    image.file("/etc/ssh/ssh_config", SSH_CONFIG)
    image.directory("/etc/ssh/sshd_config.d", 0o755)
    image.directory("/etc/ssh/ssh_config.d", 0o755)
    if os.path.exists("/etc/sysctl.conf"):
        image.file("/etc/sysctl.conf", SYSCTL_CONF)
        link = image.directory("/etc/sysctl.d") / "99-sysctl.conf"
        link.symlink_to("../sysctl.conf")
    if os.path.exists("/etc/security/limits.conf"):
        image.file("/etc/security/limits.conf", LIMITS_CONF)
    lines = (f"{name}={value}\n" for name, value in profile.environment.items())
    image.file("/etc/environment", "".join(lines))
    if os.path.isdir("/etc/sudoers.d"):
        image.file(f"/etc/sudoers.d/{USER}", f"{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)


def _accounts(image: Image, key: Key) -> None:
    account = f"{USER}:x:{USER_ID}:{USER_ID}::/home/{USER}:/bin/bash"
    _with_line(image, "/etc/passwd", account)
    _with_line(image, "/etc/group", f"{USER}:x:{USER_ID}:")
    # "*": no password fits, and unlike "!" the account is not locked.
    _with_line(image, "/etc/shadow", f"{USER}:*:19000:0:99999:7:::")
    for home, owner in (("/root", 0), (f"/home/{USER}", USER_ID)):
        made = image.directory(home)
        os.chown(made, owner, owner)
        for name in (".bashrc", ".profile"):
            skeleton = Path("/etc/skel", name)
            if skeleton.is_file():
                image.file(f"{home}/{name}", skeleton.read_text(), owner=owner)
        os.chown(image.directory(f"{home}/.ssh", 0o700), owner, owner)
        image.file(f"{home}/.ssh/authorized_keys", key.public + "\n", 0o600, owner)
        # Nodes reach each other with the lab's key, and know no host key: asking about those
        # is the trouble that nodeready removes.
        image.file(f"{home}/.ssh/id_ed25519", key.private, 0o600, owner)
        image.file(f"{home}/.ssh/id_ed25519.pub", key.public + "\n", 0o644, owner)


def _pam(image: Image) -> None:
    """Let people in also where a limit of theirs cannot be raised; elsewhere change nothing."""
    if can_raise_limits():
        return
    for path in (*glob.glob("/etc/pam.d/*"), *glob.glob("/usr/lib/pam.d/*")):
        text = Path(path).read_text(errors="surrogateescape")
        changed = re.sub(
            r"^(session\s+)required(\s+pam_limits\.so)", r"\1optional\2", text, flags=re.M
        )
        if changed != text:
            image.file(path, changed)


def _with_line(image: Image, path: str, line: str) -> None:
    """This machine's table of accounts, with this account instead of any like it."""
    table = Path(path)
    if not table.exists():
        return
    name = line.split(":", 1)[0] + ":"
    kept = [
        old
        for old in table.read_text().splitlines()
        if not old.startswith(name) and f":{USER_ID}:" not in old
    ]
    like = table.stat()
    image.file(path, "\n".join([*kept, line, ""]), stat.S_IMODE(like.st_mode))
    os.chown(image.base / path.lstrip("/"), like.st_uid, like.st_gid)
