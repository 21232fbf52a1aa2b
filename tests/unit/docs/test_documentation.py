"""The documentation says what the code does now."""

import re
from dataclasses import replace
from pathlib import Path

import click
import make_docs
import pytest

from nodeready.cli import cli
from nodeready.core.policy import Policy
from nodeready.subjects import snapshot
from nodeready.subjects.registry import CHANGED, LOOKED_AT, SUBJECTS, check_ids
from tests.helpers import here, observe
from tests.paths import PACKAGE
from tests.unit.docs.pages import DOCS, PAGES, ROOT, anchors, commands, without_code


def of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_generated_pages_are_what_the_generators_make():
    files = make_docs.generated_files()
    stale = [of(path) for path, text in files.items() if path.read_text() != text]
    assert not stale, f"run make pages: {', '.join(stale)}"


def check(words: list[str]) -> None:
    """Parse a command line without running it. Raises click's errors."""
    command: click.Command = cli
    parent = None
    while True:
        context = command.make_context(command.name or "nodeready", list(words), parent=parent)
        if not isinstance(command, click.Group):
            return
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        _, found, words = command.resolve_command(context, rest)
        assert found is not None
        command, parent = found, context


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_every_command_in_a_page_parses(page):
    for words in commands(page.read_text()):
        try:
            check(words)
        except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
            continue  # `nodeready deploy` in a sentence
        except click.exceptions.Exit:
            continue  # --help, --version
        except click.UsageError as error:
            pytest.fail(f"nodeready {' '.join(words)}: {error.format_message()}")


def test_commands_are_found_and_a_wrong_one_would_be():
    found = list(commands((ROOT / "README.md").read_text()))
    assert ["audit", "inventories/lab.py"] in found
    assert ["deploy", "prod.py", "--limit", "gpu001"] in found
    (wrong,) = commands("```sh\nsudo nodeready deploy x --chek | less\n```\n")
    with pytest.raises(click.NoSuchOption):
        check(wrong)


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_links_inside_the_project_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_relative_to(ROOT), target
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text()), target


def test_every_page_can_be_reached_from_the_readme():
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()
    overview = (DOCS / "README.md").read_text()
    for page in [*DOCS.glob("*.md"), *DOCS.glob("*.1")]:
        if page.name != "README.md":
            assert f"({page.name})" in overview, page.name


def test_the_exit_codes_stand_in_the_order_of_their_precedence():
    text = (DOCS / "troubleshooting.md").read_text().partition("\n## Exit codes\n")[2]
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)]
    # tests/unit/cli/test_exit_codes.py has this order.
    assert codes == [130, 2, 1, 4, 3, 0]


#: The places that have each subject, operation or setting by hand ("A new subject" in
#: CONTRIBUTING.md) -> the names that the place must have, and those that it has.
PLACES = {
    "nodeready/subjects/registry.py: a line": (
        [path.parent.name for path in sorted(PACKAGE.glob("subjects/*/checks.py"))],
        list(SUBJECTS),
    ),
    "tests/unit/subjects/test_NAME.py": (
        list(SUBJECTS),
        [path.stem[5:] for path in (ROOT / "tests/unit/subjects").glob("test_*.py")],
    ),
    "docs/deploy.md: a row of the table of files": (
        [name for name in CHANGED if SUBJECTS[name].files != ("/etc/sysctl.d/*nodeready*.conf",)],
        re.findall(r"^\| `(\w+)` \|", (DOCS / "deploy.md").read_text(), re.M),
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_no_place_of_a_subject_lacks_a_name(place):
    names, present = PLACES[place]
    missing = [name for name in names if name not in present]
    assert not missing, f"{place} is missing for {', '.join(missing)}"


#: What a stranger may have to read: pages and words of docs/*.md, at most.
BOUNDS = {"pages": 24, "words": 50_000}


def test_the_documentation_stays_short():
    texts = [path.read_text() for path in DOCS.glob("*.md")]
    sizes = {"pages": len(texts), "words": sum(len(text.split()) for text in texts)}
    too_long = {what: size for what, size in sizes.items() if size > BOUNDS[what]}
    assert not too_long, "say it in `explain`, `--help` or a schema, or shorten another page"


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_pages_fit_a_terminal(page):
    """Prose within 100 columns, blocks of code within 100, recorded output within 80."""
    text = page.read_text()
    for block in re.findall(r"^```console\n(.*?)^```", text, re.M | re.S):
        assert max(map(len, block.splitlines())) <= 80
    for line in text.splitlines():
        assert len(line) <= 100 or line.lstrip().startswith(("|", "- ")), line


# --- docs/checks.md, which is generated, has every check that can be given, and no other.

CHECKS = make_docs.checks_page()
ROWS = re.findall(r"^\| `(\w+\.\w+)` \| (.*) \|$", CHECKS, re.M)
IDS = [check_id for check_id, _ in ROWS]


def test_every_check_has_one_row_in_the_order_of_the_reports():
    assert check_ids() == IDS
    assert len(IDS) == len(set(IDS))
    for check_id, cells in ROWS:
        severity, _, meaning = cells.split(" | ")
        assert severity, check_id
        assert len(meaning.split()) > 3, check_id


@pytest.mark.parametrize("policy", [
    {},
    {"ssh_client_mode": "no", "ssh_client_hosts": ("a*",), "iommu_args": ("iommu=pt",)},
    {"core_handler": "systemd-coredump", "pdshrc_users": ("root",)},
])  # fmt: skip
def test_every_check_that_this_machine_gives_has_its_row(policy):
    want = replace(Policy(), **policy)
    given = [result.check for result in snapshot.judge(observe(here, want), want)]
    assert {check_id.partition(".")[0] for check_id in given} == set(LOOKED_AT) - {"site"}
    # Each check gives its own id, and exactly one result.
    observed = {f"{subject}.observed" for subject in SUBJECTS}
    known = [check_id for check_id in given if check_id not in observed]
    assert known == [check_id for check_id in IDS if check_id in known]
