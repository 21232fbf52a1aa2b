"""Inventories beside files of other users: root alone can give a file to somebody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeready.inventory.load import InventoryError, load


def test_group_data_that_a_stranger_left_in_a_public_directory_is_not_run(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    (public / "group_data").mkdir()
    planted = public / "group_data/all.py"
    planted.write_text("raise SystemExit('it ran')\n")
    os.chown(planted, 12345, 12345)
    with pytest.raises(InventoryError, match="is not run: it is another user's"):
        load("gpu1", cwd=public, trusted=True)
    public.chmod(0o755)
    with pytest.raises(InventoryError, match=r"is not taken by root: .* belongs to uid 12345"):
        load("gpu1", cwd=public)
    with pytest.raises(InventoryError, match="it ran"):
        load("gpu1", cwd=public, trusted=True)
