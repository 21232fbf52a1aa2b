"""The variables of a process, and the facts of this node that decide about them."""

import os
import socket
import subprocess
import sys
import time

from nodeready.agent.stacks import processes
from nodeready.agent.witnesses import environment
from nodeready.agent.witnesses.environment import select_variables
from nodeready.subjects.environment_table import JOB
from tests.cases import with_table

OWN = os.getpid()


@with_table("text, values")
def test_only_what_decides_is_taken(text, values):
    variables = select_variables(text.encode("latin-1"))
    assert " ".join(f"{name}={value}" for name, value in variables) == values


def test_long_values_and_a_million_variables_are_cut():
    assert select_variables(b"NCCL_NET=" + b"x." * 900) == (("NCCL_NET", "x." * 100),)
    data = b"".join(b"NCCL_%d=1\0" % number for number in range(100_000))
    assert len(select_variables(data)) == 64


def test_a_process_and_its_node():
    network = environment.network_pid([OWN])
    rank = environment.observe_rank(OWN, network)
    assert (rank.absent, rank.contained, rank.cpus) == ("", False, len(os.sched_getaffinity(0)))
    assert environment.observe_rank(2**22, network).absent == "its environment is not readable"
    server = socket.create_server(("127.0.0.1", 0))
    port = str(server.getsockname()[1])
    masters = {("127.0.0.1", port): [OWN], ("no such name", "1"): [OWN]}
    facts = environment.observe_node(network, masters, time.monotonic() + 9)
    assert (facts.absent, facts.interfaces[0].name) == ("", "lo")
    assert facts.interfaces[0].addresses == ("127.0.0.1/8",)
    assert (facts.cpus, facts.machine) == (os.cpu_count(), os.uname().machine)
    good, unknown = facts.rendezvous
    assert (good.resolved, good.error, good.listener) == (("127.0.0.1",), "", JOB)
    assert (unknown.resolved, unknown.listener) == ((), "")
    assert unknown.error
    server.close()


def test_the_listener_is_the_launcher_or_a_stranger():
    server = socket.create_server(("127.0.0.1", 0))
    port = str(server.getsockname()[1])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        facts = environment.observe_node(
            child.pid, {("127.0.0.1", port): [child.pid]}, time.monotonic() + 9
        )
        # torchrun serves the store for its child.
        assert facts.rendezvous[0].listener == JOB
        server.close()
        child.communicate(b"\n")
    script = "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    script += "print(s.getsockname()[1], flush=True); input()"
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        port = other.stdout.readline().decode().strip()
        facts = environment.observe_node(OWN, {("127.0.0.1", port): [OWN]}, time.monotonic() + 9)
        # A child of ours is no ancestor of ours.
        holder = facts.rendezvous[0].listener
        assert facts.rendezvous[0].is_users
        assert holder.startswith(f"port {port} is taken by ")
        assert holder.endswith(f", pid {other.pid}")
        other.communicate(b"\n")


def test_the_files_of_nccl_are_read_with_the_owners_rights_and_bounded(tmp_path):
    def files(path, uid=None):
        with subprocess.Popen(["sleep", "60"], user=uid) as process:
            rows = [*environment._nccl_files(process.pid, str(path))]
            process.kill()
        return [(file.path, dict(file.variables)) for file in rows if file.path == str(path)]

    path = tmp_path / "nccl.conf"
    path.write_text("# NCCL_NET=IB\nNCCL_ALGO=Ring\nHOME=/x\nNCCL_AUTH_TOKEN=abc\n")
    assert files(path) == [(str(path), {"NCCL_ALGO": "Ring", "NCCL_AUTH_TOKEN": "(left out)"})]
    path.write_text("x" * environment._CONF_BYTES + "\nNCCL_ALGO=Ring\n")
    assert files(path) == []
    path.unlink()
    os.mkfifo(path)
    assert files(path) == []
    if os.geteuid() == 0:
        path.unlink()
        path.write_text("NCCL_ALGO=Ring\n")
        path.chmod(0o600)
        assert files(path, 65534) == []


def test_a_node_whose_files_hang_is_absent(monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(environment, "_interfaces", lambda pid: time.sleep(60))
    facts = environment.observe_node(OWN, {}, time.monotonic() + 9)
    assert facts.absent == "reading its interfaces hangs"
