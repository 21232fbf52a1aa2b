"""The page for a vendor: known elements, and nothing of the site."""

import pytest

from nodeready.agent.audit_document import NodeReport
from nodeready.reports import evidence_html
from nodeready.reports.registry import Options
from nodeready.runs.memory.history import HistoryEntry
from nodeready.subjects.snapshot import Snapshot
from tests.builders import fleets, gpus
from tests.builders.results import fail
from tests.html_elements import Page, assert_known
from tests.unit.reports.test_audit_html import AUDITS

TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "article", "h1", "h2", "p", "b",
    "div", "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip
ATTRIBUTES = {"lang", "charset", "http-equiv", "content", "name", "class", "scope"}


@pytest.mark.parametrize("name", AUDITS)
def test_a_page_has_only_known_elements(name):
    audit = AUDITS[name]
    page = Page("".join(evidence_html.render(audit)))
    assert_known(page, evidence_html.page(), TAGS, ATTRIBUTES)
    assert len(page.all("article")) == min(len(audit.nodes), 64)


def test_findings_about_parts_are_shown_and_others_are_counted():
    results = [
        fleets.SCOPE,
        fail("gpus.ecc_errors", "0", "gpu 0: 3 uncorrectable", "nvidia-smi", "replace the GPU"),
        fail("rdma.firmware", "229.0.119.0", "228.0.1.0", "sysfs", "update it"),
        fail("nics.routes", "by eth0", "10.1.2.3 is reached by 10.9.0.1", "/proc/net/route"),
        fail("nics.link", "up", "fd00::7%eth0, 10:70:fd:12:34:56 at 0000:43:00.0", "sysfs"),
    ]
    snapshot = Snapshot({"gpus": gpus.h100().observed()})
    report = fleets.audit(NodeReport.of("gpu007", results, snapshot=snapshot))
    page = Page("".join(evidence_html.render(report)))
    cells = {*page.texts["td"]}
    assert {"gpu 0: 3 uncorrectable", "ADDRESS is reached by ADDRESS", "replace the GPU"} <= cells
    assert "ADDRESS%eth0, 10:70:fd:12:34:56 at 0000:43:00.0" in cells
    assert "/etc/sysctl.d/10-ptrace.conf:3" not in cells
    assert "1 finding about other subjects left out" in page.texts["p"]
    # Versions have dots, too.
    assert {"1650522003820", "96.00.89.00.01", "535.129.03", "229.0.119.0"} <= {*cells}


def test_the_history_has_parts_versions_and_boots_alone():
    first = "2030-01-01T00:00:00Z"
    rows = [
        ("status", "gpu 0: 3 uncorrectable", ""), ("reboot", "rebooted", ""),
        ("version", "gpus.driver: 535.1 -> 550.2", ""),
        ("counter", "gpus.xid: 1 -> 3: 2 more", ""),
        ("result", "gpus.ecc_errors: ok -> fail", "gpus.ecc_errors"),
        ("result", "nics.link: ok -> fail: to 10.1.2.3", "nics.link"),
        ("result", "ptrace.scope: ok -> fail: secret", "ptrace.scope"),
        ("setting", "host.timezone: secret -> secret", ""),
        ("event", "postmortem-cause: job 1: secret", ""), ("job", "4711 of secret: FAILED", ""),
    ]  # fmt: skip
    entries = [
        HistoryEntry(first, kind, text, checks=(check,) if check else ())
        for kind, text, check in rows
    ]
    place = "in gpu004 at 0000:1b:00.0"
    entries.append(HistoryEntry(first, "part", place, first, node="gpu004", serial="165"))
    options = Options(history=lambda node: entries if node == "gpu004" else ())
    text = "".join(evidence_html.render(AUDITS["fail"], options))
    cells = Page(text).texts["td"]
    assert {"rebooted", "gpus.driver: 535.1 -> 550.2", "gpus.ecc_errors: ok -> fail"} <= {*cells}
    assert "nics.link: ok -> fail: to ADDRESS" in cells
    assert f"165: {place}, until {first}" in cells
    assert "gpus.xid: 1 -> 3: 2 more" in cells
    assert "secret" not in text
