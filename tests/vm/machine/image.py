"""The image of the small virtual machine: built once, then taken from a cache.

`build()` makes, as root and without mounting anything, a directory under
`cache_dir()` that is named after the digest of its recipe:

    root.img     an ext4 file system: Debian of this machine's release
    vmlinuz      Debian's cloud kernel, unpacked and not installed here
    initrd       busybox and the virtio modules
    id_ed25519   the key that root and the ordinary user accept
    host_keys    the machine's ssh host keys, without names

The packages come from the sources that this machine's apt is configured with.
Deleting the cache is harmless: the next start builds the image again.
"""

import contextlib
import fcntl
import hashlib
import lzma
import os
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vm.machine import recipe
from tests.vm.machine.boot import VmError, boot_args, last_lines, qemu_command
from tests.vm.machine.host import apt_options, apt_sources, missing, os_release, remove, run_logged

# --- The initramfs of the virtual machine: busybox, and the modules that reach the disk.


def pack(root: Path, version: str, work: Path, log: Path) -> None:
    """Write `work`/initrd for the kernel `version` in the tree `root`, after depmod."""
    modules = root / "usr/lib/modules" / version
    tree = work / "initramfs"
    for name in ("bin", "dev", "proc", "sys", "root", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy(root / "bin/busybox", tree / "bin/busybox")
    order = load_order((modules / "modules.dep").read_text().splitlines())
    for path in order:
        (tree / "modules" / path.stem).write_bytes(_module(modules / path))
    (tree / "modules/order").write_text("".join(f"{path.stem}\n" for path in order))
    (tree / "init").write_text(file("init"))
    (tree / "init").chmod(0o755)
    command = "cd initramfs && find . | cpio --quiet -o -H newc -R 0:0 | gzip -1 > ../initrd"
    run_logged(["sh", "-c", command], log, cwd=work)
    remove(tree)


def _module(path: Path) -> bytes:
    """A module as busybox can load it: newer releases compress theirs."""
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dc", path], stdout=subprocess.PIPE, check=True).stdout
    return path.read_bytes()


def load_order(modules_dep: Sequence[str]) -> list[Path]:
    """The files of the wanted modules, each after all that it needs (see modules.dep(5))."""
    needs: dict[str, list[Path]] = {}
    for line in modules_dep:
        file, _, rest = line.partition(":")
        path = Path(file)
        name = path.name.split(".")[0].replace("-", "_")
        needs[name] = [*(Path(part) for part in reversed(rest.split())), path]
    wanted = (path for name in recipe.MODULES for path in needs.get(name, []))
    return list(dict.fromkeys(wanted))


# Room for a few core files beside the system, which takes about 0.5 GB. The file is sparse.
FILES = Path(__file__).parent / "files"
DISK_MB = 2048

# Measured: 11 s. The rest is for a busy machine.
PRIME_TIMEOUT_S = 300


@dataclass(frozen=True)
class Image:
    """One built image; `root` is shared by all machines and never written to."""

    root: Path
    kernel: Path
    initrd: Path
    key: Path
    host_keys: tuple[str, ...]


def cache_dir() -> Path:
    """Where images are kept: `$XDG_CACHE_HOME/nodeready/vm`, by default in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "nodeready" / "vm"


def build() -> Image:
    """The image of today's recipe, from the cache or built now, in a minute. Raises VmError."""
    lacks = missing()
    if lacks:
        raise VmError(f"the virtual machine needs {', '.join(lacks)}")
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    home = cache / digest()
    with _locked(cache / "lock"):
        if not home.is_dir():
            for stale in cache.glob(".build-*"):
                remove(stale)
            work = Path(tempfile.mkdtemp(prefix=".build-", dir=cache))
            try:
                _build(work, cache / "build.log")
                work.rename(home)
            finally:
                remove(work)
    return _load(home)


def digest() -> str:
    """The name of the image that today's recipe makes on this machine: 16 hex digits."""
    seen = hashlib.sha256()
    for source in sorted([*Path(__file__).parent.glob("*.py"), *FILES.iterdir()]):
        seen.update(source.read_bytes())
    seen.update(os_release().get("VERSION_CODENAME", "").encode())
    return seen.hexdigest()[:16]


def file(name: str) -> str:
    """A text of `files/`, with the machine's addresses."""
    text = (FILES / name).read_text()
    return text.replace("ADDRESS", recipe.ADDRESS).replace("GATEWAY", recipe.GATEWAY)


def _load(home: Path) -> Image:
    return Image(
        root=home / "root.img",
        kernel=home / "vmlinuz",
        initrd=home / "initrd",
        key=home / "id_ed25519",
        host_keys=tuple((home / "host_keys").read_text().splitlines()),
    )


def _build(work: Path, log: Path) -> None:
    log.write_text("")
    root = work / "root"
    fs_id = str(uuid.uuid4())
    _bootstrap(work, root, log)
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vm", "-f"]
    run_logged([*keygen, work / "id_ed25519"], log)
    version = _kernel_version(root)
    _configure(root, fs_id, (work / "id_ed25519.pub").read_text(), log)
    run_logged(["chroot", root, "depmod", version], log)
    pack(root, version, work, log)
    shutil.copyfile(root / "boot" / f"vmlinuz-{version}", work / "vmlinuz")
    host_keys = sorted((root / "etc/ssh").glob("ssh_host_*_key.pub"))
    (work / "host_keys").write_text("".join(key.read_text() for key in host_keys))
    disk: list[str | Path] = ["mke2fs", "-q", "-t", "ext4", "-m", "0", "-U", fs_id, "-d", root]
    run_logged([*disk, work / "root.img", f"{DISK_MB}M"], log)
    remove(root)
    _prime(work, log)


def _prime(work: Path, log: Path) -> None:
    """Boot once to let the system write its own grub.cfg."""
    command = qemu_command(
        name="prime",
        kernel=work / "vmlinuz",
        initrd=work / "initrd",
        disk=work / "root.img",
        console=log,
        args=("root=/dev/vda", "rw", "quiet", "init=/usr/local/sbin/vm-prime"),
    )
    run_logged(["timeout", "-k", "5", str(PRIME_TIMEOUT_S), *command], log)
    try:
        boot_args(work / "root.img")
    except VmError as error:
        raise VmError(f"{error}\n{last_lines(log)}log: {log}") from error


def _bootstrap(work: Path, root: Path, log: Path) -> None:
    fetch = work / "fetch-kernel"
    fetch.write_text(file("fetch-kernel"))
    fetch.chmod(0o755)
    command: list[str | Path] = [
        *("mmdebstrap", "--mode=root", "--variant=apt", "--dpkgopt=force-unsafe-io"),
        f"--include={','.join(recipe.PACKAGES)}",
        *(f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")),
        *(f"--aptopt={line}" for line in apt_options()),
        f'--customize-hook={shlex.quote(str(fetch))} "$1"',
        # How this machine reaches its mirror is no business of the image.
        '--customize-hook=rm -f "$1/etc/apt/apt.conf.d/99mmdebstrap"',
    ]
    keyring = Path("/usr/share/keyrings") / f"{os_release()['ID']}-archive-keyring.gpg"
    if keyring.exists():
        command.append(f"--keyring={keyring}")
    command += [os_release()["VERSION_CODENAME"], root, *apt_sources()]
    kernel = recipe.KERNEL[os_release()["ID"]]
    run_logged(command, log, extra_env={"KERNEL": kernel})


def _kernel_version(root: Path) -> str:
    kernels = [path.name.removeprefix("vmlinuz-") for path in (root / "boot").glob("vmlinuz-*")]
    if len(kernels) != 1:
        raise VmError(f"one kernel was expected in the image's /boot, found {kernels}")
    config = (root / "boot" / f"config-{kernels[0]}").read_text()
    if "CONFIG_SECURITY_YAMA=y" not in config:
        raise VmError(f"kernel {kernels[0]} is built without Yama")
    return kernels[0]


def _configure(root: Path, fs_id: str, public_key: str, log: Path) -> None:
    def put(path: str, text: str, mode: int = 0o644) -> None:
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    put("etc/fstab", f"UUID={fs_id} / ext4 errors=remount-ro 0 1\n")
    put("etc/hostname", "vm1\n")
    put("etc/hosts", "127.0.0.1 localhost\n127.0.1.1 vm1\n")
    put("etc/resolv.conf", f"nameserver {recipe.NAMESERVER}\n")
    put("etc/inittab", file("inittab"))
    for script in ("vm-boot", "vm-pci", "vm-prime", "vm-shutdown"):
        put(f"usr/local/sbin/{script}", file(script), 0o755)
    put("etc/machine-id", f"{uuid.uuid4().hex}\n", 0o444)
    # Debian's own default, which the grub-pc package would put there.
    put("etc/default/grub", (root / "usr/share/grub/default/grub").read_text())
    (root / "boot/grub").mkdir(exist_ok=True)
    for name in ("init", "reboot", "poweroff", "halt"):
        (root / "sbin" / name).symlink_to("/bin/busybox")
    user, uid = recipe.USER, str(recipe.USER_ID)
    run_logged(["chroot", root, "useradd", "-m", "-u", uid, "-s", "/bin/bash", user], log)
    put("root/.ssh/authorized_keys", public_key, 0o600)
    put(f"home/{user}/.ssh/authorized_keys", public_key, 0o600)
    (root / "root/.ssh").chmod(0o700)
    (root / f"home/{user}/.ssh").chmod(0o700)
    run_logged(["chroot", root, "chown", "-R", f"{user}:{user}", f"/home/{user}/.ssh"], log)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process build while the others wait; the lock ends with its holder."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
