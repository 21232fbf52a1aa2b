"""A node with a hostile root speaks for itself alone in the other nodes' known_hosts.

What stands in an honest node's file is read with ssh-keygen, as ssh itself would.
"""

from nodeready.lab import LabNode

KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
ONLY = ("--only", "ssh_client", "--yes")

#: Addresses of hosts outside the inventory: a login node and a storage server.
LOGIN, STORAGE = "192.0.2.10", "fd00:9::7"


def known(node: LabNode, host: str) -> set[str]:
    """The keys that ssh on the node has for a host, each ``type base64``."""
    said = node.enter(["ssh-keygen", "-F", host, "-f", KNOWN_HOSTS], check=False).stdout
    lines = [line.split() for line in said.splitlines() if not line.startswith("#")]
    return {" ".join(words[1:3]) for words in lines}


def keys(node: LabNode) -> set[str]:
    text = node.enter(["sh", "-c", "cat /etc/ssh/ssh_host_*_key.pub"]).stdout
    return {" ".join(line.split()[:2]) for line in text.splitlines()}


def claim(node: LabNode, name: str, *addresses: str) -> None:
    """The node calls itself this, in full and in short, and has these addresses."""
    node.enter(["hostname", name])
    node.write("/etc/hostname", f"{name}\n")
    node.write("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {name} {name.partition('.')[0]}\n")
    # It answers to nobody on the wire: the tests after this one use the same bridge.
    node.enter(["sh", "-c", "echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore"])
    wire = "ip link add ib0 type veth peer name ib1; ip link set ib0 up; ip link set ib1 up"
    node.enter(["sh", "-c", f"[ -e /sys/class/net/ib0 ] || {{ {wire}; }}"])
    for address in addresses:
        node.enter(
            ["ip", "addr", "add", f"{address}/{128 if ':' in address else 32}", "dev", "ib0"]
        )


def test_a_node_is_not_called_like_others_or_like_hosts_of_nobody(tool, fleet, fresh_nodes):
    honest, hostile, down = three = fresh_nodes(3)
    inventory = fleet(three)
    down.kill()
    claim(hostile, f"{down.name}.cluster", LOGIN, STORAGE, down.address)
    tool("deploy", inventory, *ONLY, status=4)
    assert known(honest, hostile.name) == keys(hostile)
    assert known(honest, hostile.address) == keys(hostile)
    for name in (down.name, f"{down.name}.cluster", down.address, LOGIN, STORAGE):
        assert known(honest, name) == set(), name


def test_a_node_that_tells_other_keys_than_its_sshd_has_is_a_finding(tool, fleet, fresh_nodes):
    honest, hostile, other = three = fresh_nodes(3)
    inventory = fleet(three)
    forge = "ssh-keygen -q -t ed25519 -N '' -f /root/f; cd /etc/ssh; tee *_key.pub </root/f.pub"
    hostile.enter(["sh", "-c", forge])
    done = tool("deploy", inventory, *ONLY, status=3)
    assert known(honest, hostile.name) == known(honest, hostile.address) == set()
    assert known(honest, other.name) == keys(other)
    audit = tool("audit", inventory, "--only", "ssh_client.host_key", "--format", "json")
    told = {name: row["status"] for name, row in audit.nodes.items()}
    assert told == {honest.name: "ok", hostile.name: "fail", other.name: "ok"}, done
