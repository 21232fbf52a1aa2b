"""Whatever value a policy takes, it stays the one word or line that it is meant to be.

Each setting is tried with each hostile text, in every form that a setting may have. What the
policy takes is put into all files and scripts, and read back as their readers do: sh, and the
formats of limits.conf(5), sysctl.d(5), tmpfiles.d(5), ssh_config(5) and systemd.unit(5).
"""

import contextlib
import dataclasses
import os
import re
import secrets
import subprocess
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from nodeready.core import probe_script
from nodeready.core.policy import Policy, PolicyError, make_policy
from nodeready.core.templates import render
from nodeready.operations.iommu import grub_piece
from nodeready.subjects import snapshot
from nodeready.subjects.core_dumps.checks import retention_rule
from nodeready.subjects.gate.facts import POLICY
from nodeready.subjects.gate.files import contents
from nodeready.subjects.pdsh.checks import pdshrc_lines
from nodeready.subjects.ssh_client.checks import fleet_block, option_lines

#: A file that is there as soon as a shell has run one of them.
MARK = f"/tmp/nodeready-{secrets.token_hex(8)}"
#: The first word of a text is one that most settings take: what is wrong comes behind it.
TEXTS = (
    f"$(>{MARK})", f"`>{MARK}`", f";>{MARK};", f"&>{MARK}&", f"|>{MARK}|", f"\\$(>{MARK})",
    f"\n>{MARK}\n", f"\r>{MARK}\r", f"';>{MARK};'", f'";>{MARK};"', f"'$(>{MARK})'", f")\n>{MARK}",
    "\0", "\x1b[2J", "\x85x", "\u2028x", "\u2029x", "\udc80", "\ud800", "\u202e", "é", "\u0663",
    "{{ 7 * 7 }}", "{% include 'gate/cron.j2' %}", "{# x #}", "%h", "%n", "%%", "%i", "%c%c",
    "-oProxyCommand=x", "--reinstall", "-", "+", "*", "?", "[a-z]", "!x", "#", "\\", "=", ",", ":",
    "..", "/..", "/../../etc/passwd", "//", " x", "\tx", " - core 0", "=x y", "x" * 5000, "~",
)  # fmt: skip
#: In front of the text, so that it is like what a setting is about.
FRONTS = ("", "x", "/", "/srv/x", "/var/crash/x", "/srv/core.%p", "gpu1", "nics.mtu")


@cache
def taken() -> tuple[Policy, ...]:
    """Every policy that came of it: one setting each that is not the default."""
    policies = []
    texts = [f"{front}{text}" for front, text in product(FRONTS, TEXTS)]
    texts += [f"/srv/x{text}.prom" for text in TEXTS]
    for field, text in product(dataclasses.fields(Policy), texts):
        driver = {"eth0": {"driver": text}}
        for value in (text, [text], {text: "x"}, {"nics.mtu": text}, {text: {}}, driver):
            with contextlib.suppress(PolicyError):
                policies.append(make_policy({field.name: value}))
    return tuple(dict.fromkeys(policies))


def _lines(content: bytes) -> list[str]:
    """The lines of a file that are no comment. Every reader sees as many as there are newlines."""
    text = content.decode("utf-8")
    assert len(text.splitlines()) == text.count("\n")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def sh(directory: Path, scripts: list[bytes], line: str) -> list[str]:
    """What a shell prints by this line after each of the scripts; no text of ours is run."""
    for number, script in enumerate(scripts):
        (directory / str(number)).write_bytes(script)
    each = f"( . $0/$n; {line}; printf '\\000' ); n=$((n+1))"
    done = subprocess.run(
        ["/bin/sh", "-c", f"n=0; while [ -e $0/$n ]; do {each}; done", str(directory)],
        cwd=directory,
        env={"PATH": os.defpath},
        capture_output=True,
        check=True,
    )
    assert not os.path.lexists(MARK)
    return done.stdout.decode().split("\0")[:-1]


#: The settings that take some of the texts.
CHANGED = {
    "core_pattern", "gate_textfile", "limit_domains", "limit_services", "packages", "mounts",
    "pdshrc_users", "pdshrc_path", "pdshrc_activate", "pdshrc_lines", "ssh_client_hosts",
    "ssh_known_hosts", "iommu_args", "gpu_model", "nics", "waivers", "job_user",
}  # fmt: skip


def test_many_values_are_taken():
    plain = vars(Policy())
    assert {
        key for entry in taken() for key, value in vars(entry).items() if value != plain[key]
    } >= CHANGED
    assert len(taken()) > 1000


def test_files_whose_reader_takes_lines():
    for policy in taken():
        rule = _lines(render("core_dumps/tmpfiles.conf.j2", rule=retention_rule(policy)))
        assert len(rule) == 1
        kind, directory, *rest = rule[0].split(" ")
        assert (kind, rest) == ("d", ["1777", "root", "root", "14d"])
        assert re.fullmatch(r"/[^\s'\"\\%]+", directory), directory
        assert "/../" not in f"{directory}/"
        key, value = "kernel.core_pattern", policy.core_pattern
        text = render("sysctl.conf.j2", key=key, value=value, comment=("core(5)",))
        assert _lines(text) == [f"{key} = {value}"]
        assert value == value.strip()
        domains = [f"{domain} - core unlimited" for domain in policy.limit_domains]
        limits = _lines(render("limits/limits.conf.j2", lines=domains))
        assert len(limits) == len(policy.limit_domains)
        assert all(re.fullmatch(r"(\*|@?[\w.-]+) - core unlimited", line) for line in limits)
        for service in policy.limit_services:
            # One component of a path; systemd's specifiers are not in it.
            assert re.fullmatch(r"[\w.@-]{1,255}", f"{service}.service.d", re.ASCII)
            assert not service.startswith((".", "-"))
        options = option_lines(policy)
        assert _lines(render("ssh_client/ssh_config.conf.j2", lines=options)) == [*options]
        assert re.fullmatch(r"Host( !?[\w*?][\w*?.:%-]*)*|Host ", options[0], re.ASCII)
        known = _lines(fleet_block(policy.ssh_known_hosts).inner)
        assert len(known) <= len(policy.ssh_known_hosts)
        for package in policy.packages:
            assert re.fullmatch(r"[a-z0-9][a-z0-9+.-]*(?<!-)", package)


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_gates_files_hold_no_text_of_the_policy(step):
    """But for the policy itself, which is JSON."""
    plain = contents(Policy(), lambda: b"")
    textfiles = [policy for policy in taken() if policy.gate_textfile != Policy().gate_textfile]
    for policy in [*taken()[::step], *textfiles]:
        files = contents(policy, lambda: b"")
        _lines(files.pop(POLICY))
        assert files == {path: data for path, data in plain.items() if path != POLICY}
        where = policy.gate_textfile
        assert not where or re.fullmatch(r"/\S*[^/\s]\.prom", where), where
        assert "/../" not in where


def test_what_a_shell_reads(tmp_path):
    paths = [policy for policy in taken() if policy.pdshrc_path]
    scripts = [render("pdsh/pdshrc.j2", lines=pdshrc_lines(policy)) for policy in paths]
    expected = [":".join((*policy.pdshrc_path, os.defpath)) for policy in paths]
    (tmp_path / "pdsh").mkdir()
    assert sh(tmp_path / "pdsh", scripts, 'printf %s "$PATH"') == expected
    args = [policy.iommu_args for policy in taken() if policy.iommu_args]
    (tmp_path / "grub").mkdir()
    pieces = [grub_piece(entry) for entry in args]
    shown = sh(tmp_path / "grub", pieces, 'printf %s "$GRUB_CMDLINE_LINUX"')
    assert shown == [" ".join(entry) for entry in args]


@pytest.mark.parametrize(
    "text",
    [text for text in TEXTS if MARK in text],
    # Every worker of a run must find the same names, and the mark is another one for each.
    ids=lambda text: repr(text.replace(MARK, "MARK")),
)
def test_what_a_node_is_asked(text):
    """The look, with this text in every setting that takes it."""
    settings: dict[str, Any] = {}
    for policy in taken():
        for key, value in vars(policy).items():
            if text in ("".join(map(str, value)) if isinstance(value, tuple) else str(value)):
                settings.setdefault(key, value)
    subjects = ("core_dumps", "host", "pdsh", "limits", "debug_tools", "gate")
    sections = snapshot.sections(snapshot.probes(subjects))
    script = probe_script.make_script(sections, Policy(**settings), "n0nce", 20)
    done = subprocess.run(["/bin/sh"], input=script, text=True, capture_output=True, check=False)
    assert "n0nce" in done.stdout, done.stderr
    assert not os.path.lexists(MARK), settings
