"""Slurm's nodes: of this job, of the partition in $NODEREADY_PARTITION, or all of them.

Every partition is a group of its name, so that `group_data/PARTITION.py` sets its policy and
`--limit PARTITION` selects it; of a node's partitions, the last by name decides. Inside a job or
a Slurm script there is nothing to set:

    pyinfra inventories/slurm.py deploy.py
    NODEREADY_PARTITION=h100 nodeready audit inventories/slurm.py
"""

from __future__ import annotations

from nodeready.inventory.slurm import inventory as _inventory

globals().update(_inventory())
