"""A stand-in for `scontrol` and slurmctld, which many processes use at once by one directory.

It is slow and has no transaction: an update is applied somewhere between the call and the answer,
and the list of all nodes is read node by node while others change. As in Slurm, an update is
applied whole, a reason gets the controller's time in whole seconds, and an undrain removes it.
"""

import json
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nodeready.agent.gate.drain import SlurmNode, parse_all


class StandIn:
    """Slurm in a directory. latency_s: the least and the most seconds of an answer"""

    def __init__(self, directory: Path, latency_s: tuple[float, float]) -> None:
        self.directory, self.latency_s = directory, latency_s

    def add(self, names: Iterable[str], partitions: str, state: str = "IDLE", reason: str = ""):
        for name in names:
            self._write(name, {"partitions": partitions, "state": state, "reason": reason})

    def nodes(self) -> dict[str, SlurmNode]:
        return parse_all("\n".join(map(self._shown, sorted(os.listdir(self.directory)))))

    def scontrol(self, words: list[str], deadline: float) -> str:
        """In the place of `drain._scontrol`."""
        latency_s = random.uniform(*self.latency_s)
        before_s = random.uniform(0, latency_s)
        time.sleep(before_s)
        if words[0] == "update":
            self._update(dict(word.split("=", 1) for word in words[1:]))
            output = ""
        else:
            names = words[2:] or sorted(os.listdir(self.directory))
            output = "\n".join(self._shown(name) for name in names)
        time.sleep(latency_s - before_s)
        return output

    def _update(self, words: dict[str, str]) -> None:
        name = words.pop("nodename")
        node = json.loads((self.directory / name).read_text())
        if words.get("state") == "undrain":
            node |= {"state": node["state"].replace("+DRAIN", ""), "reason": ""}
        elif words.get("state") == "drain" and "+DRAIN" not in node["state"]:
            node["state"] += "+DRAIN"
        if "reason" in words:
            moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
            node["reason"] = f"{words['reason']} [root@{moment}]"
        self._write(name, node)

    def _write(self, name: str, node: dict[str, Any]) -> None:
        path = self.directory / name
        new = path.parent.parent / f"{name}.{os.getpid()}"
        new.write_text(json.dumps(node))
        new.rename(path)

    def _shown(self, name: str) -> str:
        node = json.loads((self.directory / name).read_text())
        lines = [f"NodeName={name} Arch=x86_64", f"   State={node['state']} ThreadsPerCore=1"]
        lines += [f"   Partitions={node['partitions']} "] if node["partitions"] else []
        lines += [f"   Reason={node['reason']}"] if node["reason"] else []
        return "\n".join([*lines, ""])
