"""The login nodes: people share them and debug from them; no job runs here."""

from __future__ import annotations

# Slurm hands the submit host's limits on to the job (PropagateResourceLimits in slurm.conf), so
# the limits of all.py matter here too. But there is no slurmd to have a drop-in.
limit_services = ()

# Cores of people's own programs: a shorter time than on the compute nodes.
core_retention_days = 3

# ssh from here to the compute nodes asks nothing.
ssh_client_hosts = ("gpu*", "amd*")

# Who runs pdsh from here gets a ~/.pdshrc:
# pdshrc_users = ("alice", "bob")
# pdshrc_path = ("/opt/conda/bin",)
# pdshrc_activate = ". /opt/conda/etc/profile.d/conda.sh && conda activate train"
