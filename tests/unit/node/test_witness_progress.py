"""Whether a log shows progress between two looks."""

import os

from nodeready.agent.witnesses import progress
from tests.cases import with_table


@with_table("before, after, change")
def test_a_log_that_counts_shows_progress(tmp_path, before, after, change):
    looks = []
    with open(tmp_path / "train.log", "w") as file:
        for text in (before, after):
            print(text, end="", file=file, flush=True)
            looks.append(progress.observe(os.getpid(), os.getuid(), has_log=False))
    said = progress.difference(*looks)
    assert said == (progress.LOG_COUNTS + change if change else "")
