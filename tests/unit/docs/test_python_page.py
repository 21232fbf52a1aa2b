"""The Python code of docs/pyinfra.md, "From Python", runs as it stands there."""

import os
import re
import subprocess
import sys

import pytest

from tests.paths import ROOT

PAGE = (ROOT / "docs/pyinfra.md").read_text().partition("\n## From Python\n")[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.parametrize(
    "needs", ["", pytest.param("pandas", marks=pytest.mark.nightly)], ids=["plain", "pandas"]
)
def test_the_page_runs(needs, tmp_path):
    blocks = [block for block in BLOCKS if needs or "import pandas" not in block]
    assert len(blocks) == (4 if needs else 3)
    site = tmp_path / "site"
    if needs:
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site), needs]
        subprocess.run(install, check=True)
    (tmp_path / "prod.py").write_text('all = ["@local"]\n')
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{site}", "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{'unreachable': 0, ")
    assert done.stdout.endswith("2 no such inventory file: nosuch.py\n")
