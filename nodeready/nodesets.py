"""Node sets for the lists of an inventory file: `h100 = nodes("gpu[001-064]")`."""

from nodeready.fleet.inventory.nodeset import fold, nodes

__all__ = ["fold", "nodes"]
