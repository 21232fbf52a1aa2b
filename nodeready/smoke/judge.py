"""What the tests' figures and the looks before and after tell. Pure."""

from __future__ import annotations
