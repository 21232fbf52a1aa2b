"""What one node cannot know: the host keys of the others."""

from __future__ import annotations

import os
from dataclasses import replace

from nodeready.policy import Policy
from nodeready.probes.ssh_client import SshClient
from nodeready.results import Result, na
from nodeready.snapshot import Snapshot, judge

_CHECK = "ssh_client.known_hosts"


def judge_alone(snapshot: Snapshot, policy: Policy) -> list[Result]:
    """The results of everything in the snapshot, without any other node beside it.

    Whether the block of host keys is the fleet's is for an audit of the fleet; here, none is
    missing altogether, and ssh's options are judged as everywhere.
    """
    seen = snapshot.subjects.get("ssh_client")
    if policy.ssh_client_mode != "known_hosts" or not isinstance(seen, SshClient):
        return judge(snapshot, policy)
    if not seen.known_hosts.digest:
        from nodeready.known_hosts import fleet_lines

        own = fleet_lines({os.uname().nodename: snapshot}, policy.ssh_known_hosts)
        return judge(snapshot, replace(policy, ssh_known_hosts=own))
    held = seen.known_hosts.lines or ("# a block that did not come along",)
    results = judge(snapshot, replace(policy, ssh_known_hosts=held))
    told = na(_CHECK, "there are keys; an audit of all nodes tells whether they are right")
    return [told if result.check == _CHECK else result for result in results]
