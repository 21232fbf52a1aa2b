"""The nodes of a hostfile: $NODEREADY_HOSTFILE, ./hostfile or /job/hostfile (DeepSpeed's default).

The slots of a line (`gpu001 slots=8`, `gpu001:8`) become the host's data `slots`. nodeready reads
a hostfile directly (`nodeready audit ./hostfile`); this file is for `pyinfra`:

    NODEREADY_HOSTFILE=job.hosts pyinfra inventories/hostfile.py deploy.py
"""

from __future__ import annotations

from nodeready.fleet.inventory import hostfile as _hostfile

all = _hostfile.with_data(_hostfile.read(_hostfile.find()))
