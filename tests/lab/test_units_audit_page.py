"""The page of an audit in a browser: each control, by what a reader then sees."""

import base64
from dataclasses import replace

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from nodeready.agent.audit_document import NodeReport
from nodeready.reports import audit_html
from nodeready.subjects.snapshot import Snapshot
from tests.browser import BrowserPage
from tests.builders import fleets, gpus
from tests.builders.fleets import HOSTILE
from tests.cases import read_table

pytestmark = pytest.mark.nightly


class Page(BrowserPage):
    @property
    def hits(self) -> int:
        return len(self.all("#grid.searching i.hit"))

    @property
    def findings(self) -> list[str]:
        return [card.get_attribute("id") for card in self.all(".finding") if card.is_displayed()]

    @property
    def node(self) -> str:
        """The name of the node that is open; "": none is."""
        return next((head.text for head in self.all("dialog[open] h2")), "")


@pytest.fixture
def opened(quiet_browser, tmp_path):
    path = tmp_path / "page.html"
    return lambda audit: Page(quiet_browser, path, "".join(audit_html.render(audit)))


@pytest.fixture
def mixed(opened):
    """The audit with all statuses, and a node with GPUs."""
    audit = fleets.outcomes()["mixed"]
    parts = Snapshot({"gpus": gpus.h100().observed()})
    node = NodeReport.of("gpu020", (fleets.MEMLOCK,), snapshot=parts, groups=("gpu",))
    return opened(replace(audit, nodes=(*audit.nodes, node)))


def test_a_square_tells_and_opens_its_node(mixed):
    square = mixed.all("#grid i.fail")[0]
    ActionChains(mixed.driver).move_to_element(square).perform()
    assert mixed.one("#tip").text == "gpu005: fail, ptrace.scope, pdsh.rcmd"
    square.click()
    mixed.until("document.getElementById('node').open")
    assert mixed.node == "gpu005"
    text = mixed.one("dialog").text
    assert "/etc/sysctl.d/10-ptrace.conf:3" in text
    assert "nodeready deploy INVENTORY --only ptrace" in text
    mixed.press(Keys.ESCAPE)
    mixed.until("!document.getElementById('node').open")
    assert "#node" not in mixed.driver.current_url


def test_an_address_with_a_node_opens_it_with_its_parts(mixed):
    mixed.driver.get("about:blank")
    mixed.driver.get(mixed.address + "#node=gpu020")
    mixed.until("document.getElementById('node').open")
    assert "1650522003827" in mixed.one("dialog").text
    assert "18 of 18 active" in mixed.one("dialog").text
    # A column without a value is left out.
    assert "throttle" not in mixed.one("dialog").text


def test_the_keyboard_is_enough(mixed):
    mixed.one("#grid").send_keys(Keys.ARROW_RIGHT)
    assert mixed.one("#tip").text.startswith("gpu003")
    mixed.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert mixed.one("#tip").text.startswith("gpu004")
    mixed.press(Keys.ARROW_DOWN)
    mixed.press(Keys.ENTER)
    mixed.until("document.getElementById('node').open")
    assert mixed.node == "gpu004"
    mixed.press(Keys.ESCAPE)
    mixed.press("/")
    assert mixed.run("return document.activeElement.id") == "find"
    mixed.search("gpu005")
    mixed.press(Keys.ESCAPE)
    assert mixed.one("#find").get_attribute("value") == ""
    assert not mixed.one("#matches").is_displayed()


#: What is typed -> the number of nodes, and the number of findings that are shown
SEARCHES = read_table(__file__, "SEARCHES")


def test_the_search_finds_what_the_page_has(mixed):
    for words, (nodes, findings) in SEARCHES.items():
        text = mixed.search(words)
        assert (mixed.hits, len(mixed.findings)) == (nodes, findings), words
        assert text.startswith(f"{nodes} of 13 nodes, {findings} of "), words
    mixed.search("ptrace.scope")
    links = [link.text for link in mixed.all("#matches a")]
    assert links == ["gpu005", "gpu006", "gpu001"]
    mixed.one("#matches a").click()
    mixed.until("document.getElementById('node').open")
    assert mixed.node == "gpu005"


def test_a_status_is_a_search_and_an_open_finding_shows_its_nodes(mixed):
    mixed.one("#counts [data-status=warn] button").click()
    assert mixed.hits == 2
    mixed.press(Keys.ESCAPE)
    mixed.search("")
    assert mixed.hits == 0
    mixed.one("#finding0 summary").click()
    mixed.until("document.querySelectorAll('i.of-open').length === 2")
    mixed.one("#finding0 summary").click()
    mixed.until("document.querySelectorAll('i.of-open').length === 0")


def test_without_its_script_the_page_can_be_read(mixed):
    mixed.open_without_script()
    assert not mixed.one("#search").is_displayed()
    assert len(mixed.all("#grid i")) == 13
    mixed.one("#finding0 summary").click()
    assert "connection refused" in mixed.one("#finding0").text


def test_hostile_text_stays_text(opened):
    page = opened(fleets.outcomes()["hostile"])
    page.all("#grid i")[0].click()
    page.until("document.getElementById('node').open")
    shown = page.one("dialog").text
    assert "<b>&\"'</b>" in shown
    assert page.all("dialog b") == []
    page.press(Keys.ESCAPE)
    assert page.search("<b>&") == "2 of 2 nodes, 3 of 3 findings"
    for word in (HOSTILE.replace("\x1b", "").split("\r")[0], "__proto__", "constructor", '"', "'"):
        page.search(word)


def test_a_print_has_the_findings_or_the_open_node(mixed):
    assert base64.b64decode(mixed.driver.print_page()).startswith(b"%PDF")
    mixed.run("location.hash = '#node=gpu020'")
    mixed.until("document.getElementById('node').open")
    media = {"media": "print"}
    mixed.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    assert not mixed.one("main").is_displayed()
    mixed.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert mixed.one("main").is_displayed()


def test_ten_thousand_nodes_are_searched(opened):
    page = opened(fleets.fleet(10_000))
    assert page.search("gpu7777").startswith("1 of 10000 nodes")
    assert page.search("status:ok").startswith("6991 of 10000 nodes")
    assert len(page.all("#matches tr")) == 101
    assert page.one("#matches p").text == "and 6891 more"
