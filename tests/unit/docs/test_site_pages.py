"""What stands in the repository's pages for its readers there is right in the site, too."""

import re
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from tests.cases import read_table
from tests.unit.docs.pages import PAGES, ROOT


def _hook():
    spec = spec_from_file_location("site_pages", ROOT / "scripts/site_pages.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_pages = _hook()


@pytest.mark.parametrize(
    ("page", "link", "wanted"), read_table(__file__, "a_link_leads_to_the_same_page")
)
def test_a_link_leads_to_the_same_page(page, link, wanted):
    assert site_pages.with_links(link, page) == wanted


@pytest.mark.parametrize(("text", "wanted"), [
    ("1. a\n\n   b\n\nc", "1. a\n\n    b\n\nc"),
    ("- a\n  b\n  - c\n\n    d\n- e", "- a\n    b\n    - c\n\n        d\n- e"),
    ("1. a\n\n   ```sh\n   x\n     - y\n   ```\n\n   b", None),
    ("```\n- a\n  b\n```", "```\n- a\n  b\n```"),
    ("a\n  b", "a\n  b"),
])  # fmt: skip
def test_what_belongs_to_an_item_is_four_columns_in(text, wanted):
    if wanted is None:
        wanted = "1. a\n\n    ```sh\n    x\n      - y\n    ```\n\n    b"
    assert site_pages.with_lists(text) == wanted


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = {site_pages.in_site(page.relative_to(ROOT).as_posix()) for page in PAGES}
    assert sorted(navigation) == sorted({*pages, "measurements.md"})
