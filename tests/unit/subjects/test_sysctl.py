"""What sets a sysctl at the next boot: as systemd-sysctl, procps, tuned, ufw and the kernel do."""

from __future__ import annotations

import pytest

from nodeready.subjects import sysctl
from nodeready.subjects.base import Output

ETC, RUN, LOCAL, USR = (
    "/etc/sysctl.d",
    "/run/sysctl.d",
    "/usr/local/lib/sysctl.d",
    "/usr/lib/sysctl.d",
)
YAMA = "kernel.yama.ptrace_scope"
CONF = "/etc/sysctl.conf"
TUNED = "/usr/lib/tuned/hpc-compute/tuned.conf"
BASE = "/usr/lib/tuned/latency-performance/tuned.conf"
MAIN = "/etc/tuned/tuned-main.conf"


def printed(files: dict[str, str], more: str = "reader=systemd\n") -> str:
    """What the node's shell would print for these files."""
    text = "".join(f"file={path}\n" for path in files if "sysctl.d/" in path or path == CONF)
    for path, content in files.items():
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip() and line.strip()[0] not in "#;":
                text += f"{path}:{number}:{line}\n"
    return text + more


def boot(files: dict[str, str], key: str = YAMA, more: str = "reader=systemd\n") -> sysctl.Boot:
    return sysctl.boot_value(sysctl.parse(Output(printed(files, more), 0)), key)


IFACE = "net.ipv4.conf.enp3s0/200.forwarding"
# what, files, key, the value at the next boot (None: none is set), where it stands.
# Rules: sysctl.d(5) of systemd 252 and src/sysctl/sysctl.c (parse_line, apply_glob_option);
# src/basic/sysctl-util.c (sysctl_normalize).
CASES = [
    (
        "an explicit key beats a glob behind it",
        {f"{ETC}/1.conf": f"{YAMA}=0", f"{ETC}/9.conf": "kernel.yama.* = 1"},
        YAMA,
        "0",
        f"{ETC}/1.conf:1",
    ),
    (
        "an explicit key beats a glob before it in the same file",
        {f"{ETC}/1.conf": f"kernel.yama.*=1\n{YAMA}=0"},
        YAMA,
        "0",
        f"{ETC}/1.conf:2",
    ),
    (
        "an explicit key beats a glob behind it in the same file",
        {f"{ETC}/1.conf": f"{YAMA}=0\nkernel.yama.*=1"},
        YAMA,
        "0",
        f"{ETC}/1.conf:1",
    ),
    (
        "a glob alone sets it",
        {f"{ETC}/1.conf": "kernel.yama.ptrace_*=0"},
        YAMA,
        "0",
        f"{ETC}/1.conf:1",
    ),
    (
        "of two globs the later one wins",
        {f"{ETC}/1.conf": "kernel.yama.*=1", f"{ETC}/2.conf": "kernel.*.ptrace_scope=0"},
        YAMA,
        "0",
        f"{ETC}/2.conf:1",
    ),
    (
        "a glob that is said again with its old value keeps its old place",
        {f"{ETC}/1.conf": "kernel.yama.*=1\nkernel.*.ptrace_scope=0\nkernel.yama.*=1"},
        YAMA,
        "0",
        f"{ETC}/1.conf:2",
    ),
    (
        "a glob that is said again with another value moves behind",
        {f"{ETC}/1.conf": "kernel.yama.*=2\nkernel.*.ptrace_scope=0\nkernel.yama.*=1"},
        YAMA,
        "1",
        f"{ETC}/1.conf:3",
    ),
    ("a star matches no separator", {f"{ETC}/1.conf": "kernel.*=1"}, YAMA, None, ""),
    ("... nor does it match one too many", {f"{ETC}/1.conf": "kernel.*.*.*=1"}, YAMA, None, ""),
    (
        "a question mark and a class are globs too",
        {f"{ETC}/1.conf": "kernel.yam?.ptrace_[rs]cope=0"},
        YAMA,
        "0",
        f"{ETC}/1.conf:1",
    ),
    (
        "a key with a dash and no value is excluded from globs",
        {f"{ETC}/1.conf": f"kernel.yama.*=1\n-{YAMA}"},
        YAMA,
        None,
        "",
    ),
    (
        "... and takes back what an earlier line sets",
        {f"{ETC}/1.conf": f"{YAMA}=1", f"{ETC}/2.conf": f"-{YAMA}"},
        YAMA,
        None,
        "",
    ),
    (
        "... until a later line sets it",
        {f"{ETC}/1.conf": f"-{YAMA}", f"{ETC}/2.conf": f"{YAMA}=0"},
        YAMA,
        "0",
        f"{ETC}/2.conf:1",
    ),
    (
        "a dash with a value only hides failures",
        {f"{ETC}/1.conf": f"-{YAMA}=0"},
        YAMA,
        "0",
        f"{ETC}/1.conf:1",
    ),
    (
        "a dash before a glob with a value",
        {f"{ETC}/1.conf": "-kernel.yama.*=0"},
        YAMA,
        "0",
        f"{ETC}/1.conf:1",
    ),
    ("a line without = and without a dash is none", {f"{ETC}/1.conf": YAMA}, YAMA, None, ""),
    (
        "slashes",
        {f"{ETC}/1.conf": "kernel/yama/ptrace_scope = 0"},
        YAMA,
        "0",
        f"{ETC}/1.conf:1",
    ),
    (
        "a slash before and slashes doubled",
        {f"{ETC}/1.conf": "/kernel//yama/ptrace_scope=0"},
        YAMA,
        "0",
        f"{ETC}/1.conf:1",
    ),
    (
        "behind a first slash, dots are names' own",
        {f"{ETC}/1.conf": "net/ipv4/conf/enp3s0.200/forwarding=1"},
        IFACE,
        "1",
        f"{ETC}/1.conf:1",
    ),
    (
        "behind a first dot, slashes are names' dots",
        {f"{ETC}/1.conf": "net.ipv4.conf.enp3s0/200.forwarding=1"},
        IFACE,
        "1",
        f"{ETC}/1.conf:1",
    ),
    (
        "dots all the way are another key",
        {f"{ETC}/1.conf": "net.ipv4.conf.enp3s0.200.forwarding=1"},
        IFACE,
        None,
        "",
    ),
    (
        "slashes with a first dot are another key",
        {f"{ETC}/1.conf": "kernel.yama/ptrace_scope=1"},
        YAMA,
        None,
        "",
    ),
    (
        "a glob of interfaces",
        {f"{ETC}/1.conf": "net.ipv4.conf.*.forwarding=1"},
        IFACE,
        "1",
        f"{ETC}/1.conf:1",
    ),
    (
        "the later base name wins over all directories",
        {
            f"{ETC}/10-a.conf": f"{YAMA}=1",
            f"{RUN}/20.conf": f"{YAMA}=2",
            f"{LOCAL}/30.conf": f"{YAMA}=3",
            f"{USR}/40.conf": f"{YAMA}=0",
        },
        YAMA,
        "0",
        f"{USR}/40.conf:1",
    ),
    (
        "run masks usr/local, which masks usr",
        {
            f"{USR}/a.conf": f"{YAMA}=3",
            f"{LOCAL}/a.conf": f"{YAMA}=2",
            f"{RUN}/a.conf": f"{YAMA}=0",
        },
        YAMA,
        "0",
        f"{RUN}/a.conf:1",
    ),
    (
        "an empty file (or a link to /dev/null) masks",
        {f"{ETC}/10-ptrace.conf": "", f"{USR}/10-ptrace.conf": f"{YAMA}=1"},
        YAMA,
        None,
        "",
    ),
    (
        "values keep inner blanks, comments and quotes, and lose outer blanks",
        {f"{ETC}/1.conf": "kernel.core_pattern =\t a  b # c \r"},
        "kernel.core_pattern",
        "a  b # c",
        f"{ETC}/1.conf:1",
    ),
    (
        "a value may hold an equals sign",
        {f"{ETC}/1.conf": "kernel.core_pattern=|/x a=b"},
        "kernel.core_pattern",
        "|/x a=b",
        f"{ETC}/1.conf:1",
    ),
    (
        "an empty value is a value",
        {f"{ETC}/1.conf": f"{YAMA}=0\n{YAMA}="},
        YAMA,
        "",
        f"{ETC}/1.conf:2",
    ),
    (
        "a backslash continues nothing",
        {f"{ETC}/1.conf": f"kernel.domainname=x \\\n{YAMA}=0"},
        YAMA,
        "0",
        f"{ETC}/1.conf:2",
    ),
    (
        "the last line of a file wins",
        {f"{ETC}/1.conf": f"{YAMA}=1\n{YAMA}=2\n{YAMA}=0"},
        YAMA,
        "0",
        f"{ETC}/1.conf:3",
    ),
    ("keys have case", {f"{ETC}/1.conf": "Kernel.Yama.ptrace_scope=1"}, YAMA, None, ""),
    (
        "systemd reads no /etc/sysctl.conf",
        {f"{ETC}/1.conf": f"{YAMA}=0", CONF: f"{YAMA}=1"},
        YAMA,
        "0",
        f"{ETC}/1.conf:1",
    ),
    (
        "but what it is linked as",
        {f"{ETC}/10.conf": f"{YAMA}=1", f"{ETC}/99-sysctl.conf": f"{YAMA}=0"},
        YAMA,
        "0",
        f"{ETC}/99-sysctl.conf:1",
    ),
]


@pytest.mark.parametrize(
    ("files", "key", "value", "where"), [row[1:] for row in CASES], ids=[row[0] for row in CASES]
)
def test_the_next_boots_value_is_systemd_sysctls(files, key, value, where):
    winner = boot(files, key).winner
    assert (winner.value if winner else None, winner.where if winner else "") == (value, where)


# what, files, what else the node says, value, whether a file of ours in /etc/sysctl.d can win
WRITERS = [
    (
        "the kernel's command line, where no file sets the key (kernel-parameters.txt, sysctl.*=)",
        {},
        f"reader=systemd\ncmdline=ro sysctl.{YAMA}=0 quiet\n",
        "0",
        True,
    ),
    (
        "... its slashes too",
        {},
        "reader=systemd\ncmdline=sysctl/kernel/yama/ptrace_scope=2\n",
        "2",
        True,
    ),
    (
        "any file is read after it",
        {f"{USR}/1.conf": f"{YAMA}=0"},
        f"reader=systemd\ncmdline=sysctl.{YAMA}=1\n",
        "0",
        True,
    ),
    (
        "systemd-sysctl is masked: no file is read",
        {f"{ETC}/1.conf": f"{YAMA}=0"},
        "reader=systemd\nmasked=/etc/systemd/system/systemd-sysctl.service\n",
        None,
        False,
    ),
    (
        "tuned sets what no file sets",
        {TUNED: f"[main]\nsummary=x\n[sysctl]\n{YAMA} = 1"},
        f"reader=systemd\ntuned={TUNED}\n",
        "1",
        True,
    ),
    (
        "tuned applies /etc again behind its own (reapply_sysctl)",
        {f"{ETC}/1.conf": f"{YAMA}=0", TUNED: f"[sysctl]\n{YAMA}=1"},
        f"reader=systemd\ntuned={TUNED}\n",
        "0",
        True,
    ),
    (
        "... but not /usr/lib",
        {f"{USR}/1.conf": f"{YAMA}=0", TUNED: f"[sysctl]\n{YAMA}=1"},
        f"reader=systemd\ntuned={TUNED}\n",
        "1",
        True,
    ),
    (
        "without reapply_sysctl, tuned has the last word",
        {
            f"{ETC}/1.conf": f"{YAMA}=0",
            TUNED: f"[sysctl]\n{YAMA}=1",
            MAIN: "daemon = 1\nreapply_sysctl = 0",
        },
        f"reader=systemd\ntuned={TUNED}\n",
        "1",
        False,
    ),
    (
        "a profile wins over what it includes",
        {
            TUNED: f"[main]\ninclude=latency-performance\n[sysctl]\n{YAMA}=0",
            BASE: f"[sysctl]\n{YAMA}=1",
        },
        f"reader=systemd\ntuned={TUNED}\ntuned={BASE}\n",
        "0",
        True,
    ),
    (
        "another section of a profile sets no sysctl",
        {TUNED: f"[bootloader]\n{YAMA}=1"},
        f"reader=systemd\ntuned={TUNED}\n",
        None,
        True,
    ),
    (
        "an enabled ufw writes its own file",
        {
            f"{ETC}/1.conf": f"{YAMA}=0",
            "/etc/ufw/ufw.conf": "ENABLED=yes",
            "/etc/ufw/sysctl.conf": "kernel/yama/ptrace_scope=1",
        },
        "reader=systemd\n",
        "1",
        False,
    ),
    (
        "one that is not enabled does not",
        {
            f"{ETC}/1.conf": f"{YAMA}=0",
            "/etc/ufw/ufw.conf": "ENABLED=no",
            "/etc/ufw/sysctl.conf": "kernel/yama/ptrace_scope=1",
        },
        "reader=systemd\n",
        "0",
        True,
    ),
    (
        "without systemd, procps reads /etc/sysctl.conf last",
        {f"{ETC}/1.conf": f"{YAMA}=0", CONF: f"{YAMA}=1"},
        "",
        "1",
        False,
    ),
    ("a glob in a file behind every name of ours", {f"{ETC}/~.conf": "kernel.yama.*=1"},
     "reader=systemd\n", "1", True),
    ("a key in a file behind every name of ours", {f"{ETC}/~.conf": f"{YAMA}=1"},
     "reader=systemd\n", "1", False),
    ("a key that such a file excludes",
     {f"{ETC}/1.conf": f"{YAMA}=0", f"{ETC}/~.conf": f"-{YAMA}"},
     "reader=systemd\n", None, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "more", "value", "beatable"), [row[1:] for row in WRITERS],
    ids=[row[0] for row in WRITERS],
)  # fmt: skip
def test_other_writers_of_the_next_boots_value(files, more, value, beatable):
    found = boot(files, YAMA, more)
    assert (found.winner.value if found.winner else None, found.beatable) == (value, beatable)


@pytest.mark.parametrize(
    ("files", "conflict"),
    [
        ({CONF: f"{YAMA}=1"}, f"{CONF}:1"),
        ({f"{ETC}/1.conf": f"{YAMA}=0", CONF: f"x=1\n{YAMA}=1"}, f"{CONF}:2"),
        # An explicit key beats a glob for procps 4 too.
        ({f"{ETC}/1.conf": f"{YAMA}=0", CONF: "kernel.yama.*=1"}, ""),
        ({f"{ETC}/1.conf": "kernel.yama.*=0", CONF: f"{YAMA}=1"}, f"{CONF}:1"),
        ({f"{ETC}/1.conf": f"{YAMA}=0", CONF: f"#{YAMA}=1"}, ""),
    ],
)
def test_what_sysctl_system_would_set_instead(files, conflict):
    found = boot(files)
    assert (found.conflict.where if found.conflict else "") == conflict


@pytest.mark.parametrize(
    ("files", "last"),
    [
        ({f"{ETC}/20.conf": f"{YAMA}=1", f"{USR}/30.conf": f"{YAMA}=2"}, "30.conf"),
        # A glob needs no file behind it, a line that excludes the key does.
        ({f"{ETC}/20.conf": f"{YAMA}=1", f"{ETC}/90.conf": "kernel.yama.*=1"}, "20.conf"),
        ({f"{ETC}/20.conf": f"{YAMA}=1", f"{ETC}/90.conf": f"-{YAMA}"}, "90.conf"),
        ({f"{ETC}/99-zz-nodeready-ptrace.conf": f"{YAMA}=1"}, ""),
    ],
)
def test_the_file_behind_which_ours_must_sort(files, last):
    assert boot(files).last_name == last


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0), ("1 ", 1), ("0 # off", 0), ("00", 0), ("0x1", 1), ("-1", -1), ("010", 8),
        ("2 1", 2), ("", None), ("0,", None), ('"0"', None), ("on", None), ("0#", None),
        ("1;", None), ("9" * 5000, None),
    ],
)  # fmt: skip
def test_the_number_that_the_kernel_takes(text, number):
    """kernel/sysctl.c, proc_get_long: the first word counts; it ends at a blank."""
    assert sysctl.kernel_number(text) == number
