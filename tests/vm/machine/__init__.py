"""A small virtual machine with a real kernel, for what namespaces cannot show.

Debian's cloud kernel under qemu's software emulation: Yama, core_pattern, /proc/sys and the kernel
command line are the real ones. The disk keeps its state over reboots.

    with Vm.start(tmp_path) as vm:
        vm.run("sysctl -w kernel.yama.ptrace_scope=1")
        vm.reboot()

The machine ends with the process that started it, however that one ends.
"""

from __future__ import annotations

import random
import shlex
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.vm.machine.boot import VmError, boot_args, last_lines, qemu_command
from tests.vm.machine.image import Image, build

__all__ = ["Vm", "VmError"]

# Measured on a shared core: 6 s. A machine may be busy; a dead one is noticed at once.
BOOT_TIMEOUT_S = 180.0

# Below Linux's default range for outgoing connections, so that the port stays free in a reboot.
PORTS = range(20000, 32000)


@dataclass
class Vm:
    """A running machine. Made by `Vm.start`; ended by `stop` or as a context manager."""

    workdir: Path
    image: Image
    port: int
    name: str = "vm1"
    boot_id: str = ""
    _qemu: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def start(cls, workdir: Path) -> Vm:
        """Boot a fresh machine whose disk and logs lie in `workdir`. Raises VmError."""
        machine = cls(workdir, build(), _free_port())
        machine._write_ssh_config()
        try:
            machine._copy_disk()
            machine._boot()
        except BaseException:
            machine.stop()
            raise
        return machine

    def __enter__(self) -> Vm:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def disk(self) -> Path:
        """A raw ext4 file system without partitions."""
        return self.workdir / "disk.img"

    @property
    def console(self) -> Path:
        """The log of the serial console, over all boots."""
        return self.workdir / "console.log"

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: knows the machine by its name and refuses any other host key."""
        return self.workdir / "ssh_config"

    def run(
        self,
        command: str,
        user: str = "root",
        check: bool = True,
        timeout: float = 60.0,
        *,
        input: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command by ssh. With `check`, raises VmError for a status other than 0."""
        ssh = ["ssh", "-F", str(self.ssh_config), "-l", user, self.name, "--", command]
        how = {"capture_output": True, "text": True, "errors": "replace", "timeout": timeout}
        try:
            done = subprocess.run(ssh, input=input, check=False, **how)
        except subprocess.TimeoutExpired as error:
            raise VmError(f"{self.name}: no answer in {timeout:g} s: {command}") from error
        if check and done.returncode != 0:
            said = (done.stdout + done.stderr).strip()
            raise VmError(f"{self.name}: exit status {done.returncode}: {command}\n{said}")
        return done

    def reboot(self) -> None:
        """Reboot by the machine's own grub.cfg, until ssh answers. Raises VmError."""
        before = self.boot_id
        assert self._qemu is not None
        # The connection may go down before ssh has the exit status.
        self.run("reboot", check=False)
        try:
            self._qemu.wait(BOOT_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise self._dead(f"did not go down in {BOOT_TIMEOUT_S:g} s") from error
        self._boot()
        if self.boot_id == before:
            raise VmError(f"{self.name}: came back with the same boot_id")

    def plant_pci_device(self, slot: str, vendor: str, device: str, pci_class: str) -> None:
        """Show a PCI device in /sys/bus/pci/devices, now and after every reboot.

        Values as in sysfs: slot `0000:41:00.0`, vendor `0x1002`, class `0x120000`.
        """
        home = f"/var/lib/vm/pci/{slot}"
        files = {"vendor": vendor, "device": device, "class": pci_class}
        writes = [f"echo {shlex.quote(text)} > {home}/{name}" for name, text in files.items()]
        self.run(" && ".join([f"mkdir -p {home}", *writes, "vm-pci"]))

    def stop(self) -> None:
        """End the machine at once and remove its disk; the logs stay. Harmless twice."""
        self._cut_power()
        self.disk.unlink(missing_ok=True)

    def inventory_data(self) -> dict[str, str | int]:
        """The host data that pyinfra needs to reach the machine as root."""
        return {
            "ssh_hostname": "127.0.0.1",
            "ssh_port": self.port,
            "ssh_user": "root",
            "ssh_key": str(self.image.key),
            "ssh_known_hosts_file": str(self.workdir / "known_hosts"),
            "ssh_strict_host_key_checking": "yes",
        }

    def _write_ssh_config(self) -> None:
        # ssh refuses a key that others may read, wherever the cache came from.
        key = self.workdir / "id_ed25519"
        shutil.copyfile(self.image.key, key)
        key.chmod(0o600)
        where = f"[127.0.0.1]:{self.port}"
        lines = "".join(f"{where} {host_key}\n" for host_key in self.image.host_keys)
        (self.workdir / "known_hosts").write_text(lines)
        text = Path(__file__).with_name("ssh_config.txt").read_text()
        words = {"name": self.name, "port": self.port, "place": self.workdir}
        self.ssh_config.write_text(text.format(**words))

    def _copy_disk(self) -> None:
        copy = ["cp", "--reflink=auto", "--sparse=always", str(self.image.root), str(self.disk)]
        subprocess.run(copy, check=True)

    def _boot(self) -> None:
        command = qemu_command(
            name=self.name,
            kernel=self.image.kernel,
            initrd=self.image.initrd,
            disk=self.disk,
            console=self.console,
            args=boot_args(self.disk),
            port=self.port,
        )
        with (self.workdir / "qemu.log").open("ab") as log:
            self._qemu = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while not self._sshd_answers():
            if self._qemu.poll() is not None:
                raise self._dead(
                    f"the machine ended before ssh came up (rc {self._qemu.returncode})"
                )
            if time.monotonic() > deadline:
                raise self._dead(f"no ssh in {BOOT_TIMEOUT_S:g} s")
            time.sleep(0.1)
        self.boot_id = self.run("cat /proc/sys/kernel/random/boot_id").stdout.strip()

    def _sshd_answers(self) -> bool:
        # qemu accepts by itself: only the banner shows that the guest's sshd is there.
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as peer:
                peer.settimeout(2)
                return peer.recv(4) == b"SSH-"
        except OSError:
            return False

    def _cut_power(self) -> None:
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()
            self._qemu = None

    def _dead(self, what: str) -> VmError:
        self._cut_power()
        evidence = last_lines(self.workdir / "qemu.log") + last_lines(self.console)
        return VmError(f"{self.name}: {what}\n{evidence}console log: {self.console}")


def _free_port() -> int:
    for port in random.sample(PORTS, 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise VmError(f"no free port between {PORTS.start} and {PORTS.stop} on 127.0.0.1")
