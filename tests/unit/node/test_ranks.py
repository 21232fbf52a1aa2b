"""Which processes are ranks: trees of processes as launchers, schedulers and people make them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nodeready.node.stacks.processes import Process, slurm_job
from nodeready.node.stacks.ranks import (
    LAUNCHER,
    MOST_STRANGERS,
    Selection,
    Turns,
    instead,
    launchers,
    program,
    select,
)

OWN = 9


def process(
    pid, parent=1, command="python train.py", *, cpu_s=1.0, cgroup="", hangs=False, **values
):
    """values: of its environment."""
    words = command.split()
    name = "python3.11" if re.match(r"python|torchrun", words[0]) else words[0]
    return Process(
        pid, parent, words[0], 1.0, cpu_s, command, name, None if hangs else values, cgroup, hangs
    )


def torch(rank, size=8, **more):
    values = {"RANK": rank, "LOCAL_RANK": rank % 8, "WORLD_SIZE": size, "MASTER_ADDR": "a"}
    return {k: str(v) for k, v in {**values, "MASTER_PORT": 29500, **more}.items()}


def step(task, job=88, number=0, size=2):
    values = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": number, "SLURM_PROCID": task}
    return {k: str(v) for k, v in {**values, "SLURM_STEP_NUM_TASKS": size}.items()}


def ompi(rank, size=4):
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}


def lightning(local, size, node=0):
    """As lightning/fabric/strategies/launchers/subprocess_script.py gives them."""
    values = {"LOCAL_RANK": local, "NODE_RANK": node, "WORLD_SIZE": size, "MASTER_ADDR": "a"}
    return {k: str(v) for k, v in {**values, "MASTER_PORT": 29500}.items()}


PLAIN = [process(10, **torch(0)), process(11, **torch(1))]
TORCHRUN = [
    process(10, command="python -m torch.distributed.run train.py"),
    process(11, 10, **torch(0, TORCHELASTIC_RUN_ID="none")),
    process(12, 10, **torch(1, TORCHELASTIC_RUN_ID="none")),
    process(13, 11, "python loader", **torch(0, TORCHELASTIC_RUN_ID="none")),
    process(14, 13, "python loader", **torch(0, TORCHELASTIC_RUN_ID="none")),
]
SRUN_TORCHRUN = [
    process(20, command="slurmstepd: [88.0]"),
    process(21, 20, "bash -c torchrun train.py", **step(3)),
    process(22, 21, "torchrun train.py", **step(3)),
    process(23, 22, **torch(24, 32, **step(3))),
    process(24, 22, **torch(25, 32, **step(3))),
]

GOOD = {
    "ranks side by side": (PLAIN, [(10, 0), (11, 1)]),
    "loaders of loaders inherit RANK": (TORCHRUN, [(11, 0), (12, 1)]),
    "torchrun in a step of Slurm": (SRUN_TORCHRUN, [(23, 24), (24, 25)]),
    "torchrun with one rank, whose number is the step's": (
        [*SRUN_TORCHRUN[:3], process(23, 22, **torch(3, 4, **step(3)))],
        [(23, 3)],
    ),
    "a launcher nobody knows, in a step of Slurm": (
        [
            process(22, command="python launch.py", **step(1)),
            process(23, 22, **torch(8, 16, **step(1))),
            process(24, 22, **torch(9, 16, **step(1))),
        ],
        [(23, 8), (24, 9)],
    ),
    "torchrun in a pod that has a RANK of its own, the same as a rank's": (
        [
            process(10, command="torchrun t.py", **torch(0, 2)),
            *[process(11 + rank, 10, **torch(rank, 16)) for rank in range(3)],
        ],
        [(11, 0), (12, 1), (13, 2)],
    ),
    "tasks of Slurm; the batch script has rank 0, too": (
        [
            process(30, command="slurm_script", SLURM_JOB_ID="88", SLURM_PROCID="0"),
            process(31, 30, "srun python t.py", SLURM_JOB_ID="88", SLURM_PROCID="0"),
            process(32, 1, **step(0)),
            process(33, 1, **step(1)),
        ],
        [(32, 0), (33, 1)],
    ),
    "a rank that exports RANK by itself has workers with the same": (
        [process(40, **step(3)), process(41, 40, "python w", **torch(3, **step(3)))],
        [(40, 3)],
    ),
    "a rank that sets all by itself": (
        [process(40), process(41, 40, **torch(3)), process(42, 40, **torch(3))],
        [(40, 3)],
    ),
    "mpirun's daemons in a step of Slurm": (
        [
            process(50, command="orted --daemonize", **step(1)),
            process(51, 50, "./solver", **ompi(2), **step(1)),
            process(52, 50, "./solver", **ompi(3), **step(1)),
        ],
        [(51, 2), (52, 3)],
    ),
    "Lightning's own launcher": (
        [process(10), *[process(10 + n, 10, **lightning(n, 4)) for n in (1, 2, 3)]],
        [(10, 0), (11, 1), (12, 2), (13, 3)],
    ),
    "Lightning on its second node, where a rank has died": (
        [process(10), *[process(10 + n, 10, **lightning(n, 8, node=1)) for n in (1, 2)]],
        [(10, 4), (11, 5), (12, 6)],
    ),
    "Lightning with loaders' workers, forked and spawned": (
        [
            process(10),
            process(11, 10, **lightning(1, 2)),
            process(12, 10, "python train.py"),
            process(13, 10, "python -c from multiprocessing.spawn import x", **lightning(0, 2)),
            process(14, 11, "python train.py", **lightning(1, 2)),
        ],
        [(10, 0), (11, 1)],
    ),
    "a script that starts Lightning's ranks itself": (
        [process(9 + 1), *[process(11 + n, 10, **lightning(n, 2)) for n in (0, 1)]],
        [(11, 0), (12, 1)],
    ),
    "a shell that starts Lightning's ranks": (
        [process(10, 1, "bash x.sh"), *[process(11 + n, 10, **lightning(n, 2)) for n in (0, 1)]],
        [(11, 0), (12, 1)],
    ),
    "Slurm's tasks that have Lightning's variables, too": (
        [process(10 + n, **step(n + 2, size=4), **lightning(n, 4, node=1)) for n in (0, 1)],
        [(10, 2), (11, 3)],
    ),
    "Lightning in a shell of Slurm's": (
        [
            process(10, **step(0, size=1)),
            *[process(10 + n, 10, **step(0, size=1), **lightning(n, 3)) for n in (1, 2)],
        ],
        [(10, 0), (11, 1), (12, 2)],
    ),
    "a shell around Python": (
        [
            process(60, command="bash -c python t.py; date", **torch(5)),
            process(61, 60, "timeout 9 python t.py", **torch(5)),
            process(62, 61, **torch(5)),
            process(63, 62, "python loader", **torch(5)),
        ],
        [(62, 5)],
    ),
    "a shell around a Python and its monitor": (
        [
            process(60, command="bash run.sh", **torch(5)),
            process(61, 60, "python monitor.py", cpu_s=0.5, **torch(5)),
            process(62, 60, cpu_s=500.0, **torch(5)),
        ],
        [(62, 5)],
    ),
    "a shell around what is no Python": (
        [process(60, command="sh -c ./a.out", **torch(5)), process(61, 60, "./a.out", **torch(5))],
        [(61, 5)],
    ),
    "no Python at all": ([process(60, command="sleep 600", **torch(5))], [(60, 5)]),
    "a person's shell in a step of its own": (
        [process(70, **step(0)), process(71, command="-bash", **step(0, number=1))],
        [(70, 0)],
    ),
    "what a person runs beside the ranks, in steps of its own": (
        [
            process(70, **step(5)),
            process(71, command="-bash", **step(0, number=1)),
            process(72, command="nvidia-smi", **step(1, number=2)),
            process(73, command="./solver", **step(0, job=89)),
        ],
        [(73, 0), (70, 5)],
    ),
    "two jobs": (
        [process(80, **torch(0)), process(81, **torch(0, MASTER_PORT=29501))],
        [(80, 0), (81, 0)],
    ),
    "we ourselves, in a step of the same job": (
        [
            process(70, **step(0)),
            process(8, command="sh -c", **step(0, number=2)),
            process(OWN, 8, "python -c x", **step(0, number=2)),
            process(99, OWN, "python -c y", **step(0, number=2)),
            process(98, 1, "python3 -c import zlib;MAIN='nodeready.x'", **step(1, number=2)),
        ],
        [(70, 0)],
    ),
    "beside ranks, one that hangs in the kernel": (
        [*TORCHRUN, process(15, 10, hangs=True), process(16, 1, hangs=True)],
        [(11, 0), (12, 1), (15, None)],
    ),
    # Nothing to do.
    "none": ([process(10), process(11, command="bash")], []),
    "nothing runs": ([], []),
    "a launcher whose ranks have not begun": ([process(22, 1, "torchrun t.py", **step(3))], []),
    "a shell around a launcher": (SRUN_TORCHRUN[1:3], []),
    # Malformed and hostile.
    "values that are no numbers": (
        [process(10 + n, RANK=value) for n, value in enumerate(["", "x", "-1", "1" * 99, "٣"])],
        [],
    ),
    "processes that are their own ancestors": (
        [process(10, 11, **torch(0)), process(11, 10, **torch(1))],
        [],
    ),
    "a process that is its own parent": ([process(10, 10, **torch(0))], [(10, 0)]),
}


@pytest.mark.parametrize("name", GOOD)
def test_ranks(name):
    processes, expected = GOOD[name]
    for order in (processes, processes[::-1]):
        found = select(order, Selection(), OWN)
        assert [(rank.process.pid, rank.identity.rank) for rank in found] == expected


JOBS = [
    process(10, **torch(0, **step(0))),
    process(11, **torch(1, TORCHELASTIC_RUN_ID="exp7", MASTER_ADDR="b")),
    process(12, 1, "python serve.py --port 1"),
    process(13, 12, "python worker"),
    process(14, cgroup="91"),
]


@pytest.mark.parametrize(
    ("selection", "pids"),
    [
        (Selection(), [10, 11]),
        (Selection(job="88"), [10]),
        (Selection(job="exp7"), [11]),
        (Selection(job="a:29500"), [10]),
        (Selection(job="b:29500"), [11]),
        (Selection(job="8"), []),
        (Selection(job="none"), []),
        # A program may write its title over its environment: then its cgroup tells.
        (Selection(job="91"), [14]),
        (Selection(match=r"serve\.py"), [12]),
        (Selection(match="^python"), [10, 11, 12, 14]),
        (Selection(match="train", job="88"), [10]),
        (Selection(match="nothing"), []),
        (Selection(pids=(13,)), [13]),
        (Selection(pids=(13, 10, 13, 999)), [10, 13]),
        (Selection(pids=(13,), job="88", match="x"), [13]),
    ],
)
def test_what_is_asked_for(selection, pids):
    assert sorted(rank.process.pid for rank in select(JOBS, selection, OWN)) == pids


RENDEZVOUS = [
    process(21, 1, "bash -c torchrun train.py", **step(3)),
    process(22, 21, "python /usr/bin/torchrun --nnodes=4 --rdzv-id=exp7 train.py", **step(3)),
    process(30, 1, "python -m torch.distributed.run --nnodes 1:2 t.py"),
    process(40, 1, "mpirun -np 2 ./a.out"),
    process(50, 1, "python /usr/bin/deepspeed t.py"),
    process(51, 50, "python -m deepspeed.launcher.launch t.py"),
]


@pytest.mark.parametrize(
    ("selection", "pids"),
    [
        (Selection(), [22, 30, 51]),
        (Selection(job="88"), [22]),
        (Selection(job="exp7"), [22]),
        (Selection(job="exp8"), []),
        (Selection(uid=7), []),
    ],
)
def test_launchers_whose_ranks_have_not_begun(selection, pids):
    found = launchers(RENDEZVOUS, selection, OWN)
    assert [rank.process.pid for rank in found] == pids
    notes = [rank.note for rank in found if rank.process.pid == 22]
    assert notes == [f"{LAUNCHER}: it is to run on 4 nodes"] * len(notes)
    assert select(RENDEZVOUS, selection, OWN) == []


@pytest.mark.parametrize(
    "command",
    ["python /usr/bin/accelerate launch t.py", "python /usr/bin/accelerate-launch t.py"],
)
def test_a_training_alone_below_accelerate_is_shown_in_place_of_the_launcher(command):
    """accelerate gives no number to a single process (simple_launcher of its commands/launch)."""
    rows = [
        process(60, 1, command),
        process(61, 60, "python t.py"),
        process(62, 61, "python t.py"),
        process(63, 60, "python -c from multiprocessing.resource_tracker import main;main(5)"),
    ]
    (found,) = launchers(rows, Selection(), OWN)
    assert (found.process.pid, found.note, found.identity.rank) == (61, "", None)


RAY = "/opt/lib/python3.11/site-packages/ray"


def on_ray(above, services, **values):
    """The processes of a node of Ray's, as Ray 2.60 starts them, below 10 and 11.

    services: who starts them; above: what else is there
    """

    def one(pid, parent, command):
        return process(pid, parent, command, **values)

    return [
        *above,
        one(20, services, f"{RAY}/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray"),
        one(21, services, f"python -u {RAY}/autoscaler/_private/monitor.py"),
        one(22, services, f"python {RAY}/dashboard/dashboard.py --host=127.0.0.1"),
        one(23, services, f"python -u {RAY}/_private/log_monitor.py"),
        one(24, services, f"{RAY}/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/s"),
        *[
            process(pid, parent, command, **{**values, "RAY_JOB_ID": "01000000"})
            for pid, parent, command in [
                (30, 24, "ray::DashboardAgent"),
                (31, 24, "ray::IDLE"),
                (32, 24, "ray::TrainController.run"),
                (33, 24, "ray::RayTrainWorker"),
                (34, 24, "ray::RayTrainWorker.execute"),
                # A loader's worker of 33.
                (35, 33, "ray::RayTrainWorker"),
            ]
        ],
    ]


RAY_START = process(19, 9000, "python /usr/bin/ray start --block --head", **step(0))
SLURM_RAY = on_ray([process(9000, 1, "slurmstepd: [88.0]"), RAY_START], 19, **step(0))


@pytest.mark.parametrize(
    ("rows", "selection", "job"),
    [
        (on_ray([process(10, 1, "python driver.py")], 10), Selection(), "01000000"),
        (on_ray([process(10, 1, "python driver.py")], 1), Selection(job="01000000"), "01000000"),
        # srun has numbered the nodes, and the driver's own step.
        (SLURM_RAY, Selection(), "88"),
        (SLURM_RAY, Selection(job="01000000"), "88"),
        ([*SLURM_RAY, process(12, 1, "python driver.py", **step(0, number=1))], Selection(), "88"),
        (on_ray([process(10, 1, "python driver.py", **ompi(0))], 10, **ompi(0)), Selection(),
         "01000000"),
    ],
)  # fmt: skip
def test_workers_of_ray_train(rows, selection, job):
    found = select(rows, selection, OWN)
    assert [(one.process.pid, one.identity.rank) for one in found] == [(33, None), (34, None)]
    assert {one.identity.job for one in found} == {job}


def test_a_job_beside_one_of_ray_train_keeps_its_ranks():
    found = select([*PLAIN, *SLURM_RAY], Selection(), OWN)
    assert [(one.process.pid, one.identity.rank, one.identity.job) for one in found] == [
        *[(10 + rank, rank, "a:29500") for rank in range(2)],
        (33, None, "88"),
        (34, None, "88"),
    ]


def test_an_actor_of_rays_that_has_been_given_a_number_is_a_rank():
    """As verl does, by the environment of each actor."""
    rows = on_ray([process(10, 1, "python driver.py")], 10, **step(0))
    rows += [
        process(40 + n, 24, "ray::WorkerDict.update", **{**step(0), **torch(n, 2)})
        for n in range(2)
    ]
    found = select([row for row in rows if "TrainWorker" not in row.command], Selection(), OWN)
    assert [(one.process.pid, one.identity.rank) for one in found] == [(40, 0), (41, 1)]


def test_a_pattern_takes_the_ranks_and_not_who_starts_them():
    found = select(SRUN_TORCHRUN, Selection(match=r"train\.py"), OWN)
    assert [rank.process.pid for rank in found] == [23, 24]


def test_who_a_rank_is():
    (found,) = select([JOBS[1]], Selection(), OWN)
    who = found.identity
    assert (who.rank, who.local_rank, who.world_size) == (1, 1, 8)
    assert (who.job, who.master) == ("exp7", "b:29500")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -u -X dev train.py --x", "train.py"),
        ("/opt/conda/bin/python3.11 -m torch.distributed.run t.py", "torch.distributed.run"),
        ("python -c import", "python"),
        ("python", "python"),
        ("python -m", "python"),
        ("/usr/bin/srun -N2 torchrun", "srun"),
        ("python train.py torchrun", "train.py"),
        ("", "x"),
    ],
)
def test_what_a_process_runs(command, name):
    exe = "python3" if command.startswith(("python", "/opt")) else ""
    assert program(Process(1, 0, "x", command=command, program=exe)) == name


def test_what_may_be_meant_instead_is_the_busiest():
    many = [process(100 + n, command=f"python {n}.py", cpu_s=n) for n in range(30)]
    shell = process(50, command="bash", cpu_s=1000)
    found = instead([*many, shell, process(OWN, cpu_s=1000)], OWN)
    assert [p.pid for p in found] == list(range(129, 119, -1))


def owned(uid, job="", **more):
    return replace(process(more.pop("pid"), **more), uid=uid, cgroup_job=job)


def test_what_another_user_claims_decides_nothing_about_a_jobs_ranks():
    # Ranks in C++ of a step of Slurm's; a Python of another user's says the same of itself.
    own = [owned(7, "88", pid=30 + n, command="train", **step(n)) for n in range(2)]
    fakes = [owned(4001, pid=50 + n, **torch(n % 2, 2, SLURM_JOB_ID="88")) for n in range(200)]
    ranks = select([*fakes, *own], Selection(job="88"), OWN)
    assert [(one.process.pid, one.identity.rank, one.stranger) for one in ranks[:2]] == [
        (30, 0, False),
        (31, 1, False),
    ]
    assert len(ranks) == 2 + MOST_STRANGERS
    assert all(one.stranger and "is another user's" in one.note for one in ranks[2:])
    assert [one.process.pid for one in select(fakes + own, Selection(uid=7), OWN)] == [30, 31]
    # Without a cgroup nobody can tell: all are looked at, and the owners take turns.
    plain = [replace(one, cgroup_job="") for one in own]
    ranks = select([*fakes, *plain], Selection(job="88"), OWN)
    turns = Turns(ranks, limit_s=100)
    looks = []
    while taken := turns.take():
        place, owner = taken
        looks.append(ranks[place].process.uid)
        turns.back(owner, 10 if looks[-1] == 4001 else 1)
    # One look of hers is as long as ten of the job's.
    assert looks[:3] in ([7, 4001, 7], [4001, 7, 7])
    assert looks.count(7) == len(plain)
    assert looks.count(4001) == 10


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_88/step_0/user/task_0\n", "88"),
        ("0::/system.slice/gpu1_slurmstepd.scope/job_88/step_batch/slurm\n", "88"),
        ("7:memory:/slurm/uid_1000/job_88/step_0/task_0\n1:name=systemd:/\n", "88"),
        ("7:freezer:/slurm_gpu1/uid_1000/job_88\n", "88"),
        ("0::/../../system.slice/slurmstepd.scope/job_88/step_0/user/task_0\n", "88"),
        # What a user can name below the login's own cgroups.
        ("0::/user.slice/user-4001.slice/user@4001.service/slurmstepd.scope/job_88/x\n", ""),
        ("0::/user.slice/user-4001.slice/user@4001.service/slurm/uid_7/job_88\n", ""),
        ("0::/job_88/x\n", ""),
        ("0::/system.slice/slurmstepd.scope/job_88x\n", ""),
        ("", ""),
    ],
)
def test_only_slurms_own_cgroups_tell_the_job(text, job):
    assert slurm_job(text) == job
