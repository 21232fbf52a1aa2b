"""The node's own check: its files, its timer, and what Slurm runs of it."""
