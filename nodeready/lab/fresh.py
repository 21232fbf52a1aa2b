"""What makes a node fresh: data for nodeready.lab.image. All paths are those of the node."""

from __future__ import annotations

import os

# The ordinary user of every node, for what must work without root.
USER = "ml"
USER_ID = 2000

# Directories that a node has for itself, with their modes.
FRESH = {
    "/root": 0o700,
    "/home": 0o755,
    "/tmp": 0o1777,
    "/var/tmp": 0o1777,
    "/var/log": 0o755,
    "/run": 0o755,
    "/dev": 0o755,
    "/etc/ssh": 0o755,
    "/etc/sysctl.d": 0o755,
    "/etc/tmpfiles.d": 0o755,
    "/etc/security/limits.d": 0o755,
    # Debian runs these at every login.
    "/etc/update-motd.d": 0o755,
    "/etc/profile.d": 0o755,
}

# Directories of services that are empty on a new machine, where this one has them; and what a
# package that is installed here, or another release, sets in the kernel at boot.
EMPTY = (
    "/etc/munge",
    "/etc/slurm",
    "/var/lib/munge",
    "/var/lib/slurm",
    "/usr/lib/sysctl.d",
    "/usr/local/lib/sysctl.d",
)

# Files and directories of this machine that a node must not have.
HIDDEN = (
    "/.dockerenv",
    # The csh that is installed here, or not, would be one more shell with settings.
    "/etc/csh.cshrc",
    "/etc/csh.login",
    "/etc/csh.logout",
    "/etc/default/grub",
    "/etc/default/grub.d",
    "/boot/grub",
    "/boot/grub2",
    "/boot/loader",
    "/etc/motd",
    "/etc/pdsh/rcmd_default",
    "/etc/systemd/coredump.conf.d",
    "/usr/local/bin/py-spy",
    "/var/crash",
    "/var/lib/systemd/coredump",
)

# Where programs are, in the order of the nodes' PATH.
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/opt/rocm/bin")

# Programs that a node has when its profile gives them to it: those of this machine would tell of
# its own GPUs and clock.
TOOLS = ("nvidia-smi", "amd-smi", "rocm-smi", "chronyc", "ntpq")

# Slurm's daemons and their services, which a node that is not Slurm's has not.
SLURM = (
    *(os.path.realpath(f"/lib/systemd/system/slurm{d}.service") for d in ("d", "ctld", "dbd")),
    *(f"/usr/sbin/slurm{which}" for which in ("d", "ctld", "stepd", "dbd")),
)

# Below these, whatever bears our name.
OURS = ("/etc", "/usr/local", "/var/lib", "/var/cache")

# /dev/NAME: major, minor (Documentation/admin-guide/devices.txt).
DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}

# As Debian's openssh-server ships it.
SSHD_CONFIG = """\
Include /etc/ssh/sshd_config.d/*.conf
KbdInteractiveAuthentication no
UsePAM yes
X11Forwarding yes
PrintMotd no
AcceptEnv LANG LC_*
Subsystem\tsftp\t{sftp}
"""

SSH_CONFIG = """\
Include /etc/ssh/ssh_config.d/*.conf
Host *
    SendEnv LANG LC_*
    HashKnownHosts yes
    GSSAPIAuthentication yes
"""

FSTAB = """\
# /etc/fstab: static file system information.
/dev/sda1  /  ext4  errors=remount-ro  0  1
"""

# As Debian's libpam-modules ships it, less its explanations.
LIMITS_CONF = """\
# /etc/security/limits.conf: see limits.conf(5)
# End of file
"""

SYSCTL_CONF = """\
# See /etc/sysctl.d/ and sysctl.conf(5).
#kernel.domainname = example.com
#kernel.sysrq=438
"""

# Where distributions have it.
SFTP_SERVERS = (
    "/usr/lib/openssh/sftp-server",
    "/usr/libexec/openssh/sftp-server",
    "/usr/lib/ssh/sftp-server",
    "/usr/libexec/sftp-server",
)

# What a freshly booted distribution kernel has, whatever was set on this machine.
KERNEL_DEFAULTS = {
    "kernel/yama/ptrace_scope": "1",
    "kernel/core_pattern": "core",
    "kernel/core_uses_pid": "0",
    "kernel/core_pipe_limit": "0",
    "fs/suid_dumpable": "0",
}

# Without it a clock is not synchronised (systemd-timesyncd.service(8)).
CLOCK = "/run/systemd/timesync/synchronized"

# The program, for a node's own record.
DMESG = """\
#!/bin/sh
log=/.lab/kernel.log
case " $* " in
*" -T "* | *" --ctime "* | *" -"[a-zA-Z]T* | *" --time-format=ctime "*)
    read -r up rest </proc/uptime
    boot=$(($(date +%s) - ${up%.*}))
    while IFS= read -r line; do
        at=${line%%.*}
        time=$(date -d "@$((boot + ${at##*[!0-9]}))" '+%a %b %e %T %Y')
        printf '[%s]%s\\n' "$time" "${line#*]}"
    done <$log
    ;;
*) exec cat $log ;;
esac
"""

# What any kernel says when it boots: seconds since then, message.
KERNEL_LOG = (
    (0.0, "Command line: BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro quiet"),
    (1.204511, "pci 0000:01:00.0: [14e4:16d7] type 00 class 0x020000 PCIe Endpoint"),
    (4.871322, "EXT4-fs (sda1): mounted filesystem ro with ordered data mode."),
    (6.310027, "systemd[1]: Detected architecture x86-64."),
    (9.552104, "bnxt_en 0000:01:00.0 eth0: NIC Link is Up, 25000 Mbps full duplex"),
)
