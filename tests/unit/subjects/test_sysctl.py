"""What sets a sysctl at the next boot: as systemd-sysctl, procps, tuned, ufw and the kernel do."""

import re

import pytest

from nodeready.core import sysctl
from nodeready.core.base import Output
from tests.builders.printed import grep_lines
from tests.cases import cases

YAMA = "kernel.yama.ptrace_scope"
#: How the cases write a directory of the node.
SHORT = {
    "etc/": "/etc/sysctl.d/", "run/": "/run/sysctl.d/", "local/": "/usr/local/lib/sysctl.d/",
    "usr/": "/usr/lib/sysctl.d/", "tuned/": "/usr/lib/tuned/",
}  # fmt: skip


def expand(text: str) -> str:
    pattern = "|".join(SHORT)
    return re.sub(rf"(?<![/\w])({pattern})(?=[^/])", lambda match: SHORT[match[0]], text)


@pytest.mark.parametrize("case", cases(__file__, "data/sysctl.json"))
def test_what_sets_a_key_at_the_next_boot(case):
    """sysctl.d(5) of systemd 252, its src/sysctl/sysctl.c (parse_line, apply_glob_option) and
    src/basic/sysctl-util.c (sysctl_normalize); kernel-parameters.txt, `sysctl.*=`.
    """
    files = {expand(path): text.replace("YAMA", YAMA) for path, text in case["files"].items()}
    listed = [path for path in files if "sysctl.d/" in path or path == sysctl.SYSCTL_CONF]
    more = [expand(line).replace("YAMA", YAMA) for line in case.get("more", ())]
    if case.get("systemd", True):
        more.append("reader=systemd")
    printed = "".join(f"{line}\n" for line in (*(f"file={path}" for path in listed), *more))
    parsed = sysctl.parse(Output(grep_lines(files) + printed, 0))
    boot = sysctl.boot_value(parsed, case.get("key", YAMA))
    winner = (boot.winner.value, boot.winner.source) if boot.winner else (None, "")
    assert winner == (case["value"], expand(case.get("where", "")))
    conflict = boot.conflict.source if boot.conflict else ""
    assert (conflict, boot.remedy) == (case.get("conflict", ""), case.get("remedy", ""))
    assert boot.last_name == case.get("last", boot.last_name)


def test_the_number_that_the_kernel_takes():
    """kernel/sysctl.c, proc_get_long: the first word counts; it ends at a blank."""
    numbers = {"0": 0, "1 ": 1, "0 # off": 0, "00": 0, "0x1": 1, "-1": -1, "010": 8, "2 1": 2}
    assert {text: sysctl.kernel_number(text) for text in numbers} == numbers
    for text in ("", "0,", '"0"', "on", "0#", "1;", "9" * 5000):
        assert sysctl.kernel_number(text) is None
