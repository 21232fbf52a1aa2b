"""The nodes of the running lab: `nodeready lab up`, then `pyinfra inventories/lab.py …`.

With nodeready installed, `@lab` names the same nodes.

NODEREADY_LAB names another lab than the default one.
"""

import os

from pyinfra.api.exceptions import InventoryError

from nodeready.lab import Lab, LabError
from nodeready.lab.host import node_settings

_name = os.environ.get("NODEREADY_LAB") or "lab"
try:
    _lab = Lab.load(_name)
except (LabError, OSError) as error:
    raise InventoryError(f"the lab {_name} cannot be read: {error}") from None
if _lab is None:
    _option = "" if _name == "lab" else f" --name {_name}"
    raise InventoryError(f"the lab {_name!r} does not run; start it: nodeready lab up{_option}")

lab = (_lab.inventory_data(), node_settings())
