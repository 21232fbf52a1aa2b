"""What can be wrong with a node's interfaces, InfiniBand ports and TCP ports."""

from __future__ import annotations

from nodeready.lab.fault import Fault

ALL = ("cpu", "h100", "a100", "mi300x")

IB = ("h100", "a100")

FAULTS = (
    Fault(
        "ib-down",
        "port mlx5_3 has no link: a cable is out",
        IB,
        hardware={"ports": {"mlx5_3": {"state": "1: DOWN", "phys_state": "2: Polling"}}},
    ),
    Fault(
        "ib-half-rate",
        "port mlx5_3 runs at half its speed: two of its lanes are dead",
        ("h100",),
        hardware={"ports": {"mlx5_3": {"rate": "200 Gb/sec (2X NDR)"}}},
    ),
    Fault(
        "ib-firmware",
        "mlx5_3 has another firmware than the other adapters",
        ("h100",),
        hardware={"ports": {"mlx5_3": {"firmware": "28.36.1010"}}},
    ),
    Fault(
        "roce-down",
        "port mlx5_3 has no link: a cable is out",
        ("mi300x",),
        hardware={"ports": {"mlx5_3": {"state": "1: DOWN", "phys_state": "3: Disabled"}}},
    ),
    Fault(
        "bond-half",
        "one of the two ports of the management bond has no link",
        ("h100",),
        hardware={"cut": ("ens1f1np1",)},
    ),
    Fault(
        "wrong-mtu",
        "eth0 has MTU 1400",
        ALL,
        start="ip link set dev eth0 mtu 1400\n",
    ),
    Fault(
        "port-taken",
        "a forgotten TensorBoard listens on port 29500",
        ALL,
        programs=(("culprits", "listener", "29500"),),
    ),
    Fault(
        "ephemeral",
        "outgoing connections may take the ports of jobs: ip_local_port_range 15000-61000",
        ALL,
        start="echo '15000 61000' >/proc/sys/net/ipv4/ip_local_port_range\n",
    ),
    Fault(
        "firewall",
        "nftables drops everything but ssh",
        ALL,
        start="""\
nft -f - <<'END'
table inet filter {
    chain input {
        type filter hook input priority filter; policy drop;
        iif lo accept
        ct state established,related accept
        tcp dport 22 accept
    }
}
END
""",
        needs=("nft",),
    ),
)
