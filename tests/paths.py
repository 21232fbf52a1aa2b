"""Where things are in the checkout."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nodeready"
DOCS = ROOT / "docs"
#: Recorded outputs of real machines, where they lie beside the checkout.
SAMPLES = ROOT.parent / "shared" / "samples"


def schema(name: str) -> Any:
    """The published schema of a document, as JSON: `schema("audit")`."""
    (path,) = (DOCS / "schema").glob(f"{name}-[0-9].json")
    return json.loads(path.read_text(encoding="utf-8"))
