"""Makes every node of the inventory debuggable: `pyinfra INVENTORY deploy.py`."""

from operations import core_dumps, debug_tools, gate, iommu, limits, pdsh, ptrace, ssh_client

ptrace.selinux()
ptrace.scope()

core_dumps.rewriters()
core_dumps.directory()
core_dumps.pattern()
core_dumps.size()

limits.logins()
limits.services()
limits.restart()

ssh_client.installed()
ssh_client.known_hosts()
ssh_client.options()
ssh_client.leftover()

pdsh.rcmd()
pdsh.pdshrc()

iommu.args()

# Steps that need the network come last: a package mirror that is down stops no other step.
debug_tools.py_spy()
debug_tools.packages()

# The node checks itself once everything else is in place.
gate.leftover()
gate.program()
gate.timer()
gate.slurm()
