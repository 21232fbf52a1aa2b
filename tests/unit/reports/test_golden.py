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
MADE: dict[str, dict[str, object]] = {
    "audit": {**outcomes()},
    "deploy": {name: make() for name, make in DEPLOYS.items()},
    "diff": {"mixed": node_diff()},
    "env": {**ENVIRONMENTS},
    "smoke": {**SMOKES},
    "stacks": {name: make() for name, make in stack_fleets.FLEETS.items()},
}


def plain(*forms: str) -> dict[str, tuple[str, Options]]:
    return {form: (form, Options()) for form in forms}


BODY, VERBOSE = {"body": ("html", Options())}, {"verbose": ("table", Options(verbose=1))}
#: document -> name -> the word of --format, and the options.
FORMATS = {
    "audit": plain("table", "json", "junit", "prometheus", "nagios", "evidence") | VERBOSE | BODY,
    "deploy": {"diff": ("table", Options(diff=True)), "json": ("json", Options(diff=True))},
    "diff": plain("table", "json"),
    "env": plain("sh"),
    "smoke": plain("table", "json", "junit", "prometheus")
    | {"wide": ("table", Options(width=100_000))},
    "stacks": plain("table", "json") | VERBOSE | BODY,
}


def text_of(document: str, name: str, made: object) -> str:
    form, options = FORMATS[document][name]
    text = "".join(find_format(document, form).render(made, options))
    text = text.replace(f'version="{nodeready.__version__}"', 'version="OURS"')
    # The style sheet and the script of a page are files of their own.
    if form in ("html", "evidence"):
        return text[text.index("<main>") :].partition("<script>")[0]
    return text


def several(document: str, name: str, words: str) -> str:
    """Small documents in this format, each below its name."""
    texts = {word: text_of(document, name, MADE[document][word]) for word in words.split()}
    return "\n".join(f"=== {word}\n{text}" for word, text in texts.items())


#: The name of a document's small file -> the documents in it.
SMALL = {
    "audit-small.table": "ok one waived outliers partial",
    "audit-small.verbose": "one",
    "audit-small.nagios": "ok one warn unknown waived unreachable partial",
    "deploy-small.diff": "check well interrupted",
    "env-small.sh": "differs halves unknown",
    "smoke-small.table": "gpu scale switch interrupted budget nothing",
    "smoke-small.prometheus": "go gpu scale",
    "stacks-small.table": "one missing same prefix nobody",
    "stacks-small.body": "missing prefix nobody",
}
LARGE = {"audit": "mixed", "deploy": "result", "diff": "mixed", "smoke": "mixed", "stacks": "hung"}
#: file -> its text
FILES: dict[str, Callable[[], str]] = {
    f"{document}-{name}.{form}": partial(text_of, document, form, MADE[document][name])
    for document, name in LARGE.items()
    for form in FORMATS[document]
    if (document, form) != ("smoke", "table")  # docs/smoke.md shows it.
}
FILES |= {
    file: partial(several, file.partition("-")[0], file.partition(".")[2], words)
    for file, words in SMALL.items()
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
