"""CARRY: a text to many nodes, one answer back from each. Neither parses nor judges it.

`base` is the interface: a `Carrier` answers each `Request` with a `Reply` or a `Failure`, once, in
the order in which answers come. The carriers are `ssh` (pyinfra's connectors), `local` (this
machine), `srun` (a step of a Slurm job) and `fake` (for tests). `look` asks for a snapshot,
`program` for the answer of a program of ours.
"""
