"""Dirty nodes: whatever their files say, a new login gets the policy's limits."""

from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.operations import limits as steps
from tests.lab.looks import deploy, judged, statuses

# Values below the usual hard limits: a machine that runs the lab may not be allowed to raise them.
POLICY = Policy(limit_memlock="1024", limit_nofile=4096)
STEPS = (steps.logins, steps.services, steps.restart)
CONF = "/etc/security/limits.conf"


def ulimits(node: LabNode, user: str) -> list[str]:
    """What a new session gets: core, memlock and nofile, soft and hard."""
    text = "; ".join(f"ulimit -{kind}{item}" for item in "cln" for kind in "SH")
    return node.run(text, user=user).stdout.split()


def files(node: LabNode) -> set[str]:
    """Every file of /etc with its digest, mode and owner, and every link."""
    text = "find /etc -type f -exec sha256sum {} + ; find /etc ! -type d -printf '%p %m %u %l\\n'"
    return {line.strip() for line in node.run(text).stdout.splitlines()}


WANTED = ["unlimited", "unlimited", "1024", "1024", "4096", "4096"]


def test_a_new_login_has_the_limits_whatever_the_files_say(fresh_nodes):
    dirt = {
        CONF: b"# caf\xe9 \xff\r\n*\thard\tcore\t0 # none\r\n* - nofile 256\r\nroot - core 0\r",
        "/etc/security/limits.d/20-site.conf": "",
        "/etc/security/limits.d/zzz.conf": "* - core 0\nroot - core 0\n* - memlock 8\n",
    }
    node = fresh_nodes(1, files=dirt)[0]
    # The file is a link, and stays one.
    node.run(f"mv {CONF} /srv/limits; ln -s /srv/limits {CONF}")
    before = files(node)
    assert statuses(node, POLICY, "limits")["limits.core"] == "fail"

    assert deploy(node, POLICY, STEPS, "limits") == ["limits.logins"]

    assert ulimits(node, "ml") == WANTED
    assert ulimits(node, "root") == WANTED
    (ours,) = {line.split()[0 if " 644 " in line else 1] for line in files(node) ^ before}
    assert f"{ours} 644 root" in files(node)
    assert set(statuses(node, POLICY, "limits").values()) <= {"ok", "na"}
    assert deploy(node, POLICY, STEPS, "limits") == []
    # Lines for a user are named and stay.
    lines = "ml hard core 0\n* hard core 0"
    node.write(CONF, lines)
    node.write("/etc/security/limits.d/a.conf", "ml - nofile 99")
    deploy(node, POLICY, STEPS, "limits")
    assert ulimits(node, "root") == WANTED
    assert ulimits(node, "ml") == ["0", "0", "1024", "1024", "99", "99"]
    result = judged(node, POLICY, "limits")["limits.exceptions"]
    assert result.status == "warn"
    assert f"{CONF}:1" in result.actual
    assert "/etc/security/limits.d/a.conf:1" in result.actual
    assert deploy(node, POLICY, STEPS, "limits") == []
    assert node.read(CONF) == lines
    assert node.testinfra().file(CONF).linked_to == "/srv/limits"
