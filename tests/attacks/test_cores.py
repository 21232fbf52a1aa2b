"""Mallory fills the core directory; `nodeready cores` by root opens nothing of it that is no core,
and bob's cores are found and read all the same.
"""

import re
import struct

import pytest

from nodeready.lab import LabNode
from tests.attacks.conftest import Person
from tests.attacks.opens import opened
from tests.cases import read_data
from tests.command import Done, ours, wait_for, written
from tests.lifecycle.test_job import crash

CORES = "/var/crash"
PATTERN = f"{CORES}/core.%e.%P.%h.%t"
SECRET = "s3cr3t-of-root"


@pytest.fixture
def node(fresh_node: LabNode, mallory: Person, bob: Person) -> LabNode:
    """A node with a core directory that everybody may write to, as one is, and a secret."""
    fresh_node.write("/proc/sys/kernel/core_pattern", f"{PATTERN}\n")
    fresh_node.enter(["install", "-d", "-m", "1777", CORES])
    fresh_node.enter(["sh", "-c", f"echo {SECRET} >/etc/shadow; chmod 600 /etc/shadow"])
    return fresh_node


def name(number: int, comm: str = "x", time: int = 2_000_000_000) -> str:
    return f"core.{comm}.{number}.host.{time}"


def cores_of(done: Done) -> dict[str, dict[str, object]]:
    return {core["path"].rpartition("/")[2]: core for core in done.document["cores"]}


def note(kind: int, content: bytes) -> bytes:
    padded = content + b"\0" * (-len(content) % 4)
    return struct.pack("<III", 5, len(content), kind) + b"CORE\0\0\0\0" + padded


def elf(*segments: tuple[int, int, int, int], count: int | None = None, table: int = 64) -> bytes:
    """The head of a core with program headers of (type, offset, address, size)."""
    fields = (4, 62, 1, 0, table, 0, 0, 64, 56, len(segments) if count is None else count, 0, 0, 0)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", *fields)
    rows = (struct.pack("<IIQQQQQQ", k, 4, at, to, 0, n, n, 1) for k, at, to, n in segments)
    return head + b"".join(rows)


def names_program(path: bytes, uid: int = 0) -> bytes:
    """A core whose notes say that it is of this program, and of this user's process."""
    auxv = struct.pack("<QQQQ", 9, 0x400500, 0, 0)
    files = struct.pack("<QQQQQ", 1, 4096, 0x400000, 0x401000, 0) + path + b"\0"
    status = struct.pack("<iiihHQQi", 11, 0, 0, 11, 0, 0, 0, 40).ljust(336, b"\0")
    of = struct.pack("<4B4xQIIIIII", 0, 82, 0, 0, 0, uid, uid, 40, 1, 40, 40).ljust(136, b"x")
    notes = note(1, status) + note(3, of) + note(6, auxv) + note(0x46494C45, files)
    memory = (1, 4096, 0x400000, 4096)
    return (elf((4, 176, 0, len(notes)), memory) + notes).ljust(8192, b"\0")


def test_what_is_no_core_is_not_opened_and_bobs_core_is_read(node, mallory, bob, tool, fleet):
    good = crash(node, 7, time=1_700_000_000, uid=bob.uid)
    mallory.run(f"""
        cd {CORES}
        mkfifo {name(9001)}
        python3 -c 'import socket; socket.socket(1).bind("{name(9003)}")'
        ln -s /etc/shadow {name(9004)}
        ln -s {good} {name(9005)}
        mkdir {name(9006)}
        ln -s /dev/watchdog {name(9007)}
        """)  # fmt: skip
    node.enter(["mknod", "-m", "666", f"{CORES}/{name(9002)}", "c", "1", "5"])
    node.enter(["ln", "/etc/shadow", f"{CORES}/{name(9008)}"])
    left = [row for row in node.enter(["ls", CORES]).stdout.split() if "900" in row]
    assert len(left) == 8
    before = written(node)
    with opened(node, CORES) as names:
        done = tool("cores", fleet([node]), "--format", "json", "-o", tool.home / "out")
    assert done.status == 3, done
    assert names == {good.rpartition("/")[2]}
    found = cores_of(done)
    assert found[good.rpartition("/")[2]]["unread"] == ""
    assert set(found) == {good.rpartition("/")[2], name(9008)}
    assert "hard link" in str(found[name(9008)]["unread"])
    said = done.out + done.err + "".join(p.read_text() for p in (tool.home / "out").iterdir())
    assert SECRET not in said
    assert (written(node), ours(node)) == (before, [])


def test_cores_that_lie_cost_their_own_row(node, mallory, bob, tool, fleet):
    good = crash(node, 7, time=1_700_000_000, uid=bob.uid)
    endless = 2**64 - 1
    tiny = (4, 64 + 56, 0, 16 << 20)
    lies = {
        9011: elf(count=0xFFFF, table=endless),
        9012: elf((4, endless, 0, endless), (1, endless, endless, endless)),
        9013: elf((4, 2**63 - 1, 0, 2**63 - 1)),
        9014: elf(tiny) + struct.pack("<III", 0, 0, 1) * ((16 << 20) // 12),
        9015: names_program(b"/home/mallory/fifo"),
        9016: names_program(b"/home/mallory/huge"),
        9017: names_program(b"/home/mallory/\xff\x1b[2J\n"),
    }
    mallory.run("mkfifo fifo; mkdir big")
    for number, content in lies.items():
        node.write(f"{CORES}/{name(number)}", content)
    # A program whose symbols are as many as nothing can hold; of zeros, which cost no space.
    sections = struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    sections += struct.pack("<IIQQQQIIQQ", 1, 2, 0, 0, 4096, 24 << 40, 2, 0, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, 1024, 64, 0, 0, 1, 0)
    fields = (2, 62, 1, 0x400500, 0, 512, 0, 64, 56, 0, 64, 3, 2)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", *fields)
    node.write("/home/mallory/huge", head.ljust(512, b"\0") + sections)
    node.enter(["truncate", "-s", "30T", "/home/mallory/huge"])
    node.enter(["sh", "-c", f"truncate -s 9223372036854775807 {CORES}/{name(9018)}"])
    comm = r"a\033[31m\n\377"
    node.enter(["sh", "-c", f'cd {CORES}; touch "$(printf "{name(9019, comm)}")"'])
    node.enter(["sh", "-c", f"chown mallory: /home/mallory/* {CORES}/*.20*"])
    where = fleet([node])
    done = tool("cores", where, "--format", "json", status=3)
    found = cores_of(done)
    good_row = found.pop(good.rpartition("/")[2])
    assert (good_row["unread"], good_row["user"]) == ("", "bob")
    assert len(found) == 9
    why = {path.split(".")[-3]: core["unread"] for path, core in found.items()}
    assert why["9018"] == "it is no ELF file"
    assert why["9019"] == "it is empty"
    assert "/home/mallory/fifo, which is a FIFO" in why["9015"]
    assert why["9016"]
    tops = [group["frames"][0]["function"] for group in done.document["groups"]]
    assert any(re.match("__strlen", top) for top in tops), tops
    assert "\x1b" not in tool("cores", where, "-v").out
    assert ours(node) == []


@pytest.mark.nightly
def test_seventy_thousand_names_hide_nobodys_core(node, mallory, bob, tool, fleet):
    good = crash(node, 7, time=1_700_000_000, uid=bob.uid)
    mallory.run(f"""
        cd {CORES}
        python3 - <<'END'
for at in range(70_000):
    open(f"core.{{'1.' * 40}}.{{at}}.h.{{at}}", "w").close()
END
        """)
    done = tool("cores", fleet([node]), "--format", "json", status=3)
    assert cores_of(done)[good.rpartition("/")[2]]["unread"] == ""
    (more,) = done.document["more"].values()
    assert more == 70_001 - len(cores_of(done))
    assert ours(node) == []


def test_roots_gdb_does_not_do_what_a_users_core_wants(node, mallory, bob, tool, fleet):
    """A core that is root's, of a process that was mallory's: a setuid program's, or one that
    systemd keeps. What it names is opened with her rights, if at all.
    """
    node.enter(["install", "-d", "-m", "700", "/root/only"])
    node.enter(["touch", "/root/only/file"])
    content = names_program(b"/root/only/file", mallory.uid)
    node.write(f"{CORES}/{name(9021)}", content, mode=0o600)
    with opened(node, "/root/only") as names:
        done = tool("cores", fleet([node]), "--format", "json")
    assert done.status == 3, done
    assert cores_of(done)[name(9021)]["unread"]
    assert names == set()
    assert ours(node) == []


#: Takes every descriptor of each other process of hers (pidfd_getfd(2)), and keeps what it reads.
TAKES = """
import ctypes, glob, os
libc = ctypes.CDLL(None)
open("waits", "w").close()
while True:
    for path in glob.glob("/proc/[0-9]*"):
        try:
            if os.stat(path).st_uid != os.getuid() or int(path[6:]) == os.getpid():
                continue
            held = os.pidfd_open(int(path[6:]))
        except OSError:
            continue
        for number in range(40):
            taken = libc.syscall(438, held, number, 0)
            if taken < 0:
                continue
            try:
                if os.readlink(f"/proc/self/fd/{taken}").startswith("/var/crash"):
                    open("loot", "ab").write(os.pread(taken, 1 << 16, 0))
            except OSError:
                pass
            os.close(taken)
        os.close(held)
"""


def test_no_process_of_hers_holds_a_core_that_she_may_not_read(node, mallory, tool, fleet):
    """A setuid program's core is root's, and so are the secrets in it (fs.suid_dumpable 2)."""
    content = names_program(b"/usr/bin/passwd", mallory.uid) + SECRET.encode()
    for number in range(9031, 9041):
        node.write(f"{CORES}/{name(number)}", content, mode=0o600)
    mallory.start("sh", "-c", 'cd; exec python3 -c "$0"', TAKES)
    waits = ["test", "-e", "/home/mallory/waits"]
    wait_for(lambda: node.enter(waits, check=False).returncode == 0)
    done = tool("cores", fleet([node]), "--format", "json", status=3)
    assert node.enter(["test", "-e", "/home/mallory/loot"], check=False).returncode == 1
    rows = cores_of(done).values()
    assert {str(row["unread"]) for row in rows} == {
        f"it is root's, of a process of uid {mallory.uid}'s, who may not read it "
        "(a setuid program's)"
    }
    assert {row["user"] for row in rows} == {"mallory"}
    assert ours(node) == []


#: In gdb's place: it tells who it is and what it may, in its last line.
TELLS = read_data(__file__, "tells.sh")


def test_roots_cores_are_read_by_nobody_who_can_only_read(node, tool, fleet):
    """Such a core may be of a process that was root in a user's own user namespace, so that the
    user wrote every byte of it (user_namespaces(7)).
    """
    path = crash(node, 7, time=1_700_000_000)
    node.enter(["chmod", "600", path])
    done = tool("cores", fleet([node]), "--format", "json")
    assert cores_of(done)[path.rpartition("/")[2]]["unread"] == "", done
    node.write("/usr/local/bin/gdb", TELLS, mode=0o755)
    done = tool("cores", fleet([node]), "--format", "json")
    told = str(cores_of(done)[path.rpartition("/")[2]]["unread"])
    assert told.partition("it: ")[2] == (
        "uid 65534 65534, CapPrm:0000000000000004 NoNewPrivs:1 ELF, "
        "0 devices, 1 networks, Read-only"
    )
