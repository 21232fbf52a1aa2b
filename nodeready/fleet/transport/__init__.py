"""TRANSPORT: a script to many nodes, one answer back from each. It neither parses nor judges.

`base` is the interface: a `Transport` answers each `Request` once, with an `Answer`,
in the order in which answers come. The transports are `ssh` (pyinfra's connectors), `local` (this
machine), `srun` (a step of a Slurm job), `clush` (ClusterShell's workers and gateways) and
`processes` (children of this process, each with its own nodes).
`snapshots` asks for a snapshot, `base.request` for the answer of a node program.
"""
