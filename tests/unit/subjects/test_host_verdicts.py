"""What an expert says of a node itself, case by case: what is wrong, and nothing else.

Sources: [chronyc] chronyc(1), tracking; [ntpq] ntpd's event and status words, refclock_local;
[munge] munge(7); [timesyncd] systemd-timesyncd.service(8); [mounts] proc_pid_mounts(5); [fstab]
fstab(5), systemd.mount(5); [errno] errno(3), "Cannot send after transport endpoint shutdown" is
Lustre's eviction; [proc] proc(5); [ostree] ostree and composefs: an image is the root; [inode]
statfs(2).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.host import facts as host
from nodeready.subjects.host import processes
from tests.builders.host import FILES, MOUNTS, TRACKING, clock, judged, lines, node, wrong

NONE = clock("none", "")
NTPQ = 'associd=0 status=0615 {},\nversion="ntpd 4.2.8", leap=00, stratum={}, refid={}, offset={}'


def tracking(**changes: str) -> str:
    """chronyc's answer with other values of these names, _ for a space."""
    more = "Root delay      : 0.000500000 seconds\nRoot dispersion : 0.001200000 seconds\n"
    text = TRACKING + more
    for name, value in changes.items():
        found = [line for line in text.splitlines() if line.startswith(name.replace("_", " "))]
        text = text.replace(found[0], f"{name.replace('_', ' '):<16}: {value}")
    return clock("chronyc", text)


CLOCKS: dict[str, tuple[str, str]] = {
    # Leap states [chronyc].
    "chrony": (tracking(), "ok"),
    "insert second": (tracking(Leap_status="Insert second"), "ok"),
    "delete second": (tracking(Leap_status="Delete second"), "ok"),
    "not synchronised": (tracking(Leap_status="Not synchronised"), "fail"),
    "a leap status of no sense": (tracking(Leap_status="(null)"), "unknown"),
    "0.9 s": (tracking(System_time="0.900000000 seconds fast of NTP time"), "ok"),
    "1.1 s": (tracking(System_time="1.100000000 seconds slow of NTP time"), "warn"),
    "299 s": (tracking(System_time="299.000000000 seconds slow of NTP time"), "warn"),
    "more than munge takes": (tracking(System_time="301.0 seconds fast of NTP time"), "fail"),
    "its own clock": (tracking(Reference_ID="7F7F0101 ()", Stratum="10"), "warn"),
    "its own clock, older chrony": (tracking(Reference_ID="127.127.1.1 ()"), "warn"),
    "a GPS": (tracking(Reference_ID="47505300 (GPS)", Stratum="1"), "ok"),
    "a PTP clock": (tracking(Reference_ID="50484330 (PHC0)", Stratum="1"), "ok"),
    "servers long silent": (tracking(Root_dispersion="1.8 seconds"), "warn"),
    "a far server": (tracking(Root_delay="0.600000000 seconds"), "ok"),
    "chronyd dead": (clock("chronyc", "506 Cannot talk to daemon", 1), "fail"),
    "chronyc hangs": (clock("chronyc", "", 124), "unknown"),
    "chronyc killed": (clock("chronyc", "", 137), "unknown"),
    "chronyc of no words": (clock("chronyc", "Segmentation fault", 139), "unknown"),
    "chronyc not permitted": (clock("chronyc", "501 Not authorised", 1), "unknown"),
    "an empty answer": (clock("chronyc", ""), "unknown"),
    # ntpd and ntpsec [ntpq].
    "ntpd": (clock("ntpq", NTPQ.format("leap_none, sync_ntp", 3, "10.0.0.1", 0.2)), "ok"),
    "ntpd, GPS": (clock("ntpq", NTPQ.format("leap_none, sync_uhf_radio", 1, "GPS", 0.2)), "ok"),
    "ntpd, leap": (clock("ntpq", NTPQ.format("leap_add_sec, sync_ntp", 3, "a", 0.2)), "ok"),
    "ntpd, del": (clock("ntpq", NTPQ.format("leap_del_sec, sync_ntp", 3, "a", 0.2)), "ok"),
    "ntpd, alarm": (clock("ntpq", NTPQ.format("leap_alarm, sync_unspec", 16, "INIT", 0)), "fail"),
    "ntpd, unsynchronised": (
        clock("ntpq", NTPQ.format("leap_none, sync_unspec", 16, "STEP", 0)), "fail",
    ),
    "ntpd, its own clock": (
        clock("ntpq", NTPQ.format("leap_none, sync_local", 11, "LOCAL(0)", 0)), "warn",
    ),
    "ntpd, 2 s": (clock("ntpq", NTPQ.format("leap_none, sync_ntp", 3, "a", -2000.5)), "warn"),
    "ntpd, 10 min": (clock("ntpq", NTPQ.format("leap_none, sync_ntp", 3, "a", 600000)), "fail"),
    "ntpd silent": (clock("ntpq", "localhost: timed out, nothing received", 1), "fail"),
    "ntpd refuses": (clock("ntpq", "ntpq: read: Connection refused", 1), "fail"),
    "ntpq hangs": (clock("ntpq", "", 124), "unknown"),
    # systemd [timesyncd], and the kernel's flag by timedatectl (phc2sys, ptp4l, openntpd).
    "timesyncd": (clock("timesyncd", "synchronized"), "ok"),
    "timesyncd waits": (clock("timesyncd", "waiting") + NONE, "fail"),
    "the kernel's flag": (clock("timedatectl", "NTP=no\nNTPSynchronized=yes") + NONE, "ok"),
    "no flag": (clock("timedatectl", "NTP=no\nNTPSynchronized=no") + NONE, "warn"),
    "timedatectl fails": (
        clock("timedatectl", "Failed to connect to bus: No such file", 1) + NONE, "warn",
    ),
    "timedatectl hangs": (clock("timedatectl", "", 124) + NONE, "unknown"),
    "a virtual machine with nothing": (NONE, "warn"),
    "cut off": ("clock=chronyc\nReference ID", "unknown"),
    "nothing": ("", "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("case", CLOCKS)
def test_the_clock(case: str) -> None:
    said, status = CLOCKS[case]
    assert wrong(node(clock_said=said)) == ({} if status == "ok" else {"clock": status})


def test_a_clock_says_what_it_follows() -> None:
    own = judged(node(clock_said=tracking(Reference_ID="7F7F0101 ()")))["clock"]
    assert own.actual == "chrony follows the node's own clock"
    silent = judged(node(clock_said=tracking(Root_dispersion="1.8 seconds")))["clock"]
    assert silent.actual == "chrony may be 1.8 s off: no server answers"


ROOT, SHM, HOME = (
    "nr_fs=4096 1000000 600000 550000 65536 60000 /\n",
    "nr_fs=4096 262144 262144 262144 262144 262143 /dev/shm\n",
    "nr_fs=1048576 1000000 200 200 0 0 /home\n",
)
TABLE = FILES["/proc/self/mounts"]


def stat(error: str, path: str = "/home") -> str:
    return MOUNTS.replace(
        HOME, f"stat: cannot read file system information for '{path}': {error}\n"
    )


def other(line: str, answer: str) -> tuple[dict[str, str], str]:
    """One more mount, asked alone, and its answer."""
    path = line.split()[1]
    said = MOUNTS.replace("mounts=end", f"asked={path}\n{answer}mounts=end")
    return {"/proc/self/mounts": f"{TABLE}\n{line}"}, said


NETWORKS = {
    "nfs": "nas:/x /n nfs rw,vers=3 0 0",
    "nfs4": "nas:/x /n nfs4 rw,soft 0 0",
    "lustre": "10.0.0.1@o2ib:/fs /n lustre rw,flock,lazystatfs 0 0",
    "gpfs": "fs1 /n gpfs rw,relatime 0 0",
    "beegfs": "beegfs_nodev /n beegfs rw,relatime,cfgFile=/etc/beegfs/client.conf 0 0",
    "ceph": "10.0.0.1:6789:/ /n ceph rw,noatime 0 0",
    "cifs": "//nas/x /n cifs rw,relatime 0 0",
    "wekafs": "backend/fs /n wekafs rw 0 0",
    "9p": "hostshare /n 9p rw,trans=virtio 0 0",
    "virtiofs": "share /n virtiofs rw 0 0",
    "sshfs": "a:/ /n fuse.sshfs rw,user_id=0 0 0",
    "s3fs": "s3fs /n fuse.s3fs rw,user_id=0 0 0",
    "glusterfs": "g:/v /n fuse.glusterfs rw,user_id=0 0 0",
    "cvmfs": "cvmfs2 /n fuse ro,user_id=0 0 0",
    "StorNext": "stornext /n cvfs rw 0 0",
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_file_system_that_hangs(kind: str) -> None:
    files, said = other(NETWORKS[kind], "nr_fs=4096 100 1 1 0 0 /n\n")
    assert wrong(node(files, mounts=said)) == {}
    files, said = other(NETWORKS[kind], "")
    assert wrong(node(files, mounts=said)) == {"dead_mounts": "fail"}


ERRORS: dict[str, tuple[str, str]] = {
    "Stale file handle": ("fail", "stale"),
    "Stale NFS file handle": ("fail", "stale"),
    "Transport endpoint is not connected": ("fail", "stale"),
    "Host is down": ("fail", "stale"),
    "Cannot send after transport endpoint shutdown": ("fail", "failed"),
    "Input/output error": ("fail", "failed"),
    "Connection timed out": ("fail", "failed"),
    "Connection refused": ("fail", "failed"),
    "No such device": ("fail", "failed"),
    "Remote I/O error": ("fail", "failed"),
    "Required key not available": ("fail", "failed"),
    "Permission denied": ("unknown", "failed"),
    "Operation not permitted": ("unknown", "failed"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_mount_that_answers_with_an_error(error: str) -> None:
    status, state = ERRORS[error]
    seen = node(mounts=stat(error))
    assert wrong(seen) == {"dead_mounts": status}
    assert f"{state}, {error}" in judged(seen)["dead_mounts"].actual


SCRATCH = MOUNTS.replace(ROOT, f"{ROOT}asked=/scratch\n{ROOT.replace(' /', ' /scratch')}")
ROOT_LINE = "/dev/sda1 / ext4 rw,relatime 0 0"
EFI = "/dev/sda2 /boot/efi vfat rw,relatime,fmask=0077 0 0"
#: The kernel's table instead of a healthy one's root, fstab, the answers -> what is wrong.
SYSTEMS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "as it is": (ROOT_LINE, FILES["/etc/fstab"], MOUNTS, {}),
    # Read-only by design.
    "squashfs and snaps": (
        f"{ROOT_LINE}\n/dev/loop0 /snap/core/1 squashfs ro,nodev 0 0\n"
        "/dev/loop1 /opt/image squashfs ro 0 0", "", MOUNTS, {},
    ),
    "a CD": (
        f"{ROOT_LINE}\n/dev/sr0 /cd iso9660 ro 0 0", "/dev/sr0 /cd iso9660 defaults 0 0", MOUNTS,
        {},
    ),
    "/usr for reading": (
        f"{ROOT_LINE}\n/dev/sda3 /usr ext4 ro 0 0", "/dev/sda3 /usr ext4 defaults,ro 0 0", MOUNTS,
        {},
    ),
    "ostree with composefs": (
        "composefs / overlay ro,relatime,lowerdir+=/x 0 0\n/dev/sda1 /sysroot xfs ro 0 0",
        "UUID=1 / xfs defaults 0 0", MOUNTS, {},
    ),
    "a live image": ("/dev/loop0 / squashfs ro 0 0", "UUID=1 / ext4 defaults 0 0", MOUNTS, {}),
    "cgroups": (f"tmpfs /sys/fs/cgroup tmpfs ro,mode=755 0 0\n{ROOT_LINE}", "", MOUNTS, {}),
    "an overlay's lower disk": (
        f"{ROOT_LINE}\n/dev/sdb /media/lower ext4 ro 0 0", "", MOUNTS, {},
    ),
    "a directory bound for reading": (
        f"{ROOT_LINE}\n/dev/sda1 /srv/ro ext4 ro 0 0", "", MOUNTS, {},
    ),
    "a network mount for reading": (
        f"{ROOT_LINE}\nnas:/sw /sw nfs ro 0 0", "nas:/sw /sw nfs defaults 0 0", MOUNTS, {},
    ),
    # Not by design.
    "root after an error": (
        "/dev/sda1 / ext4 ro,relatime,errors=remount-ro 0 0", FILES["/etc/fstab"], MOUNTS,
        {"read_only": "fail"},
    ),
    "a disk after an error": (
        f"{ROOT_LINE}\n/dev/sdb /scratch xfs ro 0 0", "/dev/sdb /scratch xfs defaults 0 0", MOUNTS,
        {"read_only": "fail"},
    ),
    "the kernel's own mark": (
        f"{ROOT_LINE}\n/dev/sdb /scratch ext4 rw,emergency_ro 0 0", "", SCRATCH,
        {"read_only": "fail"},
    ),
    "an xfs that was shut down": (
        f"{ROOT_LINE}\n/dev/sdb /scratch xfs rw,shutdown 0 0", "", SCRATCH, {"read_only": "fail"},
    ),
    # What fstab mounts at boot [fstab].
    "EFI not mounted": (ROOT_LINE, "UUID=2 /boot/efi vfat umask=0077 0 1", MOUNTS,
                        {"mounts": "warn"}),
    "EFI mounted": (f"{ROOT_LINE}\n{EFI}", "UUID=2 /boot/efi vfat umask=0077 0 1", MOUNTS, {}),
    "noauto": (ROOT_LINE, "/dev/sdx /x ext4 noauto 0 0", MOUNTS, {}),
    "automount": (ROOT_LINE, "nas:/x /x nfs x-systemd.automount 0 0", MOUNTS, {}),
    "automount, older spelling": (
        ROOT_LINE, "nas:/x /x nfs comment=systemd.automount 0 0", MOUNTS, {},
    ),
    "a cloud's temporary disk": (
        ROOT_LINE, "/dev/disk/cloud/x /mnt auto nofail,comment=cloudconfig 0 2", MOUNTS, {},
    ),
    "a network mount that failed at boot": (
        ROOT_LINE, "nas:/x /x nfs _netdev,nofail 0 0", MOUNTS, {"mounts": "warn"},
    ),
    "swap, none and comments": (
        ROOT_LINE, "#/dev/x /x ext4\nUUID=3 none swap sw\nUUID=4 swap swap", MOUNTS, {},
    ),
    "an autofs that nobody has touched": (
        f"{ROOT_LINE}\n/etc/auto.home /h autofs rw,indirect 0 0", "", MOUNTS, {},
    ),
    # Room, as df counts it.
    "full": (ROOT_LINE, "", MOUNTS.replace("600000 550000", "50000 0"), {"space": "fail"}),
    "full but for root": (
        ROOT_LINE, "", MOUNTS.replace("600000 550000", "50000 100"), {"space": "fail"},
    ),
    "no inode": (ROOT_LINE, "", MOUNTS.replace("65536 60000 /", "65536 0 /"), {"inodes": "fail"}),
    "a file system without inodes (btrfs)": (
        ROOT_LINE, "", MOUNTS.replace("65536 60000 /", "0 0 /"), {},
    ),
    "/dev/shm full": (
        ROOT_LINE, "", MOUNTS.replace(SHM, "nr_fs=4096 262144 100 100 262144 262143 /dev/shm\n"),
        {"space": "fail"},
    ),
    "a full network mount": (ROOT_LINE, "", MOUNTS.replace("200 200 0 0", "0 0 0 0"), {}),
    # A mount that another one hides is nobody's way.
    "hidden": (
        f"{ROOT_LINE}\nnas:/p /home/p nfs4 rw 0 0\n/dev/sdb /home xfs rw 0 0", "",
        stat("No such file or directory", "/home/p").replace("asked=/home\n", "asked=/home/p\n"),
        {},
    ),
    "gone, and not hidden": (
        f"{ROOT_LINE}\nnas:/p /data/p nfs4 rw 0 0", "",
        stat("No such file or directory", "/data/p").replace("asked=/home\n", "asked=/data/p\n"),
        {"dead_mounts": "fail"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SYSTEMS)
def test_a_system(case: str) -> None:
    table, fstab, said, expected = SYSTEMS[case]
    mounts = TABLE.replace(ROOT_LINE, table)
    found = wrong(node({"/proc/self/mounts": mounts, "/etc/fstab": fstab}, mounts=said))
    assert found == expected


def test_shared_memory_that_is_read_only() -> None:
    table = TABLE.replace("tmpfs rw,nosuid", "tmpfs ro,nosuid")
    said = MOUNTS.replace(SHM, "").replace("asked=/dev/shm\n", "")
    seen = node({"/proc/self/mounts": table}, mounts=said)
    assert wrong(seen) == {"shm": "fail"}
    assert judged(seen)["shm"].actual == "read-only"


def test_a_table_that_cannot_be_read_leaves_no_room_for_a_pass() -> None:
    files = {name: text for name, text in FILES.items() if name != "/proc/self/mounts"}
    outputs = {
        "host": Output(f"localtime=Etc/UTC\n{lines(files)}", 0),
        "host_slow": Output("mounts=begin\nmounts=local\nmounts=end\n", 0),
        "sysctl": Output("", 0),
    }
    found = wrong(host.parse(outputs, Policy()))
    names = ("mounts", "dead_mounts", "read_only", "space", "inodes", "shm")
    assert {name: found.get(name) for name in names} == dict.fromkeys(names, "unknown")


PROC = "/proc/sys/kernel"
#: Files -> what is wrong.
KERNELS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "as it is": ({}, {}),
    "many threads": ({"/proc/loadavg": "1.0 1.0 1.0 1/3900000 5"}, {"pids": "warn"}),
    "the last threads": ({"/proc/loadavg": "1.0 1.0 1.0 1/4190000 5"}, {"pids": "fail"}),
    "a small pid_max": ({f"{PROC}/pid_max": "2600"}, {"pids": "fail"}),
    "pid_max untold": ({f"{PROC}/pid_max": "Input/output error"}, {"pids": "unknown"}),
    "threads-max untold": ({f"{PROC}/threads-max": ""}, {"pids": "unknown"}),
    "threads untold": ({"/proc/loadavg": "1.0 1.0 1.0"}, {"pids": "unknown"}),
    "files nearly out": ({"/proc/sys/fs/file-nr": "95\t0\t100"}, {"file_handles": "warn"}),
    "files out": ({"/proc/sys/fs/file-nr": "100\t0\t100"}, {"file_handles": "fail"}),
    "files untold": ({"/proc/sys/fs/file-nr": "ERR!"}, {"file_handles": "unknown"}),
    "memory untold": ({"/proc/meminfo": "MemFree: 1 kB"}, {"memory": "unknown"}),
    "no huge pages in the kernel": ({"/proc/meminfo": "MemTotal: 9999 kB"}, {}),
    "nodes without memory": ({"/sys/devices/system/node/online": "0-7"}, {}),
    "processors offline": ({"/sys/devices/system/cpu/online": "0-94,96-191"}, {}),
    "NUMA balancing, memory tiers": ({f"{PROC}/numa_balancing": "2"}, {}),
}


@pytest.mark.parametrize("case", KERNELS)
def test_a_kernel(case: str) -> None:
    files, expected = KERNELS[case]
    assert wrong(node(files)) == expected


@pytest.mark.parametrize("said", ["zombies=x\nunseen=0\n", "zombies=0\nunseen=\n", "zombies=-1\n"])
def test_counts_that_make_no_sense_are_no_look(said: str) -> None:
    found = wrong(node(processes=f"processes=1\n{said}processes=end\n"))
    assert found == {"stuck": "unknown", "zombies": "unknown"}


@pytest.mark.parametrize("sh", ["dash", "bash"])
def test_without_awk_the_processes_are_not_looked_at(sh: str, tmp_path: Path) -> None:
    """A killed awk, or more processes than the kernel takes arguments for, finds none."""
    awk = tmp_path / "awk"
    awk.write_text("#!/bin/sh\nexit 126\n")
    awk.chmod(0o755)
    found = shutil.which(sh)
    assert found
    done = subprocess.run(
        [found, "-c", shell.minify(processes.SCRIPT)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not processes.parse(done.stdout).looked
