"""The files checks.d/*.toml beside an inventory: whose they are, and whom they check."""

import os

import pytest

from nodeready.core.policy import PolicyError
from nodeready.fleet.inventory import trust
from nodeready.fleet.inventory.host_data import policies
from nodeready.fleet.inventory.load import load
from tests.cases import read_table

SCRATCH = '[[check]]\nid = "scratch"\nrun = "df /scratch"\nstatus = 0\n'
H100 = '[[check]]\nid = "h100_only"\nfile = "/a"\nequals = "b"\ngroups = ["h100"]\n'
INVENTORY = "h100 = ['gpu001']\nlogin = ['login1']\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Writes a site's files; returns the checks of each node, by the word for the inventory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checks.d").mkdir()
    (tmp_path / "prod.py").write_text(INVENTORY)

    def checks(files, word="prod.py"):
        for name, text in files.items():
            (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        inventory = load(word)
        found = policies(inventory, list(inventory))
        return {node: [c.name for c in policy.site_checks] for node, policy in found.items()}

    return checks


def test_a_check_is_made_on_the_nodes_of_its_groups(site):
    found = site({"checks.d/a.toml": SCRATCH + H100})
    assert found == {"gpu001": ["scratch", "h100_only"], "login1": ["scratch"]}


def test_a_list_of_nodes_has_no_groups_and_says_so(site, tmp_path):
    assert site({"checks.d/a.toml": SCRATCH + H100}, "gpu001,") == {"gpu001": ["scratch"]}
    assert load("gpu001,").note == "not made, for a list of nodes has no groups: site.h100_only"


def test_the_place_of_a_check_is_its_line(site):
    text = '# id = "scratch"\r\n' + SCRATCH.replace("\n", "\r\n") + H100
    site({"checks.d/a.toml": "\ufeff" + text, "checks.d/.b.toml": "[", "checks.d/c.bak": "["})
    sources = [check.source for check in load("prod.py").site_checks]
    assert sources == ["checks.d/a.toml:3", "checks.d/a.toml:7"]


LONG = SCRATCH.replace("df", "d" * 15000)
MANY = {f"checks.d/{number}.toml": LONG.replace('"s', f'"s{number}') for number in range(9)}


@pytest.mark.parametrize(
    ("files", "words"), [*read_table(__file__, "mistakes"), (MANY, "bytes of commands")]
)
def test_a_mistake_is_one_line_before_any_node_is_touched(site, files, words):
    with pytest.raises(PolicyError) as problem:
        site(files)
    (line, *_) = problem.value.problems
    assert words in line
    assert "\n" not in line


def test_all_mistakes_are_told_at_once(site):
    with pytest.raises(PolicyError) as problem:
        site({"checks.d/a.toml": "[", "checks.d/b.toml": SCRATCH + "x = 1\n" + H100 + "y = 1"})
    assert len(problem.value.problems) == 3


def test_a_waiver_may_name_a_check_of_the_site(site):
    waived = "h100 = (['gpu001'], {'waivers': {'site.scratch': 'ticket 4711'}})\n"
    assert site({"checks.d/a.toml": SCRATCH, "prod.py": waived}) == {"gpu001": ["scratch"]}


def test_root_takes_no_file_that_others_can_write(site, tmp_path, monkeypatch):
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    monkeypatch.setenv("SUDO_UID", str(os.getuid()))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    file = tmp_path / "checks.d/a.toml"
    file.write_text(SCRATCH)
    file.chmod(0o666)
    with pytest.raises(PolicyError, match=r"a\.toml is world-writable"):
        site({})
