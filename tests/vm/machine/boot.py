"""One boot of the small virtual machine: qemu's command line, and what GRUB would say.

qemu loads the kernel itself; its arguments are read from the machine's own disk as GRUB does.
"""

import re
import shlex
import subprocess
from pathlib import Path

from nodeready.lab.host import environment
from nodeready.lab.state import LabError

# Added to what the boot loader says: the console goes to our log, a panic ends the machine at
# once, and no timer is measured, which fails on a busy machine ("IO-APIC + timer doesn't work!").
HARNESS_ARGS = ("console=ttyS0", "panic=-1", "no_timer_check")

GRUB_CFG = "/boot/grub/grub.cfg"


class VmError(LabError):
    """The virtual machine cannot be built, started or talked to: what happened, and evidence."""


def qemu_command(
    *,
    name: str,
    kernel: Path,
    initrd: Path,
    disk: Path,
    console: Path,
    args: tuple[str, ...],
    port: int | None = None,
) -> list[str]:
    """Start the machine in the foreground; a reset or a power-off ends qemu.

    port: of 127.0.0.1, leads to the machine's sshd; None: no network
    """
    command = [
        # The kernel ends qemu with us, even when we are killed.
        *("setpriv", "--pdeathsig", "KILL", "--"),
        # Emulation is some twenty times slower than a node: beside other tests a probe's
        # limits in seconds would end its sections.
        *("nice", "-n", "-15"),
        "qemu-system-x86_64",
        # Software emulation: the same everywhere, with or without /dev/kvm.
        *("-name", name, "-machine", "q35,accel=tcg", "-cpu", "max", "-smp", "1"),
        *("-m", "512", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
        *("-chardev", f"file,id=console,path={console},append=on"),
        *("-serial", "chardev:console"),
        *("-kernel", str(kernel), "-initrd", str(initrd)),
        *("-append", " ".join((*args, *HARNESS_ARGS))),
        # Unsafe is about this host's crash; the guest's own caching is real.
        *("-drive", f"file={disk},format=raw,if=virtio,cache=unsafe"),
        *("-device", "virtio-rng-pci"),
    ]
    if port is not None:
        command += ["-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{port}-:22"]
        command += ["-device", "virtio-net-pci,netdev=net,romfile="]
    return command


def boot_args(disk: Path) -> tuple[str, ...]:
    """The kernel arguments of the default entry of a halted machine's grub.cfg.

    Read without replaying the journal, as GRUB does. Raises VmError when there is no entry.
    """
    dump = ["debugfs", "-c", "-R", f"cat {GRUB_CFG}", str(disk)]
    how = {"capture_output": True, "text": True, "errors": "replace", "env": environment()}
    args = grub_args(subprocess.run(dump, check=False, **how).stdout)
    if not args:
        raise VmError(f"the machine would not boot: no kernel line in {GRUB_CFG} of {disk}")
    return args


def grub_args(grub_cfg: str) -> tuple[str, ...]:
    """The kernel arguments of the first entry of a grub.cfg; empty when it has none."""
    found = re.search(r"^\s*linux(?:16|efi)?\s+(.+)$", grub_cfg, re.MULTILINE)
    return tuple(shlex.split(found[1])[1:]) if found else ()


def last_lines(log: Path, count: int = 40) -> str:
    """The end of a log as evidence under an error; "": there is no log."""
    if not log.exists():
        return ""
    lines = log.read_text(errors="backslashreplace").splitlines()[-count:]
    # A console carries escape sequences; they are shown, not obeyed.
    return "".join(f"  {line.encode('unicode_escape').decode()}\n" for line in lines)
