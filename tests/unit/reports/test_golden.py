"""Rich documents in every format, byte for byte: golden/DOCUMENT-NAME.FORMAT.

For a deliberate change: NODEREADY_GOLDEN=write .venv/bin/python -m pytest tests/unit/reports,
then read the difference.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import nodeready
from nodeready.reports.registry import Options, find_format
from tests.builders import stack_fleets
from tests.builders.deploys import DEPLOYS
from tests.builders.environments import ENVIRONMENTS
from tests.builders.fleets import outcomes
from tests.unit.memory.test_changes import document as node_diff
from tests.unit.reports.test_smoke_table import SMOKES

GOLDEN = Path(__file__).parent / "golden"
AUDITS = outcomes()
DEPLOYED = {name: make() for name, make in DEPLOYS.items()}
STACKS = {name: make() for name, make in stack_fleets.FLEETS.items()}
#: document -> name -> the word of --format, and the options.
FORMATS = {
    "audit": {
        "table": ("table", Options()),
        "verbose": ("table", Options(verbose=1)),
        "json": ("json", Options()),
        "junit": ("junit", Options()),
        "prometheus": ("prometheus", Options()),
        "nagios": ("nagios", Options()),
        "body": ("html", Options()),
        "evidence": ("evidence", Options()),
    },
    "deploy": {"diff": ("table", Options(diff=True)), "json": ("json", Options(diff=True))},
    "diff": {"table": ("table", Options()), "json": ("json", Options())},
    "env": {"sh": ("sh", Options())},
    "smoke": {
        "table": ("table", Options()),
        "wide": ("table", Options(width=100_000)),
        "json": ("json", Options()),
        "junit": ("junit", Options()),
        "prometheus": ("prometheus", Options()),
    },
    "stacks": {
        "table": ("table", Options()),
        "verbose": ("table", Options(verbose=1)),
        "json": ("json", Options()),
        "body": ("html", Options()),
    },
}


def text_of(document: str, name: str, made: object) -> str:
    form, options = FORMATS[document][name]
    text = "".join(find_format(document, form).render(made, options))
    text = text.replace(f'version="{nodeready.__version__}"', 'version="OURS"')
    # The style sheet and the script of a page are files of their own.
    if form in ("html", "evidence"):
        return text[text.index("<main>") :].partition("<script>")[0]
    return text


def several(document: str, name: str, made: dict[str, object], words: str) -> str:
    """Small documents in this format, each below its name."""
    texts = {word: text_of(document, name, made[word]) for word in words.split()}
    return "\n".join(f"=== {word}\n{text}" for word, text in texts.items())


#: file -> its text
FILES: dict[str, Callable[[], str]] = {
    **{
        f"{document}-{name}.{form}": partial(text_of, document, form, made)
        for document, name, made in (
            ("audit", "mixed", AUDITS["mixed"]),
            ("deploy", "result", DEPLOYED["result"]),
            ("diff", "mixed", node_diff()),
            ("smoke", "mixed", SMOKES["mixed"]),
            ("stacks", "hung", STACKS["hung"]),
        )
        for form in FORMATS[document]
        if (document, form) != ("smoke", "table")  # docs/smoke.md shows it.
    },
    "audit-small.table": partial(
        several, "audit", "table", AUDITS, "ok one waived outliers partial"
    ),
    "audit-small.verbose": partial(several, "audit", "verbose", AUDITS, "one"),
    "audit-small.nagios": partial(
        several, "audit", "nagios", AUDITS, "ok one warn unknown waived unreachable partial"
    ),
    "deploy-small.diff": partial(several, "deploy", "diff", DEPLOYED, "check well interrupted"),
    "env-small.sh": partial(several, "env", "sh", ENVIRONMENTS, "differs halves unknown"),
    "smoke-small.table": partial(
        several, "smoke", "table", SMOKES, "gpu scale switch interrupted budget nothing"
    ),
    "smoke-small.prometheus": partial(several, "smoke", "prometheus", SMOKES, "go gpu scale"),
    "stacks-small.table": partial(
        several, "stacks", "table", STACKS, "one missing same prefix nobody"
    ),
    "stacks-small.body": partial(several, "stacks", "body", STACKS, "missing prefix nobody"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_report_equals_its_golden_file(name):
    path = GOLDEN / name
    text = FILES[name]().encode()
    old = path.read_bytes() if path.is_file() else b""
    if os.environ.get("NODEREADY_GOLDEN") == "write" and text != old:
        path.write_bytes(text)
        pytest.fail(f"{path.name} is written anew: read the difference")
    assert text == old


def test_each_golden_file_has_its_document():
    assert {path.name for path in GOLDEN.iterdir()} == set(FILES)
