"""The page for a vendor: known elements, and nothing of the site."""

from __future__ import annotations

import pytest

from nodeready.audit.document import NodeReport
from nodeready.reports import evidence_html
from nodeready.subjects.result import fail
from nodeready.subjects.snapshot import Snapshot
from tests.builders import fleets, gpus
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
        fail("nics.routes", "by eth0", "10.1.2.3 is reached by 10.9.0.1", "/proc/net/route"),
    ]
    snapshot = Snapshot({"gpus": gpus.h100().observed()})
    page = Page(
        "".join(
            evidence_html.render(fleets.audit(NodeReport.of("gpu007", results, snapshot=snapshot)))
        )
    )
    cells = page.texts["td"]
    assert {"gpu 0: 3 uncorrectable", "ADDRESS is reached by ADDRESS", "replace the GPU"} <= {
        *cells
    }
    assert "/etc/sysctl.d/10-ptrace.conf:3" not in cells
    assert "1 finding about other subjects left out" in page.texts["p"]
    # Versions have dots, too.
    assert {"1650522003820", "96.00.89.00.01", "535.129.03"} <= {*cells}
