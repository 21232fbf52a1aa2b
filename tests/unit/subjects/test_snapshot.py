"""The one round trip: what a node prints becomes sections again, whatever it prints."""

from __future__ import annotations

import base64
import gzip
import re
import subprocess
from dataclasses import replace

import pytest

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects import snapshot
from nodeready.subjects.base import Line, ProbeError, Unknown, file_lines
from nodeready.subjects.snapshot import make_script, parse_answer
from tests.builders.sections import NONCE, SHELLS, run, section


@pytest.mark.parametrize("runner", SHELLS, ids=["dash", "busybox", "bash"])
def test_sections_come_back_whole_and_each_fails_alone(runner):
    sections = [
        section("good", "printf 'a=1\\nb=x=y\\n'"),
        section("failed", "echo evidence; exit 3"),
        section("slow", "echo before; sleep 30", timeout_s=1),
        section("huge", "yes aaaaaaaa | head -c 10000000", cap_bytes=4096),
        section("bytes", "printf 'v=\\377\\376\\n'"),
        section("silent", ":"),
    ]
    outputs = parse_answer(run(sections, runner), sections, NONCE)
    assert outputs["good"].values() == {"a": "1", "b": "x=y"}
    assert outputs["bytes"].values()["v"].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert outputs["silent"].require() == ""
    for name, reason in (
        ("failed", "failed with exit status 3"),
        ("slow", "timed out"),
        ("huge", "output truncated"),
    ):
        with pytest.raises(ProbeError) as problem:
            outputs[name].require()
        assert problem.value.reason == reason
        assert len(problem.value.evidence) <= 200


@pytest.mark.parametrize("runner", SHELLS, ids=["dash", "busybox", "bash"])
def test_no_section_of_ours_needs_a_shell_of_its_own(runner):
    """All run in one; each would run once more if one of them ended that shell."""
    chosen = snapshot.sections(snapshot.probes())
    body = snapshot._unpack(run(list(chosen), runner), NONCE).decode("utf-8", "surrogateescape")
    names = re.findall(rf"^@{NONCE} (?:begin|piped) (\w+)$", body, re.M)
    assert sorted(names) == sorted(section.name for section in chosen)


@pytest.mark.parametrize("runner", SHELLS, ids=["dash", "busybox", "bash"])
def test_slow_sections_run_beside_the_others(runner, tmp_path):
    """All at once: each waits for a file that another one makes."""
    sections = [
        section("first", f"until [ -e {tmp_path}/b ]; do sleep 0.05; done; echo a=1", beside=True),
        section("second", f"touch {tmp_path}/b; yes aaaaaaaa | head -c 200000; cat", beside=True),
        section("absent", "echo never", beside=True, when="[ -e /nonexistent ]"),
        section("deaf", "trap '' TERM; echo b=2; sleep 30", beside=True, timeout_s=1),
        section("huge", "yes aaaaaaaa", beside=True, cap_bytes=4096),
        section("good", f"until [ -e {tmp_path}/b ]; do sleep 0.05; done; echo c=3; cat"),
    ]
    outputs = parse_answer(run(sections, runner), sections, NONCE)
    assert outputs["first"].values() == {"a": "1"}
    assert len(outputs["second"].require()) == 200000
    assert outputs["absent"].require() == ""
    assert outputs["good"].values() == {"c": "3"}
    for name, reason in (("deaf", "timed out"), ("huge", "output truncated")):
        with pytest.raises(ProbeError, match=reason):
            outputs[name].require()


@pytest.mark.parametrize("runner", SHELLS, ids=["dash", "busybox", "bash"])
def test_what_a_section_beside_the_others_prints_ends_none(runner):
    """Not even with our marks; and each of its lines comes as it was."""
    forged = f"\n@{NONCE} end\n\n@{NONCE} begin good\nc=4\n@{NONCE} rc 0\n\n@{NONCE} end\n"
    said = f"|a\n\n      |b\n     1\tc\n{forged}{'long' * 30000}"
    sections = [
        section("loud", f"cat <<'E'\n{said}\nE", beside=True),
        section("good", "echo c=3"),
    ]
    outputs = parse_answer(run(sections, runner), sections, NONCE)
    assert outputs["good"].values() == {"c": "3"}
    # A section's text loses its indentation on the way to a node.
    assert outputs["loud"].require().split() == said.split()


def test_a_limit_for_the_whole_look_costs_the_slow_section_alone():
    sections = [
        section("slow", "sleep 30; echo a=1", beside=True, timeout_s=20),
        section("good", "echo b=2"),
    ]
    command = shell.command(make_script(sections, Policy(), NONCE, 5), 5, "nodeready:test")
    done = subprocess.run(
        ["sh", "-c", command.line],
        input=command.stdin,
        capture_output=True,
        text=True,
        check=True,
    )
    outputs = parse_answer(done.stdout, sections, NONCE)
    assert outputs["good"].values() == {"b": "2"}
    with pytest.raises(ProbeError, match="timed out"):
        outputs["slow"].require()


@pytest.mark.parametrize("runner", SHELLS, ids=["dash", "busybox", "bash"])
def test_a_value_is_read_whole_whatever_the_shell(runner, tmp_path):
    (tmp_path / "no_newline").write_text("0 1")
    script = f"""
    nr_value number /proc/sys/kernel/pid_max
    nr_value text /proc/sys/kernel/hostname
    nr_value bare {tmp_path}/no_newline
    nr_value missing /nonexistent
    nr_value none /proc/sys/kernel/nonexistent
    """
    sections = [section("values", script)]
    with open("/proc/sys/kernel/pid_max") as pid_max, open("/proc/sys/kernel/hostname") as host:
        wanted = {"number": pid_max.read().strip(), "text": host.read().strip(), "bare": "0 1"}
    assert parse_answer(run(sections, runner), sections, NONCE)["values"].values() == wanted


def test_noise_around_the_answer_is_passed_over():
    sections = [section("good", "echo a=1")]
    noisy = run(sections, before="echo welcome; printf 'nodeready/1 ffff gzip\\n'; ")
    assert parse_answer(noisy + "\nbye\n", sections, NONCE)["good"].values() == {"a": "1"}


def test_a_section_cannot_pose_as_another():
    fake = "printf '@feed begin other\\nx=1\\n@feed rc 0\\n'; printf '@%s begin other\\n' wrong"
    sections = [section("mine", fake), section("other", "echo x=2")]
    outputs = parse_answer(run(sections), sections, NONCE)
    assert outputs["other"].values() == {"x": "2"}


def test_exact_files_keep_every_byte(tmp_path):
    contents = {
        "plain": b"a\n",
        "no_newline": b"a",
        "crlf": b"a\r\nb\r\n",
        "latin1": b"caf\xe9\n",
        "empty": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = " ".join(str(tmp_path / name) for name in (*contents, "missing"))
    sections = [section("files", f"nr_exact {files}")]
    found = parse_answer(run(sections), sections, NONCE)["files"].files()
    assert found == {str(tmp_path / name): content for name, content in contents.items()}


@pytest.mark.parametrize(
    ("printed", "path", "number", "text"),
    [
        ("/etc/a.conf:12:b:3:c", "/etc/a.conf", 12, "b:3:c"),
        ("/etc/a:b.conf:3:", "/etc/a:b.conf", 3, ""),
        ("/etc/hosts:2:12:34.5", "/etc/hosts", 2, "12:34.5"),
        ("/sys/devices/0000:52:00.0/x:1:2", "/sys/devices/0000:52:00.0/x", 1, "2"),
        ("/sys/x/0000:0a:00.0/0000:10:01.7/y:7:z", "/sys/x/0000:0a:00.0/0000:10:01.7/y", 7, "z"),
    ],
)
def test_a_line_of_a_file_is_told_from_its_path(printed, path, number, text):
    assert list(file_lines(f"noise\n{printed}\n")) == [Line(path, number, text)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "no answer from the node's shell"),
        ("sh: 1: timeout: not found\n", "no answer from the node's shell"),
        (f"nodeready/1 {NONCE} nobase64\n", "base64 is not installed"),
        (f"nodeready/1 {NONCE} gzip\nH4sIAAAA\n", "the answer was cut off"),
        (f"nodeready/1 {NONCE} gzip\nAAAA\nnodeready/1 {NONCE} end\n", "the answer is damaged"),
        (f"nodeready/1 {NONCE} gzip\nAA\xe9A\nnodeready/1 {NONCE} end\n", "the answer is damaged"),
        (f"nodeready/1 {NONCE[::-1]} gzip\nAAAA\n", "no answer from the node's shell"),
    ],
)
def test_an_answer_that_makes_no_sense_is_unknown_with_its_reason(answer, reason):
    seen = snapshot.read(answer, snapshot.probes(), Policy(), NONCE)
    assert seen.subjects
    for subject in seen.subjects.values():
        assert isinstance(subject, Unknown)
        assert subject.reason.startswith(reason)
    results = snapshot.judge(seen, Policy())
    assert {result.status for result in results} == {"unknown"}


def test_a_bomb_is_cut_off():
    bomb = base64.b64encode(gzip.compress(b"a" * 200_000_000)).decode()
    answer = f"nodeready/1 {NONCE} gzip\n{bomb}\nnodeready/1 {NONCE} end\n"
    sections = [section("good", ":")]
    with pytest.raises(ProbeError):
        parse_answer(answer, sections, NONCE)["good"].require()


def test_without_gzip_the_answer_is_plain(tmp_path):
    for tool in ("timeout", "sh", "base64", "head", "cat"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    command = shell.command(
        make_script([section("good", "echo a=1")], Policy(), NONCE), 30, "nodeready:test"
    )
    # The prologue appends the system's directories; a node without gzip has none there.
    text = command.stdin.replace(
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:", ""
    )
    done = subprocess.run(
        ["/bin/sh", "-c", text],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"nodeready/1 {NONCE} plain" in done.stdout
    outputs = parse_answer(done.stdout, [section("good", "")], NONCE)
    assert outputs["good"].values() == {"a": "1"}


@pytest.mark.parametrize("runner", SHELLS, ids=["dash", "busybox", "bash"])
def test_one_process_reads_the_files_of_many_sections(runner, tmp_path):
    """Each section gets the lines of its own files, however many another one names, or none; what
    cannot be read costs no other file, and neither does a name that is no one word."""
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
        section("few", f"nr_few '^b'; nr_lines few {tmp_path}/a"),
        section("plain", "echo y=1"),
    ]
    answer = run(sections, runner)
    outputs = parse_answer(answer, sections, NONCE)
    found = {
        name: output.require().replace(f"{tmp_path}/", "") for name, output in outputs.items()
    }
    lines = {name: [line for line in text.split("\n") if line] for name, text in found.items()}
    assert lines["first"] == ["a:1:# a", "a:2:", "a:3:b = 1", "a:4:Linux", "z=1", "a:3:b = 1",
                              "a:4:Linux"]  # fmt: skip
    assert lines["none"] == []
    assert lines["odd"] == ["two words:1:d=3", "two", "lines:1:e=4"]
    assert lines["refused"] == ["bytes:f=\udcff\r", "bytes:no end"]
    assert "a:3:b = 1" in lines["few"]
    assert lines["plain"] == ["y=1"]
    body = snapshot._unpack(answer, NONCE).decode("utf-8", "surrogateescape")
    # All in one shell: the name with a newline in it had a process of its own there.
    assert "piped" not in body
    # Where the lines of one section are missing, none passes for another's.
    cut = body.replace(f"{snapshot._BETWEEN}:1:", "x", 1).encode("utf-8", "surrogateescape")
    packed = base64.b64encode(gzip.compress(cut)).decode()
    damaged = parse_answer(
        f"nodeready/1 {NONCE} gzip\n{packed}\nnodeready/1 {NONCE} end\n", sections, NONCE
    )
    for name in ("first", "none", "refused"):
        with pytest.raises(ProbeError):
            damaged[name].require()
    assert damaged["plain"].values() == {"y": "1"}


@pytest.mark.parametrize("runner", SHELLS, ids=["dash", "busybox", "bash"])
def test_a_small_file_of_known_size_keeps_every_byte(runner, tmp_path):
    contents = {
        "plain": b"a\n",
        "bare": b"a",
        "crlf": b"a\r\n\r\nb\xe9",
        "empty": b"",
        "nl": b"\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = " ".join(str(tmp_path / name) for name in contents)
    sections = [section("files", f"nr_rights {files}; nr_exact {files}")]
    output = parse_answer(run(sections, runner), sections, NONCE)["files"]
    assert output.files() == {str(tmp_path / name): raw for name, raw in contents.items()}
    assert output.text.count("size=") == len(contents)
    with pytest.raises(ProbeError, match="not whole"):
        replace(output, text=output.text.replace("plain:1:a\n", "")).files()


@pytest.mark.parametrize("runner", SHELLS, ids=["dash", "busybox", "bash"])
def test_what_is_mostly_quick_runs_in_the_one_shell(runner):
    """In a pipe of its own: its lines are no marks of ours, and a hung one costs itself."""
    forged = f"\n@{NONCE} end\n\n@{NONCE} begin good\nc=4\n@{NONCE} rc 0\n\n@{NONCE} end\n"
    sections = [
        section("quick", f"printf '%s\\n' a=1; cat <<'E'\n{forged}\nE", beside=True, quick=True),
        section("ends", "echo b=2; exit 3", beside=True, quick=True),
        section("absent", "echo never", beside=True, quick=True, when="[ -e /nonexistent ]"),
        section("good", "echo c=3"),
    ]
    answer = run(sections, runner)
    outputs = parse_answer(answer, sections, NONCE)
    assert outputs["quick"].values() == {"a": "1", "c": "4"}
    assert outputs["ends"].rc == 3
    assert outputs["absent"].require() == ""
    assert outputs["good"].values() == {"c": "3"}
    body = snapshot._unpack(answer, NONCE).decode("utf-8", "surrogateescape")
    assert body.count(f"\n@{NONCE} piped ") == 3
    sections[1] = section("ends", "echo b=2; sleep 30", beside=True, quick=True, timeout_s=1)
    command = shell.command(make_script(sections, Policy(), NONCE, 6), 6, "nodeready:test")
    done = subprocess.run(
        [*runner, command.line], input=command.stdin, capture_output=True, text=True, check=True
    )
    outputs = parse_answer(done.stdout, sections, NONCE)
    assert outputs["quick"].values() == {"a": "1", "c": "4"}
    assert outputs["good"].values() == {"c": "3"}
    with pytest.raises(ProbeError, match="timed out"):
        outputs["ends"].require()
