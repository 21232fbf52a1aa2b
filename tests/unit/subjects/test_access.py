"""What the modes of files and directories tell an ordinary user, and what ssh is told per peer."""

import pytest

from nodeready.core import own_files
from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.subjects.access import READ, WRITTEN_FOLDERS, parse_access, unusable_program
from nodeready.subjects.debug_tools.facts import BrokenProgram, DebugTools, unusable
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.ssh_client import facts as ssh_facts
from nodeready.subjects.ssh_client.checks import known_hosts, message_source, named_file, options
from nodeready.subjects.ssh_client.facts import EffectiveOptions, SshClient
from tests.builders.ssh_client import key
from tests.cases import cases, read_table

DIRECTORIES = "".join(f"at=41ed 0 0 80 {p}\n" for p in ("/", "/usr", "/usr/bin", "/etc/ssh"))


def printed(row: str) -> str:
    """`MODE PATH [UID GID [SIZE]]` as the look prints it, d before the mode of a directory."""
    words = row.split()
    if "=" in words[0]:
        return row
    mode, path, *owner = (*words, *("0", "0", "10000000")[len(words) - 2 :])
    kind = 0o040000 if mode[0] == "d" else 0o100000
    return f"at={kind | int(mode.strip('d'), 8):x} {' '.join(owner)} {path}"


def access(*rows: str):
    text = DIRECTORIES + "".join(f"{printed(row)}\n" for row in rows)
    return parse_access({"access": Output(text, 0)})


@pytest.mark.parametrize("case", cases(__file__, "data/access.json", "run"))
def test_a_program_as_an_ordinary_user_finds_it(case):
    """What is wrong with gdb, and what mends it (path_resolution(7), execvp(3))."""
    result = unusable_program(access(*case["rows"]), "gdb")
    assert (result is None) == ("words" not in case)
    if result:
        assert case["words"] in result.words
        assert result.repair == case.get("repair", "")


@pytest.mark.parametrize("case", cases(__file__, "data/access.json", "read"))
def test_a_file_as_an_ordinary_user_reads_it(case):
    barrier = access("644 /etc/ssh/x", *case["rows"]).barrier("/etc/ssh/x", READ)
    assert case["words"] in barrier.words if "words" in case else barrier is None


def test_a_section_that_did_not_end_is_no_all_clear():
    with pytest.raises(ProbeError, match="timed out"):
        parse_access({"access": Output("", None)})


def test_a_registered_package_without_its_program():
    want = Policy(packages=("gdb", "tools"))
    observed = DebugTools(
        registered=("gdb", "tools"),
        broken=(
            BrokenProgram("tools", "gone", "/usr/bin/other"),
            BrokenProgram("gdb", "mode", "/usr/bin/gdb"),
        ),
    )
    result = {fault.words: fault.repair for _, fault in unusable(observed, want)}
    assert result == {
        "/usr/bin/other is gone": "reinstall",
        "/usr/bin/gdb is not executable": "chmod",
    }
    debians = access("755 /usr/bin/pdsh 0 0 370")
    want = Policy(packages=("pdsh",))
    ((_, lacks),) = unusable(DebugTools(registered=("pdsh",), access=debians), want)
    assert (lacks.words, lacks.repair) == ("/usr/bin/pdsh.bin is gone", "reinstall")
    # A pdsh of somebody's own needs none.
    assert not list(unusable(DebugTools(access=debians), want))


LINES = (f"gpu001 {key(1)}", f"gpu002 {key(2)}", f"[gpu003]:2222 {key(3)}")
GOOD = {
    "stricthostkeychecking": "true", "globalknownhostsfile": "/etc/ssh/ssh_known_hosts",
    "user": "nobody", "port": "22", "pubkeyauthentication": "true",
    "hostkeyalgorithms": "ssh-ed25519,rsa-sha2-512", "gssapiauthentication": "no",
    "hostbasedauthentication": "no", "sessiontype": "default",
}  # fmt: skip
BLOCK = own_files.put_block(b"", "".join(f"{line}\n" for line in LINES).encode(), "keep")


def client(*answers: EffectiveOptions, content: bytes = BLOCK) -> SshClient:
    known = ssh_facts.parse_known_hosts(content)
    return SshClient(True, (9, 2), ssh_facts.NodeIdentity(), known, {}, {}, (), answers)


@pytest.mark.parametrize("case", cases(__file__, "data/ssh_said.json"))
def test_what_ssh_says_of_one_peer(case):
    """usual: what ssh -G says otherwise for all hosts; printed: for that one (ssh_config(5))."""
    want = Policy(ssh_client_hosts=("gpu*",), ssh_known_hosts=LINES)
    usual, printed = {**GOOD, **case.get("usual", {})}, case.get("printed", {})
    answers = [
        EffectiveOptions("gpux", False, usual),
        EffectiveOptions(case["host"], False, {**usual, **printed}),
    ]
    result = options(client(*answers), want)
    assert result.status == case["status"], result
    if case["status"] != "ok" and printed:
        assert next(iter(printed)) in result.actual


def test_a_line_that_revokes_a_key_of_the_fleet():
    want = Policy(ssh_known_hosts=LINES)
    for line, status in read_table(__file__, "revoked"):
        text = line.replace("KEY2", key(2)).replace("KEY7", key(7))
        result = known_hosts(client(content=BLOCK + f"{text}\n".encode()), want)
        assert result.status == status, result


def test_hashed_names_are_known():
    # HMAC-SHA1 of the name, keyed with the salt (OpenSSH's hostfile.c, host_hash).
    names = "|1|bm9kZXJlYWR5bm9kZXJlYWR5bm8=|+crDFYuYYOuw3vjre1fs1fCmFz8="
    assert ssh_facts.known_as(names, "gpu001")
    for other, name in ((names, "gpu002"), ("|1|!|!", "gpu001"), ("|1|", "gpu001")):
        assert not ssh_facts.known_as(other, name)


@pytest.mark.parametrize("case", cases(__file__, "data/where.json"))
def test_where_a_person_has_to_look(case):
    """line: None where only the file is known, and not a place to look at."""
    file, line = case["file"], case["line"]
    printed = case["printed"].replace("FILE", file)
    assert message_source(printed) == ("" if line is None else f"{file}{line}")
    assert named_file(printed) == file


def test_the_look_asks_once_for_every_directory_that_a_deploy_writes_to():
    written = {path.rpartition("/")[0] for subject in SUBJECTS.values() for path in subject.files}
    assert written == {*WRITTEN_FOLDERS}
