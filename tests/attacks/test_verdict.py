"""An ordinary user of a node keeps no job away from it: the verdict stays as it was without her.

A row is what she does at will; docs/gate.md has the same table in words. The verdict is read from
what root's audit fails or cannot observe, which is what stops a job.
"""

import re
import time

import pytest

from tests.attacks.conftest import Person, person
from tests.cases import read_data, read_table
from tests.command import Tool, wait_for

#: What the node's own limits of time would need minutes for.
SOON = """
from nodeready.subjects.host import checks
from nodeready.subjects.gpus import nvidia
checks.HUNG_S = 0
assert nvidia.STUCK_AFTER_S == 30
nvidia.STUCK_AFTER_S = -1
"""

# A parent in state D: it waits for a child that neither ends nor runs a program (vfork(2)).
WAITS = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
libc.prctl(15, sys.argv[1].encode(), 0, 0, 0)  # PR_SET_NAME
if libc.vfork() == 0:
    while True:
        time.sleep(600)
"""

# Children that have ended, and that nobody asks for their status.
ZOMBIES = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    parent = os.fork()
    if parent == 0:
        for _ in range(9):
            if os.fork() == 0:
                os._exit(0)
        time.sleep(600)
time.sleep(600)
"""

LISTENS = """
import ctypes, socket, sys, time
ctypes.CDLL(None).prctl(15, b"a\\nheld=tcp 0", 0, 0, 0)
with socket.create_server(("", 29500)):
    time.sleep(600)
"""

#: A page whose faults she handles herself, or does not (userfaultfd(2)).
PAGE = """
import ctypes, fcntl, mmap, os, struct, sys, threading, time
libc = ctypes.CDLL(None)
with open(sys.argv[1]) as device:
    number = fcntl.ioctl(device, 0xAA00, os.O_CLOEXEC)  # USERFAULTFD_IOC_NEW
fcntl.ioctl(number, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))  # UFFDIO_API
place = mmap.mmap(-1, 4096)
at = ctypes.addressof(ctypes.c_char.from_buffer(place))
fcntl.ioctl(number, 0xC020AA00, bytearray(struct.pack("QQQQ", at, 4096, 1, 0)))  # UFFDIO_REGISTER
"""

#: She writes to a file from a page whose faults she does not handle (userfaultfd(2)), and so holds
#: the file's lock; a program that is setuid root waits for it with what it says.
SETUID = f"""{PAGE}
file = os.open("held", os.O_CREAT | os.O_WRONLY)
threading.Thread(target=lambda: libc.write(file, ctypes.c_void_p(at), 4096), daemon=True).start()
time.sleep(0.5)
if not os.path.lexists(sys.argv[2]):
    os.symlink("/usr/bin/sudo", sys.argv[2])
if os.fork() == 0:
    os.dup2(file, 2)
    os.execv(sys.argv[2], [sys.argv[2], "-S", "true", *sys.argv[3:]])
time.sleep(600)
"""

NAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
time.sleep(600)
"""

# A file system of her own, mounted as fusermount does it, whose program never answers.
MOUNT = """
import ctypes, os, sys
handle = os.open(sys.argv[1], os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
for number in range(int(sys.argv[2])):
    path = f"{sys.argv[3]}/m{number}"
    os.makedirs(path, exist_ok=True)
    own = os.open(sys.argv[1], os.O_RDWR)
    data = f"fd={own},rootmode=40000,user_id=4001,group_id=4001,allow_other".encode()
    assert libc.mount(b"her nas:/x", path.encode(), b"fuse.sshfs", 6, data) == 0
    os.set_inheritable(own, True)
os.execvp("sleep", ["her-mounts", "600"])
"""

# It reads another's page, whose faults she handles herself, or does not (userfaultfd(2)).
FAULTS = f"""{PAGE}
owner = os.getpid()
if os.fork() == 0:
    into = ctypes.create_string_buffer(8)
    ours = struct.pack("QQ", ctypes.addressof(into), 8)
    libc.process_vm_readv(owner, ours, 1, struct.pack("QQ", at, 8), 1, 0)
time.sleep(600)
"""


_PROGRAMS = {
    "waits": WAITS, "named": NAMED, "zombies": ZOMBIES, "listens": LISTENS, "setuid": SETUID,
    "faults": FAULTS,
}  # fmt: skip
_MINOR = "awk '$2 == \"userfaultfd\" { print $1 }' /proc/misc"


def begin(her: Person, how: str, *words: str) -> None:
    if how == "mount":
        count, below = words
        # fusermount is setuid root and does just this for her.
        her.node.enter(["sh", "-c", "[ -e /dev/fuse ] || mknod -m 666 /dev/fuse c 10 229"])
        into = ["sh", "-c", 'setsid python3 -c "$@" >/dev/null 2>&1 </dev/null &', "sh"]
        # The kernel's table of mounts has four characters for each backslash.
        place = f"{her.home}/{below}".replace("LONG", "/" + "\\" * 255)
        her.node.enter([*into, MOUNT, "/dev/fuse", count, place])
    elif how in ("faults", "setuid"):
        # Where an administrator gave it to users; else the kernel's own faults end the reader.
        device = f"[ -e /tmp/uffd ] || mknod -m 666 /tmp/uffd c 10 $({_MINOR})"
        her.node.enter(["sh", "-c", device])
        into = ["sh", "-c", 'cd; exec python3 -c "$@"', "sh"]
        her.start(*into, _PROGRAMS[how], "/tmp/uffd", *words)
    elif how == "slurmd":
        her.start("sh", "-c", 'ulimit -n 8; exec python3 -c "$0" slurmd', NAMED)
    elif how == "many":
        for number in range(40):
            her.python(WAITS, f"t{number}")
    else:
        her.python(_PROGRAMS[how], *words)


#: What she hopes for -> how she begins, a command that tells that she has, and a pattern of what
#: the audit must say, where it has to be a finding at all; what is left of the row before, until
#: the kernel has ended it, counts, too.
ROWS = read_table(__file__, "ROWS")
#: Her file systems go; %b undoes the table's escapes.
OVER = read_data(__file__, "verdict_over.sh")


def _judged(tool: Tool, inventory: object) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """What stops a job, and all results."""
    skip = "gate,ssh_client,pdsh"
    done = tool("audit", inventory, "--format", "json", "--skip", skip, first=SOON)
    assert done.status in (0, 3), done
    assert not done.reasons, done.reasons
    (results,) = done.results.values()
    stops = {check: row["status"] for check, row in results.items()}
    return {c: s for c, s in stops.items() if s in ("fail", "unknown")}, results


USUAL = (
    "a vfork with a sleeping child",
    "an nvidia-smi that hangs",
    "zombies without end",
    "a listener on the job's port, named like a line of ours",
    "a file system of her own that hangs",
    "a name with a newline and escapes",
)


@pytest.mark.parametrize(
    "names",
    [USUAL, pytest.param([name for name in ROWS if name not in USUAL], marks=pytest.mark.nightly)],
    ids=["usual", "rest"],
)
def test_a_user_does_not_stop_the_jobs_of_others(fresh_nodes, tool, fleet, names):
    (node,) = fresh_nodes(1, profile="h100")
    her = person(node, "mallory", 4001)
    node.enter(["sh", "-c", "mkdir /data; mount -t ramfs data /data"])
    inventory = fleet([node], mounts=["/data"])
    before, _ = _judged(tool, inventory)
    wrong = {}
    for name in names:
        how, begun, told = ROWS[name]
        begin(her, *how)
        there = ["sh", "-c", begun]
        try:
            wait_for(lambda there=there: node.enter(there, check=False).returncode == 0)
            if told:
                # What has waited in the kernel for less than that may be a slow disk.
                time.sleep(2)
            after, results = _judged(tool, inventory)
        finally:
            her.end()
            node.enter(["sh", "-c", OVER], check=False)
        if after != before:
            wrong[name] = {k: v for k, v in after.items() if before.get(k) != v}
        elif told and not any(re.search(told, r["actual"]) for r in results.values()):
            wrong[name] = f"nothing tells {told!r}"
    assert wrong == {}


def test_what_a_user_takes_from_jobs_is_named_with_its_place(fresh_nodes, tool, fleet):
    (node,) = fresh_nodes(1)
    her = person(node, "mallory", 4001)
    node.enter(["sh", "-c", "mkdir /scratch; mount -t tmpfs -o size=4m,nr_inodes=99 x /scratch"])
    node.enter(["chmod", "1777", "/scratch"])
    inventory = fleet([node], mounts=["/scratch"])
    before, _ = _judged(tool, inventory)
    takes = {
        "host.space": "head -c 5000000 /dev/zero >/scratch/full; test -s /scratch/full",
        "host.inodes": "cd /scratch; touch $(seq 99) 2>/dev/null; test -e 9",
    }
    for check, script in takes.items():
        her.run(script)
        after, results = _judged(tool, inventory)
        assert {name: after[name] for name in after if name not in before} == {check: "fail"}
        assert "/scratch" in results[check]["actual"]
        her.run("rm -r /scratch/*")
    assert _judged(tool, inventory)[0] == before


def test_a_port_that_she_holds_is_blamed_on_no_job_of_others(fresh_node, mallory, tool, fleet):
    mount = "mount -t cgroup -o freezer freezer /mnt"
    if fresh_node.enter(["sh", "-c", mount], check=False).returncode:
        pytest.skip("no cgroup v1 freezer here")
    # As systemd delegates it to her; she names what is below.
    hers = f"/mnt/{fresh_node.name}/user.slice/user-4001.slice/user@4001.service"
    fresh_node.enter(["sh", "-c", f"mkdir -p {hers} && chown 4001 {hers}"])
    mallory.run(f"mkdir -p {hers}/slurm/uid_4002/job_77")
    mallory.python(LISTENS)
    wait_for(lambda: "733C" in fresh_node.read("/proc/net/tcp"))
    move = (
        f"for p in $(pgrep -u 4001); do echo $p >{hers}/slurm/uid_4002/job_77/cgroup.procs; done"
    )
    fresh_node.enter(["sh", "-c", move])
    where = fleet([fresh_node])
    done = tool("audit", where, "--only", "ports.range", "--format", "json")
    told = done.results[fresh_node.name]["ports.range"]
    mallory.end()
    fresh_node.enter(
        ["sh", "-c", f"find /mnt/{fresh_node.name} -depth -type d -exec rmdir {{}} +"]
    )
    assert "mallory" in told["actual"]
    assert "job 77" not in told["actual"]
