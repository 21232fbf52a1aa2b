"""This machine, without ssh: `pyinfra inventories/local.py deploy.py`."""

from __future__ import annotations

all = ["@local"]
