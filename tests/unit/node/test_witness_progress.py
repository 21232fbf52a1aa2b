"""Whether a log shows progress between two looks."""

import os

import pytest

from nodeready.agent.witnesses import progress

BAR = "\r 45%|####   | {}/100 [00:30<00:36,  1.50it/s]"


@pytest.mark.parametrize(("before", "after", "change"), [
    (BAR.format(45), BAR.format(46), "45/100, then 46/100"),
    # The bar of the next epoch begins again.
    (BAR.format(99) + BAR.format(3), BAR.format(4), "3/100, then 4/100"),
    ("{'loss': 0.5, 'epoch': 1.03}\n", "{'loss': 0.5, 'epoch': 1.04}\n",
     "epoch 1.03, then epoch 1.04"),
    ("Epoch: [3][ 20/5000] time 0.3\n", "Epoch: [3][ 30/5000] time 0.3\n",
     "20/5000, then 30/5000"),
    ("step=45, skipped=0\n", "", ""),
    # A watchdog, a retry, a memory that grows, the lines of ranks that stand at their steps.
    ("[w] still at step 45, 9/60 s\n", "[w] still at step 45, 10/60 s\n", ""),
    ("Retry 3/10: refused\n", "Retry 4/10: refused\n", ""),
    ("step 45, 7000/81920 MiB\n", "step 45, 7100/81920 MiB\n", ""),
    ("rank 0: step 44\nrank 1: step 45\n", "rank 0: step 44\nrank 1: step 45\n", ""),
    ("", "step=45\n", ""),
])  # fmt: skip
def test_a_log_that_counts_shows_progress(tmp_path, before, after, change):
    looks = []
    with open(tmp_path / "train.log", "w") as file:
        for text in (before, after):
            print(text, end="", file=file, flush=True)
            looks.append(progress.observe(os.getpid(), os.getuid(), has_log=False))
    said = progress.difference(*looks)
    assert said == (progress.LOG_COUNTS + change if change else "")
