"""The page of stacks in a browser: each control, by what a reader then sees."""

import base64
import re

import pytest
from selenium.webdriver.common.keys import Keys

from nodeready.reports import stacks_html
from tests.browser import BrowserPage
from tests.builders import stack_fleets, stack_witnesses
from tests.cases import read_table
from tests.command import wait_for

pytestmark = pytest.mark.nightly


class Page(BrowserPage):
    @property
    def groups(self) -> list[str]:
        return [one.get_attribute("id") for one in self.all(".group") if one.is_displayed()]

    @property
    def rows(self) -> list[str]:
        script = """return [...document.querySelectorAll("#matrix tbody tr")]
                    .filter((row) => !row.hidden).map((row) => row.cells[0].textContent)"""
        return self.run(script)

    @property
    def marked(self) -> set[str]:
        return set(self.run("return [...CSS.highlights.get('found')].map(String)"))

    def is_open(self, selector: str) -> bool:
        return self.one(selector).get_attribute("open") is not None


@pytest.fixture
def opened(quiet_browser, tmp_path):
    path = tmp_path / "page.html"
    return lambda stacks: Page(quiet_browser, path, "".join(stacks_html.render(stacks)))


@pytest.fixture
def late(opened):
    return opened(stack_witnesses.late())


def test_the_verdict_stands_on_top(late):
    top = late.one("#verdict").text
    assert top.startswith("a rank is late rank 13 on gpu002 has not called all_reduce 4711")
    assert re.search(r"for it waits for no other rank\n.*\nagainst its GPU shows no error", top)
    assert [one.text for one in late.all("#verdict code")] == ["/data", "--ras"]
    places = [late.one(name).location["y"] for name in ("#verdict", "#matrix", "#groups")]
    assert places == sorted(places)


def test_the_matrix_has_a_column_for_each_witness_and_equal_neighbours_once(late):
    heads = [one.text.split("\n")[0] for one in late.all("#matrix th")]
    assert heads == ["ranks", "nodes", "group", "role", "state", "waits in", "log",
                     "flight recorder", "NCCL RAS", "GPU", "network", "kernel"]  # fmt: skip
    first = [cell.text for cell in late.all("#matrix tbody tr:first-child td")]
    assert first[:5] == ["rank 13", "gpu002", "1 blocked", "suspect", "S pipe_read"]
    assert first[6] == "silent for 9 min, the others for 8\nlast line: step 4710"
    assert first[7:] == ["has not called all_reduce 4711", "", "no error", "",
                         "fuse: /data: request timed out"]  # fmt: skip
    assert late.rows == ["rank 13", "ranks 0-7", "ranks 8-12,14-15", "ranks 16-47",
                         "ranks 48-55", "ranks 56-63"]  # fmt: skip
    assert "no bytes in 2 s" in late.one("#matrix th:nth-child(11)").text
    assert "not here" in late.one("#matrix th:nth-child(9)").text


#: typed -> the groups and the rows that are left
SEARCHES = read_table(__file__, "SEARCHES")


def test_the_search_finds_what_the_page_shows(late):
    for typed, (groups, rows) in SEARCHES.items():
        late.search(typed)
        assert late.groups == [f"group{number}" for number in groups], typed
        assert late.rows == [*rows], typed


def test_what_was_found_is_counted_marked_and_unfolded(late):
    late.one("#close").click()
    for typed, said, marked in (
        ("4711", "1 of 2 groups, 5 of 6 rows", {"4711"}),
        ("PIPE_read", "1 of 2 groups, 1 of 6 rows", {"pipe_read"}),
    ):
        assert (late.search(typed), late.marked) == (said, marked)
        assert late.is_open("#group1")
    assert (late.search(""), late.marked) == ("", set())
    assert late.groups == ["group1", "group2"]
    assert not late.is_open("#group1")


def test_columns_sort_up_down_and_back(late):
    by_suspicion = late.rows
    first = late.one("#matrix th:first-child button")
    heads = late.all("#matrix th")
    first.click()
    assert heads[0].get_attribute("aria-sort") == "ascending"
    by_rank = late.rows
    assert [int(re.search(r"\d+", row)[0]) for row in by_rank] == [0, 8, 13, 16, 48, 56]
    first.click()
    assert late.rows == by_rank[::-1]
    first.click()
    assert heads[0].get_attribute("aria-sort") is None
    assert late.rows == by_suspicion
    # A witness's column: what convicts first, what clears last.
    late.one("#matrix th:nth-child(10) button").click()
    assert late.rows[-1] == "rank 13"
    late.one("#matrix th:nth-child(8) button").click()
    assert (late.rows[0], late.rows[-1]) == ("rank 13", "ranks 48-55")
    assert heads[9].get_attribute("aria-sort") is None


def test_the_keyboard_is_enough(late):
    late.press("/")
    assert late.run("return document.activeElement.id") == "find"
    assert late.one("#find").get_attribute("value") == ""
    late.search("13")
    late.press(Keys.ESCAPE)
    assert late.one("#find").get_attribute("value") == ""
    assert late.groups == ["group1", "group2"]
    for place in ("#matrix th button", "#group1 > summary"):
        late.run(f"document.querySelector('{place}').focus()")
        late.press(Keys.ENTER)
    assert late.one("#matrix th").get_attribute("aria-sort") == "ascending"
    assert not late.is_open("#group1")


def test_a_link_unfolds_where_it_leads_and_ends_a_search_that_hides_it(late):
    late.one("#close").click()
    late.search("gpu0 ranks 0-7")
    assert late.groups == ["group2"]
    late.one("#verdict a").click()
    late.until("document.getElementById('group1').open")
    assert late.groups == ["group1", "group2"]
    assert late.run("return document.activeElement.parentElement.id") == "group1"
    late.one("#close").click()
    late.run("scrollTo(0, 0)")
    late.one("#matrix tbody tr:nth-child(2) a").click()
    late.until("document.getElementById('group2').open")
    # So does an address with a group.
    late.one("#close").click()
    late.driver.get("about:blank")
    late.driver.get(late.address + "#group2")
    assert late.is_open("#group2")


def test_all_folds_and_a_print_has_everything(late):
    late.one("#open").click()
    assert not late.all("details:not([open])")
    late.one("#close").click()
    assert not late.all("details[open]")
    late.run(
        """window.seen = null;
        addEventListener("beforeprint",
            () => { window.seen = document.querySelectorAll("details:not([open])").length; });"""
    )
    pdf = base64.b64decode(late.driver.print_page())
    assert pdf.startswith(b"%PDF")
    assert late.run("return window.seen") == 0
    late.until("document.querySelectorAll('details[open]').length === 0")


def test_without_its_script_everything_is_there(late):
    late.open_without_script()
    assert not late.one("#search").is_displayed()
    assert late.all("#matrix th button") == []
    assert len(late.rows) == 6
    late.one("#group1 > summary").click()
    assert not late.is_open("#group1")


@pytest.mark.parametrize("build", [stack_witnesses.hostile, stack_fleets.FLEETS["hostile"]])
def test_hostile_text_stays_text(opened, build):
    page = opened(build())
    page.one("#open").click()
    assert page.all("img") == []
    assert not page.search("<img").startswith("0 of")
    assert page.marked == {"<img"}
    for word in ('"', "'", "\\", "<script>", "__proto__", "rank __proto__", "((((", "rank 9-"):
        page.search(word)


def test_two_thousand_ranks_that_all_differ(opened):
    page = opened(stack_witnesses.uneven())
    assert len(page.all("#matrix tbody tr")) == 2000
    assert len(page.rows) == 200
    page.run("arguments[0].scrollIntoView()", page.one("#more"))
    wait_for(lambda: len(page.rows) > 200)
    page.run("scrollTo(0, 0)")
    assert page.search("pid 11777") == "1 of 40 groups, 1 of 2000 rows"
    assert page.search('"step 4003"') == "0 of 40 groups, 286 of 2000 rows"
    page.search("")
    page.one("#matrix th:first-child button").click()
    assert page.rows[:3] == ["rank 0", "rank 1", "rank 2"]
    for event, count in (("beforeprint", 2000), ("afterprint", 200)):
        page.run(f"dispatchEvent(new Event('{event}'))")
        assert len(page.rows) == count
