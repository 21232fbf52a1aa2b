"""Every outcome in every format, byte for byte: golden/NAME.EXITCODE.FORMAT.

A change that is meant: NODEREADY_GOLDEN=write .venv/bin/python -m pytest tests/unit/reports,
then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeready.audit.document import Audit, audit_code
from nodeready.reports import json_report, junit, monitoring
from nodeready.reports.monitoring import nagios_code
from nodeready.reports.registry import Options
from nodeready.reports.table import show_audit
from tests.builders.fleets import outcomes

GOLDEN = Path(__file__).parent / "golden"
OUTCOMES = outcomes()
FORMATS = {
    "table": lambda audit: (f"{line.plain}\n" for line in show_audit(audit, Options(0, 80))),
    "verbose": lambda audit: (f"{line.plain}\n" for line in show_audit(audit, Options(1, 80))),
    "json": json_report.audit,
    "junit": junit.render,
    "prometheus": monitoring.prometheus,
    "nagios": monitoring.nagios,
}


def code(audit: Audit, form: str) -> int:
    return nagios_code(audit) if form == "nagios" else audit_code(audit)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_report_is_as_its_golden_file(name, form):
    audit = OUTCOMES[name]
    path = GOLDEN / f"{name}.{code(audit, form)}.{form}"
    made = "".join(FORMATS[form](audit)).encode()
    old = path.read_bytes() if path.is_file() else b""
    if os.environ.get("NODEREADY_GOLDEN") == "write" and made != old:
        path.write_bytes(made)
        pytest.fail(f"{path.name} is written anew: read the difference")
    assert path.is_file(), f"no golden file {path.name}: its name holds the exit code"
    assert made == old


def test_no_golden_file_is_without_its_audit():
    wanted = {f"{n}.{code(OUTCOMES[n], form)}.{form}" for n in OUTCOMES for form in FORMATS}
    assert {path.name for path in GOLDEN.iterdir()} == wanted


@pytest.mark.parametrize(
    ("name", "exit_code", "nagios"),
    [
        ("ok", 0, 0), ("warn", 0, 1), ("fail", 3, 2), ("unknown", 3, 3), ("waived", 0, 0),
        ("unreachable", 4, 2), ("failed", 1, 3), ("partial", 130, 3), ("outliers", 0, 0),
        ("hostile", 4, 2), ("one", 3, 2),
    ],
)  # fmt: skip
def test_every_outcome_has_its_exit_codes(name, exit_code, nagios):
    assert (audit_code(OUTCOMES[name]), nagios_code(OUTCOMES[name])) == (exit_code, nagios)


def test_warnings_fail_when_they_are_asked_to():
    assert audit_code(OUTCOMES["warn"], "warn") == 3
    assert audit_code(OUTCOMES["ok"], "warn") == 0
    assert 'type="warn"' in "".join(junit.render(OUTCOMES["warn"], Options(fail_on="warn")))


def test_an_audit_of_nothing_is_never_green():
    nothing = Audit(*(["2030-01-02T03:04:05Z"] * 2), "", ())
    assert (audit_code(nothing), nagios_code(nothing)) == (2, 3)
