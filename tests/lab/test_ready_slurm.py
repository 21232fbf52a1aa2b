"""What `nodeready ready --hostfile-out` writes is what launchers take: a job runs on it."""

from __future__ import annotations

from nodeready.inventory.nodeset import expand
from tests.command import ours

WAIVED = {"waivers": {"proof.core": "shared kernel", "proof.backtrace": "shared kernel"}}


def test_a_job_runs_on_the_nodes_that_are_ready_and_on_no_other(slurm_lab, fleet, tool, tmp_path):
    """Slurm by its exclude list, pdsh by the list of names; the bad node gets neither."""
    first, bad, last = slurm_lab.nodes
    where = fleet(slurm_lab.nodes, **WAIVED)
    done = tool("deploy", where, "--yes", "-q")
    assert done.status == 0, done
    bad.run("mv /etc/pdsh/rcmd_default /root/rcmd_default; mv /usr/bin/gdb /usr/bin/gdb.away")
    try:
        files = {form: tmp_path / form for form in ("exclude", "list", "hostfile")}
        for form, path in files.items():
            done = tool(
                "ready", where, "--user", "root", "--nodes-needed", "2", "-q",
                "--only", "proof.gdb,proof.mesh,pdsh", "--hostfile-out", path,
                "--hostfile-format", form,
            )  # fmt: skip
            assert done.status == 0, done
        assert expand(files["exclude"].read_text().strip()) == [bad.name]
        excluded = files["exclude"].read_text().strip()
        job = first.run(f"srun --exclude={excluded} -N2 uname -n", user="ml").stdout.split()
        assert sorted(job) == sorted([first.name, last.name])
        # The same file on the node: pdsh's own way to take a list.
        first.write("/root/ready.list", files["list"].read_text())
        answers = first.run("pdsh -R ssh -w ^/root/ready.list uname -n | sort").stdout
        assert answers == "".join(f"{name}: {name}\n" for name in sorted([first.name, last.name]))
        again = tool("audit", files["hostfile"], "--only", "pdsh.rcmd", "--ssh-user", "nobody")
        assert again.status in (3, 4), again
        assert bad.name not in again.out
    finally:
        bad.run("mv /usr/bin/gdb.away /usr/bin/gdb; mv /root/rcmd_default /etc/pdsh/rcmd_default")
    assert not [line for node in slurm_lab.nodes for line in ours(node)]
