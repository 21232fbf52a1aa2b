"""Which mounts are looked at, what they answer, and what is made of that."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects.host import mounts
from tests.builders.host import FILES, MOUNTS, judged, node, wrong

TABLE = FILES["/proc/self/mounts"]
HOME = "nr_fs=1048576 1000000 200 200 0 0 /home\n"


def asked(tmp_path: Path, table: str, policy: Policy, sh: str) -> list[str]:
    """The mounts that the script would ask, alone or (+) together, without asking any."""
    path = tmp_path / "mounts"
    path.write_text(table)
    text = shell.minify(mounts.script(policy)).replace(mounts.TABLE, str(path))
    quiet = "stat() { :; }\ntimeout() { :; }\n"
    tell = 'set -f; printf "%s\\n" $nr_net; printf "+%s\\n" $nr_local'
    text = f"{quiet}nr_hung=\n{text}{tell}\n"
    done = subprocess.run([sh, "-c", text], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(("/", "+/"))]


@pytest.mark.parametrize("sh", ["dash", "bash"])
@pytest.mark.parametrize(
    ("table", "chosen"),
    [
        ("proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0", []),
        ("/dev/sda1 / ext4 rw 0 0\n/dev/sda1 /srv/bind ext4 rw 0 0", ["+/"]),
        ("overlay / overlay rw 0 0\noverlay /var/lib/docker/overlay2/x/merged overlay rw 0 0",
         ["+/"]),
        ("tmpfs /dev/shm tmpfs rw 0 0\ntmpfs /tmp tmpfs rw 0 0\ntmpfs /x tmpfs ro,size=4k 0 0",
         ["+/dev/shm", "+/tmp"]),
        ("tmpfs /run/user/0 tmpfs rw 0 0\n/dev/loop0 /snap/core/1 squashfs ro 0 0", []),
        ("a:/x /x nfs rw 0 0\na:/x /y nfs rw 0 0\nb /z lustre rw 0 0", ["/x", "/z"]),
        ("s /a fuse.sshfs rw 0 0\ns /b fuse.sshfs rw 0 0\nl /c fuse.lxcfs rw 0 0", ["/a", "/b"]),
        ("auto /home autofs rw 0 0\nnas:/h /home nfs4 rw 0 0", ["/home"]),
        # What a person has mounted is served by that person.
        ("s /a fuse.x rw,user_id=1000,group_id=0 0 0\ns /b fuse rw,user_id=100000 0 0\n"
         "s /c fuse.x rw,user_id=999 0 0\ns /opt/img fuse.x rw,user_id=1000 0 0",
         ["/c", "/opt/img"]),
        # The way to a disk below a network mount leads through that.
        ("nas:/ / nfs rw 0 0\n/dev/sda1 /scratch xfs rw 0 0", ["/", "/scratch"]),
        ("/dev/sda1 /d ext4 rw 0 0\nnas:/ /d nfs rw 0 0\n/dev/sdb /e ext4 rw 0 0", ["/d", "+/e"]),
        ("/dev/sd\\040a /a\\040b ext4 rw 0 0\nx /[a-z]* nfs rw 0 0", ["/[a-z]*", "+/a\\040b"]),
        # What the policy names is asked alone when its kind says nothing.
        ("/dev/loop1 /opt/img squashfs ro 0 0\n/dev/sda1 /data\\040x ext4 rw 0 0",
         ["/opt/img", "+/data\\040x"]),
    ],
)  # fmt: skip
def test_which_mounts_are_asked(tmp_path: Path, table: str, chosen: list[str], sh: str) -> None:
    policy = Policy(mounts=("/opt/img", "/data x"))
    assert asked(tmp_path, table + "\n", policy, sh) == chosen


def test_free_space_is_as_df_counts_it() -> None:
    root, shm, home = node().mounts
    assert (root.size_mb, root.free_percent, root.inodes_free_percent) == (3906, 57.9, 91.6)
    assert (shm.size_mb, home.inodes_free_percent, home.network) == (1024, None, True)


@pytest.mark.parametrize(
    ("said", "rc", "check", "status", "words"),
    [
        (MOUNTS.replace(HOME, ""), 0, "dead_mounts", "fail", "/home (nas:/home, nfs4): hung"),
        (
            MOUNTS.replace(
                HOME,
                "stat: cannot read file system information for '/home': Stale file handle\n",
            ),
            0, "dead_mounts", "fail", "stale, Stale file handle",
        ),
        (
            MOUNTS.replace(HOME, "stat: can't read file system information for '/home': "
                           "Permission denied\n"),
            0, "dead_mounts", "unknown", "Permission denied",
        ),
        (MOUNTS.replace(HOME + "mounts=end\n", ""), None, "dead_mounts", "unknown", "cut off"),
        (MOUNTS.replace("nr_fs=4096 1000000 600000 550000", "nr_fs=4096 1000000 52000 2000"), 0,
         "space", "fail", "/: 0.2 % free"),
        (MOUNTS.replace("65536 60000 /", "65536 3000 /"), 0, "inodes", "fail", "/: 4.6 % free"),
        # A full network file system is not this node's trouble.
        (MOUNTS.replace("1000000 200 200", "1000000 0 0"), 0, "space", "ok", "57.9 % on /"),
        (MOUNTS.replace("asked=/home\n" + HOME, "over=/home\n"), 0, "dead_mounts", "unknown",
         "more than"),
    ],
)  # fmt: skip
def test_what_a_mount_answers(
    said: str, rc: int | None, check: str, status: str, words: str
) -> None:
    seen = node(mounts=said, slow_rc=rc)
    result = judged(seen)[check]
    assert result.status == status
    assert words in result.actual
    assert wrong(seen) == ({check: status} if status != "ok" else {})


def test_a_local_file_system_that_hangs_leaves_no_room_for_a_pass() -> None:
    seen = node(mounts="mounts=begin\nasked=/\nasked=/dev/shm\n", slow_rc=None)
    found = wrong(seen)
    assert found == {"dead_mounts": "fail", "space": "unknown", "inodes": "unknown",
                     "shm": "unknown"}  # fmt: skip


@pytest.mark.parametrize("said", ["", "mounts", "\x1b[2J" * 99, "Segmentation fault\n"])
def test_a_look_that_never_came_to_the_mounts_is_unknown(said: str) -> None:
    found = wrong(node(mounts=said, slow_rc=None))
    assert found == dict.fromkeys(("dead_mounts", "space", "inodes", "shm"), "unknown")


@pytest.mark.parametrize(
    ("table", "fstab", "expected"),
    [
        (TABLE.replace("ext4 rw", "ext4 ro"), FILES["/etc/fstab"], {"read_only": "fail"}),
        (TABLE.replace("ext4 rw", "ext4 ro"), "UUID=1 / ext4 defaults,ro 0 1", {}),
        (TABLE.replace("ext4 rw", "ext4 ro"), "", {}),
        (TABLE.replace("ext4 rw", "ext4 rw,emergency_ro"), "", {"read_only": "fail"}),
        (TABLE.replace("nfs4 rw", "nfs4 ro"), FILES["/etc/fstab"], {}),
        (TABLE, "nas:/x /x nfs nofail 0 0", {"mounts": "warn"}),
        (TABLE, "/dev/sdx /mnt ext4 nofail 0 0\n/dev/cdrom /media udf noauto 0 0", {}),
        (TABLE, "/dev/sdx /mnt ext4 defaults 0 0", {"mounts": "warn"}),
    ],
)
def test_what_fstab_tells_of_a_mount(table: str, fstab: str, expected: dict[str, str]) -> None:
    assert wrong(node({"/proc/self/mounts": table, "/etc/fstab": fstab})) == expected


@pytest.mark.parametrize(
    ("policy", "table", "expected"),
    [
        (Policy(mounts=("/home",)), TABLE, {}),
        (Policy(mounts=("/scratch", "/home")), TABLE, {"mounts": "fail"}),
        (Policy(mounts=("/h",)), TABLE + "\nmap /h autofs rw 0 0", {}),
        (Policy(mounts=("/a b",)), TABLE + "\n/dev/sdb /a\\040b ext3 rw 0 0",
         {"dead_mounts": "unknown", "space": "unknown", "inodes": "unknown"}),
        (Policy(shm_min_mb=1024), TABLE, {}),
        (Policy(shm_min_mb=1025), TABLE, {"shm": "fail"}),
        (Policy(), TABLE.replace("/dev/shm", "/run/shm"), {"shm": "fail"}),
        (Policy(disk_free_percent=58), TABLE, {"space": "fail"}),
        (Policy(disk_free_percent=0), TABLE, {}),
    ],
)  # fmt: skip
def test_what_the_policy_asks_of_mounts(
    policy: Policy, table: str, expected: dict[str, str]
) -> None:
    assert wrong(node({"/proc/self/mounts": table}, policy=policy), policy) == expected


def test_hostile_answers_stay_data() -> None:
    evil = MOUNTS.replace(HOME, f"nr_fs={'9' * 20} {'9' * 20} 1 1 1 1 /home\n")
    evil += "asked=/$(reboot)\nnr_fs=1 2 3\nnr_fs=0 0 0 0 0 0 /\x1b[2J\n" + "stat: '/'': " * 9999
    seen = node(mounts=evil)
    assert {mount.path for mount in seen.mounts} == {"/", "/dev/shm", "/home"}
    assert wrong(seen) == {}
