"""A policy that cannot be right is refused before any node is touched, with the likely meaning."""

from __future__ import annotations

import pytest

from nodeready.policy import Policy
from nodeready.policy.policy import PolicyError, check_settings, make_policy

GOOD = [
    ({}, Policy()),
    ({"ptrace_scope": 1}, Policy(ptrace_scope=1)),
    ({"limit_core": 4096}, Policy(limit_core="4096")),
    ({"port_range": [29500, 29500]}, Policy(port_range=(29500, 29500))),
    ({"limit_domains": ["*", "root", "@ml"]}, Policy(limit_domains=("*", "root", "@ml"))),
    ({"iommu_args": ["iommu=pt"]}, Policy(iommu_args=("iommu=pt",))),
    ({"core_pattern": "/" + "a" * 120 + "/%e.%P"}, None),
    ({"gate_directory": "/srv/nodeready"}, None),
    ({"gate_directory": ""}, None),
    (
        {
            "smoke_min_gbps": 370,
            "smoke_python": "/opt/conda/bin/python",
            "smoke_prefix": ["apptainer", "exec", "--nv", "/images/a b.sif"],
            "smoke_environment": ["NCCL_SOCKET_IFNAME==eth0", "EMPTY="],
        },
        Policy(
            smoke_min_gbps=370,
            smoke_python="/opt/conda/bin/python",
            smoke_prefix=("apptainer", "exec", "--nv", "/images/a b.sif"),
            smoke_environment=("NCCL_SOCKET_IFNAME==eth0", "EMPTY="),
        ),
    ),
    ({"_sudo": True, "our_own_data": {"x": 1}, "ssh_user": "root"}, Policy()),
]


@pytest.mark.parametrize(("data", "wanted"), GOOD)
def test_a_sound_policy_is_taken_as_it_is_written(data, wanted):
    made = make_policy(data)
    assert wanted is None or made == wanted


BAD = [
    # A misspelt key, with the one that was meant.
    ({"ptrace_scop": 0}, ["ptrace_scop", "did you mean ptrace_scope?"]),
    ({"core_patern": "/x/core"}, ["core_patern", "did you mean core_pattern?"]),
    ({"limit_stack": 1}, ["limit_stack", "limit_core, limit_memlock, limit_nofile"]),
    # Types and ranges.
    ({"ptrace_scope": "0"}, ["ptrace_scope = '0'", "whole number"]),
    ({"ptrace_scope": True}, ["whole number"]),
    ({"ptrace_scope": 3}, ["between 0 and 2"]),
    ({"core_retention_days": -1}, ["between 0 and 3650"]),
    ({"limit_nofile": "unlimited"}, ["limit_nofile", "whole number"]),
    ({"limit_core": "lots"}, ["'unlimited' or a number of KiB"]),
    ({"core_handler": "apport"}, ["path, systemd-coredump"]),
    ({"ssh_client_mode": "yes"}, ["known_hosts, accept-new, no"]),
    ({"gate_directory": "/etc/nodeready"}, ["a directory for this alone"]),
    ({"gate_directory": "/srv"}, ["a directory for this alone"]),
    ({"gate_directory": "/srv/x/.."}, ["a directory for this alone"]),
    ({"gate_directory": "srv/x"}, ["absolute path"]),
    # The kernel's rules for core_pattern.
    ({"core_pattern": "/var/crash/" + "x" * 128}, ["127 bytes"]),
    ({"core_pattern": "/var/crash/core.%e.%Z"}, ["unknown specifier %Z"]),
    ({"core_pattern": "/var/crash/core.%"}, ["unknown specifier %"]),
    ({"core_pattern": "|/usr/bin/handler"}, ["absolute path"]),
    ({"core_pattern": "core.%e"}, ["absolute path"]),
    ({"core_pattern": "/var/%h/core"}, ["fixed directory"]),
    ({"core_pattern": "/var/../etc/core"}, ["'..'"]),
    ({"core_pattern": "/var/crash/co re"}, ["white space"]),
    # Names that go into files and commands on a node.
    ({"pdshrc_users": ["alice; rm -rf /"]}, ["is no user name"]),
    ({"pdshrc_users": ["-x"]}, ["is no user name"]),
    ({"pdshrc_users": "alice"}, ["must be a list", "('alice',)?"]),
    ({"pdshrc_lines": ["echo a\nrm b"]}, ["one line"]),
    ({"packages": ["gdb", "$(reboot)"]}, ["is no package name"]),
    ({"limit_services": ["slurmd", "../x"]}, ["is no service name"]),
    ({"iommu_args": ["iommu=pt init=/bin/sh"]}, ["is no kernel argument"]),
    ({"ssh_client_hosts": ["gpu* -o ProxyCommand=x"]}, ["is no ssh host pattern"]),
    ({"py_spy_version": "latest"}, ["version such as"]),
    ({"smoke_python": "python3"}, ["is no absolute path"]),
    ({"smoke_prefix": "apptainer exec"}, ["must be a list", "('apptainer exec',)?"]),
    ({"smoke_prefix": ["apptainer", ""]}, ["is no word"]),
    ({"smoke_environment": ["NCCL_DEBUG"]}, ["is no variable (NAME=VALUE)"]),
    ({"smoke_environment": ["1X=2"]}, ["is no variable (NAME=VALUE)"]),
    ({"smoke_environment": ["A=1\nB=2"]}, ["one line"]),
    ({"smoke_environment": {"A": "1"}}, ["must be a list"]),
    ({"smoke_min_gbps": -1}, ["between 0 and 1000000"]),
    ({"smoke_min_gbps": 370.5}, ["whole number"]),
    ({"smoke_min_gbp": 1}, ["did you mean smoke_min_gbps?"]),
    ({"smoke_gpus": 1}, ["the settings are smoke_min_gbps"]),
    # Ports.
    ({"port_range": (29510, 29500)}, ["wrong way round: (29500, 29510)?"]),
    ({"port_range": (0, 70000)}, ["between 1 and 65535"]),
    ({"port_range": 29500}, ["two port numbers"]),
]


@pytest.mark.parametrize(("data", "words"), BAD)
def test_a_wrong_setting_is_named_with_its_file_and_what_is_right(data, words):
    with pytest.raises(PolicyError) as refused:
        check_settings(data, "group_data/h100.py", frozenset({"ssh_hostname"}))
    (problem,) = refused.value.problems
    assert problem.startswith("group_data/h100.py: ")
    assert "\n" not in problem
    for word in words:
        assert word in problem


def test_all_problems_are_told_at_once():
    with pytest.raises(PolicyError) as refused:
        make_policy({"ptrace_scope": 9, "core_handler": "none", "limit_cores": 1})
    assert len(refused.value.problems) == 3
