"""Named nodes and their policies, from a file, a node set, a hostfile or Slurm; no connections."""
