"""The generators of scripts/, importable under their own names."""

from __future__ import annotations

import sys

from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
