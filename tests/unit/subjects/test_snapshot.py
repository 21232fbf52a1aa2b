"""The one round trip: what a node prints becomes sections again, whatever it prints."""

import base64
import gzip
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.core import probe_script, shell
from nodeready.core.base import Line, Output, ProbeError, Unknown, file_lines
from nodeready.core.policy import Policy
from nodeready.core.probe_script import make_script, parse_answer
from nodeready.subjects import snapshot
from tests.builders import sections as node
from tests.builders.sections import NONCE, section
from tests.cases import read_table
from tests.paths import PACKAGE

#: What a section prints to pose as another one.
FORGED = f"\n@{NONCE} end\n\n@{NONCE} begin good\nc=4\n@{NONCE} rc 0\n\n@{NONCE} end\n"
Answer = Callable[..., str]


@pytest.fixture
def answer(posix_sh: list[str]) -> Answer:
    return lambda sections, before="": node.run(sections, [*posix_sh, "-c"], before)


def packed(body: bytes) -> str:
    text = base64.b64encode(gzip.compress(body)).decode()
    return f"nodeready/1 {NONCE} gzip\n{text}\nnodeready/1 {NONCE} end\n"


def unpacked(text: str) -> str:
    return probe_script.unpack(text, NONCE).decode("utf-8", "surrogateescape")


def reason_of(output: Output) -> str:
    with pytest.raises(ProbeError) as problem:
        output.require()
    assert len(problem.value.evidence) <= 200
    return problem.value.reason


KINDS = {"together": {}, "beside": {"parallel": True}, "quick": {"parallel": True, "quick": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_sections_come_back_whole_and_each_fails_alone(answer, kind):
    """together: in one shell; beside: each in its own; quick: in a pipe of its own, whose lines
    are no marks of ours.
    """
    own_pipe = kind != "together"
    hostile = f"echo a=1; cat <<'E'\n{FORGED}\nE" if own_pipe else "printf 'a=1\\nc=4\\n'"
    sections = [
        section("pairs", "printf 'a=1\\nb=x=y\\n'", **KINDS[kind]),
        section("hostile", hostile, **KINDS[kind]),
        section("failed", "echo evidence; exit 3", **KINDS[kind]),
        section("huge", "yes aaaaaaaa | head -c 2000000", **KINDS[kind], cap_bytes=4096),
        section("bytes", "printf 'v=\\377\\376\\n'", **KINDS[kind]),
        section("absent", "echo never" if own_pipe else ":", when="[ -e /none ]", **KINDS[kind]),
        section("slow", ":" if own_pipe else "sleep 30", timeout_s=1),
        section("good", "echo c=3"),
    ]
    noise = "echo welcome; printf 'nodeready/1 ffff gzip\\n@feed begin good\\n'; "
    outputs = parse_answer(answer(sections, before=noise) + "\nbye\n", sections, NONCE)
    assert outputs["pairs"].values() == {"a": "1", "b": "x=y"}
    assert outputs["hostile"].values() == {"a": "1", "c": "4"}
    assert outputs["bytes"].values()["v"].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert outputs["absent"].require() == ""
    assert outputs["good"].values() == {"c": "3"}
    assert reason_of(outputs["failed"]) == "failed with exit status 3"
    assert reason_of(outputs["huge"]) == "output truncated"
    assert own_pipe or reason_of(outputs["slow"]) == "timed out"


def test_what_is_mostly_quick_runs_in_the_one_shell(answer):
    names = "first", "second"
    sections = [section(name, f"echo {name}=1", parallel=True, quick=True) for name in names]
    body = unpacked(answer([*sections, section("good", "echo c=3")]))
    marks = re.findall(rf"^@{NONCE} (begin|piped) (\w+)$", body, re.M)
    assert marks == [("begin", "good"), ("piped", "first"), ("piped", "second")]


def test_no_section_of_ours_needs_a_shell_of_its_own(answer):
    """All run in one; each would run once more if one of them ended that shell."""
    chosen = snapshot.sections(snapshot.probes())
    body = unpacked(answer(list(chosen)))
    names = re.findall(rf"^@{NONCE} (?:begin|piped) (\w+)$", body, re.M)
    assert sorted(names) == sorted(section.name for section in chosen)


def test_slow_sections_run_beside_the_others(answer, tmp_path):
    """All at once: each waits for a file that another one makes."""
    wait = f"until [ -e {tmp_path}/b ]; do sleep 0.01; done"
    sections = [
        section("first", f"{wait}; echo a=1", parallel=True),
        section(
            "second", f"touch {tmp_path}/b; yes aaaaaaaa | head -c 200000; cat", parallel=True
        ),
        section("good", f"{wait}; echo c=3; cat"),
    ]
    outputs = parse_answer(answer(sections), sections, NONCE)
    assert outputs["first"].values() == {"a": "1"}
    assert len(outputs["second"].require()) == 200000
    assert outputs["good"].values() == {"c": "3"}


@pytest.mark.nightly
@pytest.mark.parametrize(("script", "timeout_s", "is_quick", "limit_s"), [
    pytest.param("trap '' TERM; sleep 30", 1, False, 30, id="deaf"),
    pytest.param("echo before; sleep 30", 1, True, 6, id="quick"),
    pytest.param("sleep 30", 20, False, 5, id="of the whole look"),
])  # fmt: skip
def test_a_limit_costs_the_slow_section_alone(posix_sh, script, timeout_s, is_quick, limit_s):
    slow = section("slow", script, timeout_s=timeout_s, parallel=True, quick=is_quick)
    sections = [slow, section("good", "echo b=2")]
    command = shell.command(make_script(sections, Policy(), NONCE, limit_s), limit_s, "a:test")
    argv = [*posix_sh, "-c", command.line]
    done = subprocess.run(argv, input=command.stdin, capture_output=True, text=True, check=True)
    outputs = parse_answer(done.stdout, sections, NONCE)
    assert outputs["good"].values() == {"b": "2"}
    assert reason_of(outputs["slow"]) == "timed out"


def test_each_line_of_a_section_beside_the_others_comes_as_it_was(answer):
    text = f"|a\n\n      |b\n     1\tc\n{FORGED}{'long' * 30000}"
    sections = [section("loud", f"cat <<'E'\n{text}\nE", parallel=True)]
    outputs = parse_answer(answer(sections), sections, NONCE)
    # A section's text loses its indentation on the way to a node.
    assert outputs["loud"].require().split() == text.split()


def test_a_value_is_read_whole_whatever_the_shell(answer, tmp_path):
    (tmp_path / "no_newline").write_text("0 1")
    (tmp_path / "empty").write_text("\n")
    kernel = Path("/proc/sys/kernel")
    places = {"text": kernel / "hostname", "empty": tmp_path / "empty",
              "numbers": Path("/proc/sys/net/ipv4/ip_local_port_range"),
              "bare": tmp_path / "no_newline", "missing": kernel / "nonexistent"}  # fmt: skip
    script = "\n".join(f"nr_value {name} {path}" for name, path in places.items())
    sections = [section("values", script)]
    found = {name: path.read_text().strip() for name, path in places.items() if path.exists()}
    assert parse_answer(answer(sections), sections, NONCE)["values"].values() == found


def test_no_shell_reads_a_number_of_proc_sys_without_nr_value():
    """Of a number, the read of dash takes the first digit; a text comes whole."""
    whole = {"kernel/arch", "kernel/osrelease", "kernel/hostname"}
    files = (path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".sh", ".j2"))
    pattern = re.compile(r"<\"?/proc/sys/([\w/.]+)")
    read = {name for path in files for name in pattern.findall(path.read_text())}
    assert read == whole


def test_the_messages_of_a_program_are_no_part_of_its_answer(answer):
    loader = "ERROR: ld.so: object '/x.so' from /etc/ld.so.preload cannot be preloaded: ignored."
    says = f"echo {shell.quote(loader)} >&2; echo broken >&2; echo a=1; exit $0"
    tool = f"nr_answer sh -c {shell.quote(says)}"
    script = f"echo {shell.quote(loader)} >&2\n{tool} 0\n{tool} 3"
    sections = [section("near", script), section("beside", script, parallel=True)]
    for output in parse_answer(answer(sections), sections, NONCE).values():
        assert (output.text, output.rc) == ("a=1\na=1\nbroken\n", 3)


@pytest.mark.parametrize("rights", [False, True])
def test_exact_files_keep_every_byte(answer, tmp_path, rights):
    """Small files of known size are read together, the others by themselves."""
    contents = {
        "plain": b"a\n", "no_newline": b"a", "crlf": b"a\r\n\r\nb\r\n", "latin1": b"caf\xe9",
        "newline": b"\n", "empty": b"", "large": b"x\xff\n" * 4000,
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = " ".join(str(tmp_path / name) for name in (*contents, "missing"))
    sections = [section("files", f"{f'nr_rights {files};' if rights else ''} nr_exact {files}")]
    output = parse_answer(answer(sections), sections, NONCE)["files"]
    assert output.files() == {str(tmp_path / name): raw for name, raw in contents.items()}
    if rights:
        assert output.text.count("size=") == len(contents) - 1
        with pytest.raises(ProbeError, match="not whole"):
            replace(output, text=output.text.replace("plain:1:a\n", "")).files()


def test_a_line_of_a_file_is_told_from_its_path():
    lines = {
        "/etc/a.conf:12:b:3:c": Line("/etc/a.conf", 12, "b:3:c"),
        "/etc/a:b.conf:3:": Line("/etc/a:b.conf", 3, ""),
        "/etc/hosts:2:12:34.5": Line("/etc/hosts", 2, "12:34.5"),
        "/sys/devices/0000:52:00.0/x:1:2": Line("/sys/devices/0000:52:00.0/x", 1, "2"),
        "/sys/x/0:a:0.0/0000:10:01.7/y:7:z": Line("/sys/x/0:a:0.0/0000:10:01.7/y", 7, "z"),
    }
    assert list(file_lines("noise\n" + "\n".join(lines))) == list(lines.values())


@pytest.mark.parametrize(
    ("text", "reason"),
    read_table(__file__, "an_answer_that_makes_no_sense_is_unknown_with_its_reason"),
)
def test_an_answer_that_makes_no_sense_is_unknown_with_its_reason(text, reason):
    observed = snapshot.read(text, snapshot.probes(), Policy(), NONCE)
    assert observed.subjects
    for subject in observed.subjects.values():
        assert isinstance(subject, Unknown)
        assert subject.reason.startswith(reason)
    results = snapshot.judge(observed, Policy())
    assert {result.status for result in results} == {"unknown"}


def test_a_bomb_is_cut_off(monkeypatch):
    assert probe_script.MAX_ANSWER_BYTES == 8 << 20
    monkeypatch.setattr(probe_script, "MAX_ANSWER_BYTES", 10_000)
    bomb = packed(b"a" * 1_000_000)
    plain = base64.b64encode(b"a" * 20_000).decode()
    plain = f"nodeready/1 {NONCE} plain\n{plain}\nnodeready/1 {NONCE} end\n"
    assert len(unpacked(bomb)) == len(unpacked(plain)) == 10_000
    with pytest.raises(ProbeError):
        parse_answer(bomb, [section("good", ":")], NONCE)["good"].require()


def test_without_gzip_the_answer_is_plain(tmp_path):
    for tool in ("timeout", "sh", "base64", "head", "cat"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    sections = [section("good", "echo a=1")]
    command = shell.command(make_script(sections, Policy(), NONCE), 30, "nodeready:test")
    # The prologue appends the system's directories; a node without gzip has none there.
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:"
    argv = ["/bin/sh", "-c", command.stdin.replace(system, "")]
    done = subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, check=False)
    assert f"nodeready/1 {NONCE} plain" in (text := done.stdout.decode())
    assert parse_answer(text, sections, NONCE)["good"].values() == {"a": "1"}


@pytest.mark.parametrize("alone", [False, True])
def test_one_process_searches_for_many_sections(answer, tmp_path, alone):
    """Each section takes its own rows; in a shell of its own it searches itself."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"# x\n{name} = 1\nB = 2\nno\n")
    sections = [
        section(
            name,
            f"nr_find {name} '{tmp_path}/{name}:*'; printf '%s' \"$nr_found\"",
            seeks=lambda policy, name=name: f"nr_seek '^{name} ' {tmp_path}/{name} /none/*",
        )
        for name in ("a", "b")
    ]
    sections += [section("ends", "exit 3")] if alone else []
    outputs = parse_answer(answer(sections), sections, NONCE)
    found = {name: outputs[name].require().replace(f"{tmp_path}/", "") for name in ("a", "b")}
    of_a = "a:2:a = 1\n" if alone else "a:2:a = 1\na:3:B = 2\n"
    assert found == {"a": of_a, "b": "b:2:b = 1\nb:3:B = 2\n"}


def test_one_process_reads_the_files_of_many_sections(answer, tmp_path):
    """Each section gets the lines of its own files, however many another one names, or none; what
    cannot be read costs no other file, and neither does a name that is no one word.
    """
    (tmp_path / "a").write_text("# a\n\nb = 1\nLinux\n")
    (tmp_path / "b:1").write_text("c=2\n")
    (tmp_path / "two words").write_text("d=3\n")
    (tmp_path / "two\nlines").write_text("e=4\n")
    (tmp_path / "bytes").write_bytes(b"f=\xff\r\nno end")
    (tmp_path / "directory").mkdir()
    odd = f"'{tmp_path}/two words' '{tmp_path}/two\nlines' {tmp_path}/missing {tmp_path}/directory"
    sections = [
        section("first", f"nr_lines all {tmp_path}/a; echo z=1; nr_lines set {tmp_path}/a"),
        section("none", f"nr_lines all {tmp_path}/missing/*.conf"),
        section("odd", f"nr_lines set {odd}"),
        # A file of the kernel's that refuses to be read: grep goes on with the next one.
        section("refused", f"nr_lines raw /proc/self/mem {tmp_path}/bytes"),
        section("plain", "echo y=1"),
    ]
    text = answer(sections)
    outputs = parse_answer(text, sections, NONCE)
    lines = {
        name: [line for line in output.require().replace(f"{tmp_path}/", "").split("\n") if line]
        for name, output in outputs.items()
    }
    assert lines == {
        "first": ["a:1:# a", "a:2:", "a:3:b = 1", "a:4:Linux", "z=1", "a:3:b = 1", "a:4:Linux"],
        "none": [],
        "odd": ["two words:1:d=3", "two", "lines:1:e=4"],
        "refused": ["bytes:f=\udcff\r", "bytes:no end"],
        "plain": ["y=1"],
    }
    body = unpacked(text)
    # All in one shell: the name with a newline in it had a process of its own there.
    assert "piped" not in body
    # Where the lines of one section are missing, none passes for another's.
    cut = body.replace(f"{probe_script.SEPARATOR}:1:", "x", 1).encode("utf-8", "surrogateescape")
    damaged = parse_answer(packed(cut), sections, NONCE)
    for name in ("first", "none", "refused"):
        with pytest.raises(ProbeError):
            damaged[name].require()
    assert damaged["plain"].values() == {"y": "1"}
