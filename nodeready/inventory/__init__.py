"""WHO: from a file, a node set, a hostfile or Slurm to named nodes and their policies.

It never connects to a node.
"""
