"""`nodeready tail` on real nodes: what differs, what stopped, what hangs; and nothing stays."""

import signal

import pytest

from nodeready.lab import LabNode
from tests.command import Done, ours, wait_for
from tests.lab.test_host import END_MOUNT, NAS, dead_mount

LOGS = "/var/log/train"
PATTERN = f"{LOGS}/rank_*.log"


def job(nodes: list[LabNode]) -> None:
    """Two ranks on each node, with a log of 30 steps each."""
    for rank in range(2 * len(nodes)):
        node = nodes[rank // 2]
        steps = [
            f"2026-03-01 12:00:{step:02},{rank}00 {node.name} [rank{rank}]: step {step}\n"
            for step in range(30)
        ]
        node.write(f"{LOGS}/rank_{rank}.log", "".join(steps))


def hanging(node: LabNode) -> list[str]:
    """The processes of ours that wait for the mount."""
    names = node.run("cat /proc/[0-9]*/comm", check=False).stdout.split()
    return [name for name in names if name.startswith("nr-")]


def groups(done: Done) -> list[tuple[str, list[int | None]]]:
    made = done.document
    return [(group["kind"], [file["rank"] for file in group["files"]]) for group in made["groups"]]


def test_what_stopped_is_on_top_and_files_are_chosen_by_their_time_and_words(
    fresh_nodes, fleet, tool
):
    nodes = fresh_nodes(2)
    job(nodes)
    nodes[1].write(f"{LOGS}/rank_2.log", "step 1\n 10%|#\r 20%|##\rNCCL error\n")
    nodes[1].run(f"touch -d '-5 minutes' {LOGS}/rank_3.log")
    where = fleet(nodes)

    def found(*words: str) -> list[tuple[str, list[int | None]]]:
        return groups(tool("tail", where, PATTERN, "-n", "1", "--format", "json", *words))

    assert found() == [("stopped", [3]), ("lines", [2]), ("lines", [0, 1])]
    assert found("--newer", "2m") == [("lines", [2]), ("lines", [0, 1])]
    done = tool("tail", where, PATTERN, "--grep", r"step 1\d", "--format", "json", "-n", "1")
    rest = done.document["groups"][2]
    assert [(file["rank"], file["matches"]) for file in rest["files"]] == [(0, 10), (1, 10)]
    assert rest["lines"][0].endswith("step 19")


def test_what_is_no_log_is_named_and_costs_itself_alone(fresh_nodes, fleet, tool):
    """A FIFO, a directory, a device, a huge file, no permission, no file, no node."""
    odd, none, away = nodes = fresh_nodes(3)
    job([odd])
    odd.run(
        f"cd {LOGS}; chmod a+rx . ; mkfifo rank_10.log; mkdir rank_11.log;"
        "mknod rank_12.log c 1 5; truncate -s 1G rank_13.log;"
        "echo end >>rank_13.log; chmod 0 rank_1.log;"
        "ln -s rank_14.log rank_14.log; ln -s rank_0.log rank_0.log.gz; ln -s nowhere rank_15.log;"
        "head -c 100000 /dev/urandom >rank_16.log; printf 'a\\033[2J\\n' >$'rank_\\n17.log';"
        "tr '\\0' x </dev/zero | head -c 3000000 >rank_18.log"
    )
    away.stop_sshd()
    where = fleet(nodes, {node.name: {"ssh_user": "ml"} for node in nodes})
    done = tool("tail", where, PATTERN, "-n", "2", "--format", "json", status=4)
    made = done.document
    assert [gap["node"] for gap in made["gaps"]] == [away.name]
    why = {
        file["path"].removeprefix(f"{LOGS}/rank_"): (group["kind"], group["why"], group["lines"])
        for group in made["groups"]
        for file in group["files"]
    }
    assert why == {
        "0.log": ("lines", "", why["0.log"][2]),
        "1.log": ("unreadable", "permission denied", []),
        "10.log": ("skipped", "is a FIFO", []),
        "11.log": ("skipped", "is a directory", []),
        "12.log": ("skipped", "is a device", []),
        "13.log": ("lines", "", ["end"]),
        "14.log": ("unreadable", "too many levels of symbolic links", []),
        "16.log": ("skipped", "is no text", []),
        "\\x0a17.log": ("lines", "", ["a\\x1b[2J"]),
        "18.log": ("lines", "", ["x" * 2000 + "..."]),
    }
    assert [g["nodes"] for g in made["groups"] if g["kind"] == "no-file"] == [[none.name]]
    assert "\x1b" not in tool("tail", where, PATTERN).out
    tool("tail", where, PATTERN, "--limit", f"{odd.name},{none.name}", status=3)


@pytest.mark.nightly
def test_a_mount_that_hangs_costs_its_own_files(fresh_node, fleet, tool):
    job([fresh_node])
    dead_mount(fresh_node)
    fresh_node.run(f"ln -s '{NAS}/rank_2.log' {LOGS}/rank_2.log")
    where = fleet([fresh_node])
    # The second time, the first one's process is found, and no other is sent after it.
    for _look in range(2):
        done = tool("tail", where, PATTERN, "--format", "json", status=3)
        assert groups(done) == [("unreadable", [2]), ("lines", [0, 1])]
        assert f"the mount {NAS} (nas:/export, fuse.sshfs) does not answer" in done.out
        assert len(hanging(fresh_node)) == 1
    deep = tool("tail", where, "/mnt/**/*.log", status=3)
    assert "does not answer" in deep.out
    fresh_node.run(END_MOUNT, check=False)
    wait_for(lambda: not hanging(fresh_node))


def test_a_slow_expression_costs_its_file_and_an_interrupt_ends_all(fresh_nodes, fleet, tool):
    nodes = fresh_nodes(2)
    job(nodes)
    nodes[0].write(f"{LOGS}/rank_1.log", "a" * 60 + "\n")
    where = fleet(nodes)
    slow = ("tail", where, PATTERN, "--grep", "(a+)+b|step", "--format", "json")
    done = tool(*slow, status=3)
    assert groups(done) == [("unreadable", [1]), ("lines", [0, 2, 3])]
    assert "--grep takes longer than 4 s on its lines" in done.out

    started = tool.start(*slow)
    wait_for(lambda: bool(hanging(nodes[0])) and not hanging(nodes[1]))
    started.send_signal(signal.SIGINT)
    ended = tool.end(started, status=130)
    assert "partial" in ended.err
    for node in nodes:
        wait_for(lambda node=node: not ours(node) and not hanging(node))


def test_the_home_is_that_of_the_login_with_sudo_too(fresh_node, fleet, tool):
    fresh_node.run("su ml -c 'mkdir -p ~/logs/a && echo mine >~/logs/a/rank_0.log'")
    fresh_node.run("mkdir /root/logs; echo roots >/root/logs/b.log")
    fresh_node.write("/etc/sudoers.d/ml", "ml ALL=(ALL) NOPASSWD: ALL\n", mode=0o440)
    where = fleet([fresh_node], {fresh_node.name: {"ssh_user": "ml"}})
    for more in ((), ("--sudo",)):
        done = tool("tail", where, "~/logs/**/*.log", *more)
        assert (done.status, "| mine" in done.out) == (0, True), done
        assert f"{fresh_node.name}:/home/ml/logs/a/rank_0.log" in done.out
    shut = tool("tail", where, "/root/logs/*.log")
    assert (shut.status, "permission denied" in shut.out) == (3, True), shut
    assert "| roots" in tool("tail", where, "/root/logs/*.log", "--sudo").out


def test_this_machine_alone(tool, tmp_path):
    (tmp_path / "rank_1.log").write_text("one\ntwo\n")
    done = tool("tail", "--local", f"{tmp_path}/*.log", "-n", "1", status=0)
    place = f"{done.out.split()[3]}:{tmp_path}/rank_1.log"
    assert [row.strip() for row in done.out.splitlines()][1:3] == [place, "| two"]
    ranks = [f"{rank}: step {step}" for step in range(9) for rank in (2, 0, 1)]
    (tmp_path / "slurm.out").write_text("\n".join([*ranks, "1: error"]))
    mixed = ("tail", "--local", f"{tmp_path}/slurm.out", "-n", "1", "--format", "json")
    assert groups(tool(*mixed)) == [("lines", [1]), ("lines", [0, 2])]
    assert groups(tool(*mixed, "--rank", "2", "--grep", "step")) == [("lines", [2])]
    file = tmp_path / "report"
    assert tool("tail", "--local", f"{tmp_path}/*.log", "-o", file).out == ""
    assert "| two" in file.read_text()


@pytest.mark.nightly
def test_the_ranks_of_a_real_step_of_slurm(slurm_lab, fleet, tool):
    node = slurm_lab.nodes[0]
    script = (
        "for step in 1 2 3 4; do echo training step $step; sleep 0.2;"
        " test $SLURM_PROCID$step != 22 || exit 1; done"
    )
    node.run(
        f"srun -N2 -n4 --overcommit --label sh -c '{script}' >/tmp/train.out 2>&1", check=False
    )
    done = tool("tail", fleet([node]), "/tmp/train.out", "-n", "1", "--format", "json")
    assert (done.status, groups(done)[1:]) == (0, [("lines", [2]), ("lines", [0, 1, 3])]), done
    (group, *_) = done.document["groups"]
    assert (group["files"][0]["rank"], "task 2: Exited" in group["lines"][0]) == (None, True)
