"""Texts of nodes in every report: no line is forged, no format broken, no command smuggled in."""

import ast
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nodeready.core.text import sanitise
from nodeready.reports.registry import FORMATS, Options, find_format
from tests.builders import stack_fleets
from tests.builders.deploys import DEPLOYS
from tests.builders.environments import ENVIRONMENTS
from tests.builders.fleets import outcomes
from tests.paths import PACKAGE
from tests.unit.healthcheck.test_undrain import document as undrain
from tests.unit.reports.test_smoke_table import SMOKES

#: What looks like the next line of each format, and what a terminal would obey.
LINES = (
    '\nok    gpu001\r\n# HELP x\nnodeready_node_up{node="a"} 1\n</testcase></testsuite>'
    "\x1b]0;x\x07\x1b[2J\x85\u2028\u202e\u200f$(touch x)`touch x`'\";|&<>{}[red]\\\n"
    '"results": []\udcff'
)
#: Words of our own that code looks up.
OUR_WORDS = re.compile(r"[a-z_./-]{0,40}|[0-9TZ:.-]{10,}")

DOCUMENTS: dict[str, Any] = {
    "audit": outcomes()["mixed"],
    "deploy": DEPLOYS["result"](),
    "smoke": SMOKES["mixed"],
    "stacks": stack_fleets.FLEETS["hung"](),
    "env": ENVIRONMENTS["differs"],
    "undrain": undrain(),
}
#: A value of `env` may have lines in sh: tests/unit/reports/test_exports.py runs them.
CASES = [(document, form) for document in DOCUMENTS for form in FORMATS[document] if form != "sh"]


def with_text(value: Any, text: str) -> Any:
    """This document, each text of a node in it with ``text`` at its end."""
    if isinstance(value, str):
        return value if OUR_WORDS.fullmatch(value) else value + text
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_text(item, text) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(with_text(item, text) for item in value)
    if isinstance(value, Mapping):
        return {key: with_text(item, text) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: with_text(getattr(value, name), text) for name in fields}
        return dataclasses.replace(value, **changed)
    return value


def shown(document: str, form: str, text: str) -> str:
    made = with_text(DOCUMENTS[document], text)
    return "".join(
        find_format(document, form).render(made, Options(width=10**6, lines=0, diff=True))
    )


@pytest.mark.parametrize(("document", "form"), CASES)
def test_no_text_of_a_node_forges_a_line_of_a_report(document, form):
    text, harmless = shown(document, form, LINES), shown(document, form, sanitise(LINES))
    assert text.count("\n") == harmless.count("\n")
    assert re.sub("[\n\uffff]", "", text).isprintable()
    if form == "json":
        assert json.loads(text).keys() == json.loads(harmless).keys()
    elif form == "junit":
        tags = [
            [tag.tag for tag in ElementTree.fromstring(one).iter()] for one in (text, harmless)
        ]
        assert tags[0] == tags[1]
    elif form == "prometheus":
        series = [
            sum(len(family.samples) for family in text_string_to_metric_families(one))
            for one in (text, harmless)
        ]
        assert series[0] == series[1]


#: A command of a shell in a fix, up to the value that is put in.
COMMAND = re.compile(r"\b(chmod|chown|rm|mv|umount|kill|ethtool|ip link|mask|unmask)\b[^;,:]*$")


def test_a_command_that_a_fix_suggests_quotes_what_a_node_says():
    """A value is `quote(...)`, a number, a constant, or a name that begins with "quoted"."""
    unquoted = []
    for path in (PACKAGE / "subjects").rglob("*.py"):
        for text in ast.walk(ast.parse(path.read_text())):
            if not isinstance(text, ast.JoinedStr):
                continue
            before = ""
            for part in text.values:
                if isinstance(part, ast.Constant):
                    before += part.value
                    continue
                assert isinstance(part, ast.FormattedValue)
                value = ast.unparse(part.value)
                is_safe = re.match(r"(shell\.)?quote\(|int\(|quoted|_?[A-Z_]+$|.*\.pid$", value)
                if COMMAND.search(before) and not is_safe:
                    unquoted.append(f"{path.relative_to(PACKAGE)}:{part.lineno}: {value}")
                before += "VALUE"
    assert unquoted == []
