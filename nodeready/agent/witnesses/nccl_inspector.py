"""The last collective that the NCCL Inspector reports of a process, as JSON or for Prometheus.

Source: NVIDIA/nccl ext-profiler/inspector (README.md, inspector.cc, inspector_prom.cc) of NCCL
2.28 and newer. A process writes ``DIR/HOST-pidPID.log``, an object a line, or for each GPU
``DIR/nccl_inspector_metrics_UUID.prom``, and keeps the file open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: The names of its files.
FILES = re.compile(r"-pid\d{1,9}\.log$|/nccl_inspector_metrics_[\w-]{1,64}\.prom$")

# A verbose object has thousands of characters of events behind these keys.
_JSON = re.compile(
    r'^\{ ?"header": ?\{ ?"id": ?"(?P<id>0x[0-9a-f]{1,16})".{0,80}?'
    r'"n_ranks": ?(?P<ranks>\d{1,7})\b.{0,600}?"coll": ?"(?P<name>\w{1,40})", ?'
    r'"coll_sn": ?(?P<number>\d{1,18})\b'
)
_PROMETHEUS = re.compile(
    r'^nccl_\w{1,40}\{comm_id="(?P<id>0x[0-9a-f]{1,16})".{0,400}?"?n_?ranks="(?P<ranks>\d{1,7})"'
    r'.{0,200}?collective="(?P<name>\w{1,40})".{0,80}?coll_sn="(?P<number>\d{1,18})"'
)


def last_collective(lines: Iterable[str]) -> str:
    """The last completed collective of the largest communicator; "": none.

    >>> last_collective(['nccl_bus_bandwidth_gbs{comm_id="0xd1",rank="4",nranks="8",'
    ...                  'collective="AllReduce",coll_sn="42"} 1.5'])
    'AllReduce #42 of communicator 0xd1'
    """
    best, words = (0, 0), ""
    for line in lines:
        if match := _JSON.match(line) or _PROMETHEUS.match(line):
            key = int(match["ranks"]), int(match["number"])
            if key >= best:
                best = key
                words = f"{match['name']} #{key[1]} of communicator {match['id']}"
    return words
