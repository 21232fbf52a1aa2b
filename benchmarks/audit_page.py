"""`benchmarks/run audit_page`: the page of a large audit in a browser.

The audit is that of `benchmarks/run simulated`. A headless Chromium opens the page and searches
it, each time until it has painted.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import simulated
from benchmarks.command import ROOT, Benchmark, BenchmarkReport, Budget, budget_rows

OPEN_S, SEARCH_S = 2.0, 0.2  # seconds to open the page of 10,000 nodes, and for a search
#: What is searched: a node, a check, a version of every node, a serial number, half of the texts.
WORDS = ("gpu07777", "ptrace.scope", "535.129.03", "165052200382", "a")
_REPEAT = 5
#: From the typed word until the result is painted; the page waits 40 ms for the next letter.
_SEARCH = """
const [word, done] = arguments;
const find = document.getElementById("find");
const start = performance.now();
find.value = word;
find.dispatchEvent(new Event("input"));
const count = document.getElementById("count");
count.textContent = "";
const wait = () => {
  if (!count.textContent) requestAnimationFrame(wait);
  else requestAnimationFrame(() => setTimeout(() => done(performance.now() - start), 0));
};
wait();
"""
_PAINTED = "const [done] = arguments; requestAnimationFrame(() => setTimeout(done, 0));"


@dataclass(frozen=True)
class PageCost:
    """Seconds of wall time."""

    nodes: int
    size_mb: float
    render_s: float
    open_s: float
    first_s: float  # the first search, which makes the index
    search_s: float  # the slowest of the further ones; of each word the median

    def row(self) -> tuple[str, ...]:
        times = (self.render_s, self.open_s, self.first_s, self.search_s)
        return f"{self.nodes:,}", f"{self.size_mb:.1f} MB", *(f"{value:.2f} s" for value in times)

    def budgets(self) -> Iterator[Budget]:
        if self.nodes <= 10_000:
            yield Budget(f"{self.nodes:,} nodes: opens", OPEN_S, self.open_s, " s")
            yield Budget(f"{self.nodes:,} nodes: a search", SEARCH_S, self.search_s, " s")


HEAD = ("nodes", "page", "rendered", "opened", "first search", "slowest further search")


def _search(browser: Any, word: str) -> float:
    seconds: float = browser.execute_async_script(_SEARCH, word) / 1000
    return seconds


def cost(profile: str, nodes: int, name: str) -> PageCost:
    with simulated.answers(profile, nodes, name) as directory:
        run = simulated.measured(profile, nodes, directory, facts=True)
        page = Path(directory, "report.html")
        sys.path.insert(0, str(ROOT / "scripts"))
        browser = importlib.import_module("chromium").start()
        try:
            browser.get("about:blank")
            start = time.perf_counter()
            browser.get(page.as_uri())
            browser.execute_async_script(_PAINTED)
            open_s = time.perf_counter() - start
            first_s = _search(browser, WORDS[0])
            search_s = max(
                statistics.median(_search(browser, word) for _ in range(_REPEAT)) for word in WORDS
            )
        finally:
            browser.quit()
        size_mb = page.stat().st_size / 1e6
        return PageCost(nodes, size_mb, run.render_s["html"], open_s, first_s, search_s)


def _measure(arguments: argparse.Namespace) -> BenchmarkReport:
    costs = [cost("h100", nodes, arguments.name) for nodes in arguments.nodes]
    budgets = budget_rows(budget for page in costs for budget in page.budgets())
    tables = [("", [HEAD, *(page.row() for page in costs)]), ("", budgets)]
    return BenchmarkReport("The page of a large fleet", tables)


BENCHMARK = Benchmark(_measure, {"nodes": "1000,10000"})
