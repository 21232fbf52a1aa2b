"""Makes every node of the inventory debuggable: `pyinfra INVENTORY deploy.py`."""

from operations import core_dumps, ptrace

ptrace.selinux()
ptrace.scope()
core_dumps.rewriters()
core_dumps.directory()
core_dumps.pattern()
core_dumps.size()
