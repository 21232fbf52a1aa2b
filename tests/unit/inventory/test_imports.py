"""Checks of NHC and goss as checks of a site: what each becomes, and that it judges the same."""

from __future__ import annotations

import re
import subprocess

import pytest

from nodeready.inventory.imports import goss, nhc
from nodeready.inventory.imports.converted import ImportedLine, ImportFileError, write_toml
from nodeready.policy import site_checks
from tests.cases import cases, tomllib


def tables(lines: list[ImportedLine]) -> list[dict]:
    """The tables of `checks.d`, as a reader of the file gets them. Each is a check of a site."""
    checks = tomllib.loads("\n".join(write_toml(lines, "x"))).get("check", [])
    for check in checks:
        site_checks.parse(check)
    return checks


def holds(check: dict) -> bool:
    """Run the check on this machine, and judge it as docs/site-checks.md says."""
    run = check.get("run") or f"cat {check['file']}"
    done = subprocess.run(
        ["sh", "-c", run], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    text = done.stdout.strip()
    if "status" in check:
        return done.returncode == check["status"]
    assert not done.stderr, done
    if "matches" in check:
        return bool(re.search(check["matches"], text, re.M))
    if "range" in check:
        low, high = check["range"]
        return low <= float(re.search(r"-?[\d.]+", text)[0]) <= high
    return text == check["equals"]


@pytest.mark.parametrize("case", cases(__file__, "data/import_nhc.toml"))
def test_a_line_of_nhc(case):
    *_, line = lines = nhc.read(case["line"], "nhc.conf")
    assert line.outcome == case.get("outcome", "converted"), line
    assert case.get("detail", "site.") in line.detail
    checks = tables(lines)
    assert bool(checks) == ("holds" in case)
    for check in checks:
        assert holds(check) == case["holds"], check
        assert check.get("severity", "fail") == case.get("severity", "fail")


@pytest.mark.parametrize("case", cases(__file__, "data/import_goss.toml"))
def test_a_resource_of_goss(case):
    lines = goss.read(case["yaml"], "goss.yaml")
    assert [holds(check) for check in tables(lines)] == case.get("holds", [])
    for outcome in ("covered", "cannot"):
        details = [line.detail for line in lines if line.outcome == outcome]
        assert len(details) == len(case.get(outcome, [])), details
        for detail, words in zip(details, case.get(outcome, []), strict=True):
            assert words in detail


def test_a_check_for_some_nodes_is_a_comment_and_equal_checks_have_two_ids():
    text = "gpu[01-10] || check_hw_eth ib0\n* || check_hw_eth lo\n{n[1-2]} || check_hw_eth lo\n"
    lines = nhc.read(text, "nhc.conf")
    assert [line.nodes for line in lines] == ["gpu[01-10]", "", "{n[1-2]}"]
    assert [check["id"] for check in tables(lines)] == ["hw_eth_lo"]
    written = "\n".join(write_toml(lines, "nhc.conf"))
    assert '# id = "hw_eth_lo_2"' in written
    assert "Only for the nodes gpu[01-10]" in written


def test_text_of_the_file_ends_no_line_of_the_new_file():
    lines = nhc.read("* || check_file_test -d '/tmp\u2028[[check]]'\x0b\n", "n\n[[check]]")
    assert len(tables(lines)) == 1


@pytest.mark.parametrize("text", ["a: [", "- list", "&a [*a]", "x: !!python/object:os.system {}"])
def test_what_is_no_goss_file_is_a_line(text):
    with pytest.raises(ImportFileError, match=r"^goss.yaml: ") as raised:
        goss.read(text, "goss.yaml")
    assert "\n" not in str(raised.value)


def test_the_command_writes_the_checks_and_says_what_became_of_each_line(tool, tmp_path):
    conf, out = tmp_path / "nhc.conf", tmp_path / "nhc.toml"
    conf.write_text("* || check_hw_eth lo\n* || check_hw_ib 400\n* || check_ours\n")
    done = tool("import", "nhc", conf, "-o", out)
    assert (done.status, done.out) == (0, "")
    assert done.lines[0] == "converted nhc.conf:1: * || check_hw_eth lo: site.hw_eth_lo"
    assert done.lines[-1] == "3 lines: 1 converted, 1 covered, 1 cannot, 0 setting"
    assert tomllib.loads(out.read_text())["check"][0]["id"] == "hw_eth_lo"
    assert tool("import", "nhc", conf).out == out.read_text()

    conf.write_text("* || check_ours\n")
    done = tool("import", "nhc", conf, "-o", out)
    assert (done.status, done.lines[-1]) == (
        2,
        f"nodeready: {conf}: no check of nhc could be imported",
    )
    assert tool("import", "nagios", conf).status == 2
    assert tool("import", "nhc", tmp_path / "none").status == 2
