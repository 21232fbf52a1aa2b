"""The alerts, the dashboard and the units of share/, by the programs that read them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command import cannot_run
from tests.unit.docs.test_share import SHARE, dashboard_expressions

pytestmark = pytest.mark.nightly


def run(*words: str | Path) -> None:
    if not shutil.which(words[0]):
        cannot_run(f"not installed: {words[0]}")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_alerts_and_their_tests_pass():
    run("promtool", "check", "rules", SHARE / "prometheus/nodeready.rules.yml")
    run("promtool", "test", "rules", SHARE / "prometheus/nodeready.test.yml")


def test_promtool_takes_the_expressions_of_the_dashboard(tmp_path):
    """As rules: this promtool has no command for an expression alone."""
    rows = [{"record": f"x{n}", "expr": text} for n, text in enumerate(dashboard_expressions())]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "x", "rules": rows}]}))
    run("promtool", "check", "rules", tmp_path / "rules.yml")


def test_systemd_takes_the_units():
    units = SHARE / "systemd"
    service, timer = units / "nodeready-audit.service", units / "nodeready-audit.timer"
    run("systemd-analyze", "verify", "--man=no", service, timer)
