"""What the modes of files and directories tell an ordinary user, and what ssh is told per peer."""

from __future__ import annotations

import pytest

from nodeready.policy import Policy
from nodeready.subjects import managed_block
from nodeready.subjects.access import READ, WRITTEN_FOLDERS, parse_access, stuck
from nodeready.subjects.base import Output, ProbeError
from nodeready.subjects.debug_tools.facts import Broken, DebugTools, unusable
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.ssh_client.checks import known_hosts, named_file, options, where_of
from nodeready.subjects.ssh_client.facts import (
    Asked,
    Identity,
    SshClient,
    known_as,
    parse_known_hosts,
)
from tests.builders.ssh_client import key
from tests.cases import cases

DIRECTORIES = "".join(f"at=41ed 0 0 80 {p}\n" for p in ("/", "/usr", "/usr/bin", "/etc/ssh"))
ELF, SCRIPT = 10_000_000, 370


def access(*rows: str):
    return parse_access({"access": Output(DIRECTORIES + "".join(f"{r}\n" for r in rows), 0)})


def row(mode: int, path: str, owner: str = "0 0", size: int = ELF, kind: int = 0o100000) -> str:
    return f"at={kind | mode:x} {owner} {size} {path}"


# Rows -> what is wrong with gdb, and what mends it (path_resolution(7), execvp(3)).
PROGRAMS = [
    ([row(0o755, "/usr/bin/gdb")], "", ""),
    ([row(0o4755, "/usr/bin/gdb")], "", ""),
    ([row(0o711, "/usr/bin/gdb")], "", ""),
    ([row(0o711, "/usr/bin/gdb", size=SCRIPT)], "mode 711", "chmod"),
    ([row(0o700, "/usr/bin/gdb")], "mode 700: users cannot run it", "chmod"),
    ([row(0o744, "/usr/bin/gdb")], "mode 744", "chmod"),
    ([row(0o754, "/usr/bin/gdb", "0 2000")], "only members of gid 2000", ""),
    ([row(0o700, "/usr/bin/gdb", "1000 1000")], "of uid 1000 has mode 700", ""),
    ([row(0o755, "/usr/bin/gdb", size=0)], "/usr/bin/gdb is empty", "reinstall"),
    ([row(0o755, "/usr/local/bin/gdb", size=0)], "/usr/local/bin/gdb is empty", ""),
    # A shell goes on behind a program that its user may not run, and behind a link to nowhere.
    ([row(0o700, "/usr/local/bin/gdb"), row(0o755, "/usr/bin/gdb")], "", ""),
    ([row(0o755, "/usr/bin/gdb"), "link=/usr/local/bin/gdb "], "", ""),
    ([row(0o755, "/usr/local/bin/gdb", size=0), row(0o755, "/usr/bin/gdb")], "is empty", ""),
    (["link=/usr/bin/gdb "], "a link that leads nowhere", "reinstall"),
    ([row(0o700, "/usr/bin", kind=0o040000), row(0o755, "/usr/bin/gdb")], "/usr/bin has", "chmod"),
    ([row(0o750, "/usr", "0 2000", kind=0o040000), row(0o755, "/usr/bin/gdb")], "gid 2000", ""),
    ([row(0o711, "/usr/bin", kind=0o040000), row(0o755, "/usr/bin/gdb")], "", ""),
    # A link leads through directories of its own; those are for a person.
    (["link=/usr/bin/gdb /opt/gdb/bin/gdb", row(0o755, "/usr/bin/gdb"),
      row(0o700, "/opt/gdb", kind=0o040000)], "/opt/gdb has mode 700", ""),
    ([row(0o755, "/usr/bin/gdb"), "unloaded=/usr/bin/gdb libx.so.1: cannot open shared object "
      "file: No such file or directory"], "does not start: libx.so.1: cannot open", "reinstall"),
    # Of a script the loader tells that the script is none of its files.
    ([row(0o755, "/usr/bin/gdb"), "unloaded=/usr/bin/gdb /usr/bin/gdb: invalid ELF header"], "",
     ""),
    # Nothing of that name is the package manager's to tell; a row of nonsense tells nothing.
    ([], "", ""),
    (["at=zz 0 0 1 /usr/bin/gdb", "at=81ed 0 0 /usr/bin/gdb"], "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "words", "mend"), PROGRAMS)
def test_a_program_as_an_ordinary_user_finds_it(rows, words, mend):
    result = stuck(access(*rows), "gdb")
    assert (result is None) == (not words)
    if result:
        assert words in result.words
        assert result.mend == mend


READABLE = [
    (row(0o644, "/etc/ssh/x"), ""),
    (row(0o604, "/etc/ssh/x"), ""),
    (row(0o600, "/etc/ssh/x"), "mode 600: users cannot read it"),
    (row(0o640, "/etc/ssh/x", "0 100"), "only members of gid 100 can read it"),
    (row(0o000, "/etc/ssh/x"), "mode 0"),
    (row(0o700, "/etc/ssh", kind=0o040000), "/etc/ssh has mode 700: users cannot enter it"),
    (row(0o754, "/etc/ssh", kind=0o040000), "/etc/ssh has mode 754"),
    ("link=/etc/ssh/x ", "leads nowhere"),
]


@pytest.mark.parametrize(("text", "words"), READABLE)
def test_a_file_as_an_ordinary_user_reads_it(text, words):
    barrier = access(row(0o644, "/etc/ssh/x"), text).barrier("/etc/ssh/x", READ)
    assert words in barrier.words if words else barrier is None


def test_a_section_that_did_not_end_is_no_all_clear():
    with pytest.raises(ProbeError, match="timed out"):
        parse_access({"access": Output("", None)})


def test_a_registered_package_without_its_program():
    want = Policy(packages=("gdb", "tools"))
    observed = DebugTools(
        registered=("gdb", "tools"),
        broken=(Broken("tools", "gone", "/usr/bin/other"), Broken("gdb", "mode", "/usr/bin/gdb")),
    )
    result = {fault.stuck.words: fault.stuck.mend for fault in unusable(observed, want)}
    assert result == {
        "/usr/bin/other is gone": "reinstall",
        "/usr/bin/gdb is not executable": "chmod",
    }
    debians = access(row(0o755, "/usr/bin/pdsh", size=SCRIPT))
    want = Policy(packages=("pdsh",))
    (lacks,) = unusable(DebugTools(registered=("pdsh",), access=debians), want)
    assert (lacks.stuck.words, lacks.stuck.mend) == ("/usr/bin/pdsh.bin is gone", "reinstall")
    # A pdsh of somebody's own needs none.
    assert not list(unusable(DebugTools(access=debians), want))


LINES = (f"gpu001 {key(1)}", f"gpu002 {key(2)}", f"[gpu003]:2222 {key(3)}")
GOOD = {
    "stricthostkeychecking": "true", "globalknownhostsfile": "/etc/ssh/ssh_known_hosts",
    "user": "nobody", "port": "22", "pubkeyauthentication": "true",
    "hostkeyalgorithms": "ssh-ed25519,rsa-sha2-512", "gssapiauthentication": "no",
    "hostbasedauthentication": "no", "sessiontype": "default",
}  # fmt: skip
BLOCK = managed_block.put(b"", "".join(f"{line}\n" for line in LINES).encode(), "keep")


def client(*answers: Asked, content: bytes = BLOCK) -> SshClient:
    known = parse_known_hosts(content)
    return SshClient(True, (9, 2), Identity(), known, {}, {}, (), answers)


@pytest.mark.parametrize("case", cases(__file__, "data/ssh_said.json"))
def test_what_ssh_says_of_one_peer(case):
    """usual: what ssh -G says otherwise for all hosts; printed: for that one (ssh_config(5))."""
    want = Policy(ssh_client_hosts=("gpu*",), ssh_known_hosts=LINES)
    usual, printed = {**GOOD, **case.get("usual", {})}, case.get("printed", {})
    answers = [Asked("gpux", False, usual), Asked(case["host"], False, {**usual, **printed})]
    result = options(client(*answers), want)
    assert result.status == case["status"], result
    if case["status"] != "ok" and printed:
        assert next(iter(printed)) in result.actual


HASHED = "|1|c2FsdHNhbHRzYWx0c2FsdHNhbHQ=|"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (f"@revoked * {key(2)}", "fail"),
        (f"@revoked gpu002,x {key(2)}", "fail"),
        (f"@revoked *,!gpu002 {key(2)}", "ok"),
        (f"@revoked * {key(7)}", "ok"),
        (f"@revoked gpu001 {key(2)}", "ok"),
        (f"@revoked {HASHED}x {key(2)}", "ok"),
        (f"@cert-authority * {key(2)}", "ok"),
        (f"# @revoked * {key(2)}", "ok"),
        ("@revoked", "ok"),
    ],
)
def test_a_line_that_revokes_a_key_of_the_fleet(line, status):
    want = Policy(ssh_known_hosts=LINES)
    result = known_hosts(client(content=BLOCK + f"{line}\n".encode()), want)
    assert result.status == status, result


def test_hashed_names_are_known():
    # HMAC-SHA1 of the name, keyed with the salt (OpenSSH's hostfile.c, host_hash).
    names = "|1|bm9kZXJlYWR5bm9kZXJlYWR5bm8=|+crDFYuYYOuw3vjre1fs1fCmFz8="
    assert known_as(names, "gpu001")
    assert not known_as(names, "gpu002")
    assert not known_as("|1|!|!", "gpu001")
    assert not known_as("|1|", "gpu001")


@pytest.mark.parametrize("case", cases(__file__, "data/where.json"))
def test_where_a_person_has_to_look(case):
    """line: None where only the file is known, and not a place to look at."""
    file, line = case["file"], case["line"]
    printed = case["printed"].replace("FILE", file)
    assert where_of(printed) == ("" if line is None else f"{file}{line}")
    assert named_file(printed) == file


def test_the_look_asks_once_for_every_directory_that_a_deploy_writes_to():
    written = {path.rpartition("/")[0] for subject in SUBJECTS.values() for path in subject.files}
    assert written == {*WRITTEN_FOLDERS}
