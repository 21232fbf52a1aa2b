"""The nodes of the running lab: `nodeready lab up`, then `pyinfra inventories/lab.py …`.

NODEREADY_LAB names another lab than the default one.
"""

import os

from pyinfra.api.exceptions import InventoryError

from nodeready.lab import Lab, LabError
from nodeready.lab.needs import reachable_limits

_name = os.environ.get("NODEREADY_LAB") or "lab"
try:
    _lab = Lab.load(_name)
except (LabError, OSError) as error:
    raise InventoryError(f"the lab {_name} cannot be read: {error}") from None
if _lab is None:
    _option = "" if _name == "lab" else f" --name {_name}"
    raise InventoryError(f"the lab {_name!r} does not run; start it: nodeready lab up{_option}")

# The nodes are processes of this machine: they cannot exceed its limits where it may not raise
# them. Its kernel writes cores by its own core_pattern, not by the one that a node shows and
# changes.
_shared = {
    "waivers": {
        "proof.core": "lab nodes share this machine's kernel and its core_pattern",
        "proof.backtrace": "see proof.core",
    }
}
lab = (_lab.inventory_data(), {**reachable_limits(), **_shared})
