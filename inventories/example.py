"""A cluster: two login nodes, 64 nodes with NVIDIA H100 and 32 with AMD MI300X.

Copy this file and `group_data/`, and write your own names. A list is a group; its name is that of
its file in `group_data/`, where the policy of the group is set. `--limit h100` selects it.

    pyinfra inventories/example.py debug-inventory
    nodeready audit inventories/example.py --limit 'gpu[001-004]'
"""

from __future__ import annotations

from nodeready.nodesets import nodes

login = nodes("login[1-2]")
h100 = nodes("gpu[001-064]")
mi300x = nodes("amd[01-32]")
