"""Slurm's nodes: of this job, of the partition in $NODEREADY_PARTITION, or all of them.

Every partition is a group of its name, so that `group_data/PARTITION.py` sets its policy and
`--limit PARTITION` selects it. The policy of a node in several partitions is that of the last by
name. Inside a job or a Slurm script no variable is needed:

    pyinfra inventories/slurm.py deploy.py
    NODEREADY_PARTITION=h100 nodeready audit inventories/slurm.py
"""

from __future__ import annotations

from nodeready.fleet.inventory.slurm import inventory as _inventory

globals().update(_inventory())
