"""Eight NVIDIA H100 per node, jobs through Slurm."""

from __future__ import annotations

# PAM limits never reach a job that slurmd starts: slurmd gets a drop-in.
limit_services = ("slurmd",)
# A running slurmd with an old limit is reported as pending. To let a deploy restart it (jobs
# survive in slurmstepd, a separate process):
# restart_services = ("slurmd",)

# mpirun, pdsh and torchrun go from node to node.
ssh_client_hosts = ("gpu*",)

# The launcher's ports, when jobs share a node.
port_range = (29500, 29599)
