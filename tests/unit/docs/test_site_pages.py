"""What stands in the repository's pages for its readers there is right in the site, too."""

import re
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from tests.unit.docs.pages import PAGES, ROOT


def _hook():
    spec = spec_from_file_location("site_pages", ROOT / "scripts/site_pages.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_pages = _hook()


@pytest.mark.parametrize(("page", "link", "wanted"), [
    ("README.md", "[a](docs/audit.md#exit-status)", "[a](audit.md#exit-status)"),
    ("README.md", "[a](CONTRIBUTING.md)", "[a](contributing.md)"),
    ("README.md", "[a](LICENSE)", "[a](LICENSE.txt)"),
    ("README.md", "![a](docs/images/audit.svg)", "![a](images/audit.svg)"),
    ("docs/lab.md", "[a](../CONTRIBUTING.md#rules)", "[a](contributing.md#rules)"),
    ("docs/lab.md", "[a](../README.md)", "[a](index.md)"),
    ("docs/lab.md", "[a](README.md)", "[a](overview.md)"),
    ("docs/lab.md", "[a](schema/audit-2.json)", "[a](schema/audit-2.json)"),
    ("docs/lab.md", "[a](#here)", "[a](#here)"),
    ("README.md", "[a](https://pyinfra.com/docs)", "[a](https://pyinfra.com/docs)"),
    ("README.md", "```sh\n[a](docs/b)\n```", "```sh\n[a](docs/b)\n```"),
])  # fmt: skip
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
