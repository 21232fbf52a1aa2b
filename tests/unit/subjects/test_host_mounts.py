"""Which mounts are looked at, what they answer, and what is wrong with them.

Sources of the rows: proc_pid_mounts(5); fstab(5), systemd.mount(5); errno(3), "Cannot send after
transport endpoint shutdown" is Lustre's eviction; ostree and composefs: an image is the root;
statfs(2).
"""

import subprocess
from pathlib import Path

import pytest

from nodeready.core import shell
from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.subjects.host import checks, mounts
from nodeready.subjects.host import facts as host
from tests.builders.host import FILES, MOUNTS, judged, node, wrong
from tests.builders.judging import assert_wrong
from tests.builders.printed import grep_lines
from tests.builders.verdicts import policy_of
from tests.cases import cases

TABLE = FILES["/proc/self/mounts"]
ROOT_LINE = "/dev/sda1 / ext4 rw,relatime 0 0"
ROOT = "nr_fs=4096 1000000 600000 550000 65536 60000 /\n"
SHM = "nr_fs=4096 262144 262144 262144 262144 262143 /dev/shm\n"
HOME = "nr_fs=1048576 1000000 200 200 0 0 /home\n"


def mounts_asked(tmp_path: Path, table: str, policy: Policy, sh: str) -> list[str]:
    """The mounts that the script would ask, alone or (+) together, without asking any."""
    path = tmp_path / "mounts"
    path.write_text(table)
    text = shell.minify(mounts.script(policy)).replace(mounts.TABLE, str(path))
    quiet = "stat() { :; }\ntimeout() { :; }\n"
    tell = 'set -f; printf "%s\\n" $nr_net; printf "+%s\\n" $nr_local'
    text = f"{quiet}nr_hung=\n{text}{tell}\n"
    done = subprocess.run([sh, "-c", text], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(("/", "+/"))]


@pytest.mark.parametrize("sh", ["sh", "bash"])
@pytest.mark.parametrize("case", cases(__file__, "data/host/asked.json"))
def test_which_mounts_are_asked(tmp_path, sh, case):
    policy = Policy(mounts=("/opt/img", "/data x"))
    assert mounts_asked(tmp_path, case["table"] + "\n", policy, sh) == case["chosen"]


def test_free_space_is_as_df_counts_it():
    root, shm, home = node().mounts
    assert (root.size_mb, root.free_percent, root.inodes_free_percent) == (3906, 57.9, 91.6)
    assert (shm.size_mb, home.inodes_free_percent, home.network) == (1024, None, True)


@pytest.mark.parametrize("case", cases(__file__, "data/host/mounts.json"))
def test_a_system(case):
    """The kernel's table (root: the line of /, more: other lines), fstab, and the answers.

    stat: a network mount and its error; local: one more mount, that answers as / does.
    """
    policy = policy_of(case)
    table = TABLE.replace(ROOT_LINE, case.get("root", ROOT_LINE))
    table += "".join(f"\n{line}" for line in case.get("more", "").splitlines())
    answers = MOUNTS
    if "stat" in case:
        path, error = case["stat"]
        answer = f"stat: cannot read file system information for '{path}': {error}\n"
        answers = answers.replace(f"asked=/home\n{HOME}", f"asked={path}\n{answer}")
    if "local" in case:
        path = case["local"]
        answers = answers.replace(ROOT, f"{ROOT}asked={path}\n{ROOT.replace(' /', f' {path}')}")
    for old, new in case.get("replace", ()):
        assert old in answers
        answers = answers.replace(old, new)
    files = {"/proc/self/mounts": table, "/etc/fstab": case.get("fstab", FILES["/etc/fstab"])}
    observed = node(files, mounts=answers, slow_rc=case.get("rc", 0), policy=policy)
    assert_wrong(checks, observed, case["wrong"], policy)


@pytest.mark.parametrize("answers", ["", "mounts", "\x1b[2J" * 99, "Segmentation fault\n"])
def test_a_look_that_never_came_to_the_mounts_is_unknown(answers):
    results = wrong(node(mounts=answers, slow_rc=None))
    assert results == dict.fromkeys(("dead_mounts", "space", "inodes", "shm"), "unknown")


KINDS = "nfs lustre gpfs beegfs ceph cifs wekafs 9p virtiofs cvfs fuse.s3fs fuse"


@pytest.mark.parametrize("kind", KINDS.split())
def test_a_network_file_system_that_hangs(kind):
    table = {"/proc/self/mounts": f"{TABLE}\nnas:/x /n {kind} rw,user_id=0 0 0"}
    for answer, expected in (("nr_fs=4096 100 1 1 0 0 /n\n", {}), ("", {"dead_mounts": "fail"})):
        answers = MOUNTS.replace("mounts=end", f"asked=/n\n{answer}mounts=end")
        assert wrong(node(table, mounts=answers)) == expected


def test_shared_memory_that_is_read_only_or_elsewhere():
    table = TABLE.replace("tmpfs rw,nosuid", "tmpfs ro,nosuid")
    answers = MOUNTS.replace(SHM, "").replace("asked=/dev/shm\n", "")
    observed = node({"/proc/self/mounts": table}, mounts=answers)
    assert wrong(observed) == {"shm": "fail"}
    assert judged(observed)["shm"].actual == "read-only"
    elsewhere = TABLE.replace("/dev/shm", "/run/shm")
    assert wrong(node({"/proc/self/mounts": elsewhere})) == {"shm": "fail"}


def test_a_table_that_cannot_be_read_leaves_no_room_for_a_pass():
    files = {name: text for name, text in FILES.items() if name != "/proc/self/mounts"}
    outputs = {
        "host": Output(f"localtime=Etc/UTC\n{grep_lines(files)}", 0),
        "host_slow": Output("mounts=begin\nmounts=local\nmounts=end\n", 0),
        "sysctl": Output("", 0),
    }
    results = wrong(host.parse(outputs, Policy()))
    names = ("mounts", "dead_mounts", "read_only", "space", "inodes", "shm")
    assert {name: results.get(name) for name in names} == dict.fromkeys(names, "unknown")


def test_hostile_answers_stay_data():
    evil = MOUNTS.replace(HOME, f"nr_fs={'9' * 20} {'9' * 20} 1 1 1 1 /home\n")
    evil += "asked=/$(reboot)\nnr_fs=1 2 3\nnr_fs=0 0 0 0 0 0 /\x1b[2J\n" + "stat: '/'': " * 9999
    observed = node(mounts=evil)
    assert {mount.path for mount in observed.mounts} == {"/", "/dev/shm", "/home"}
    assert wrong(observed) == {}
