"""Which processes are ranks: trees of processes as launchers, schedulers and people make them.

A process is a text: PID PARENT COMMAND | FACT | ...; a fact is a variable of its environment, or
one of `FACTS` with its words.
"""

import re
from dataclasses import replace

import pytest

from nodeready.agent.stacks.processes import ScannedProcess, slurm_job
from nodeready.agent.stacks.ranks import (
    LAUNCHER,
    MAX_STRANGERS,
    Selection,
    Turns,
    busiest_pythons,
    claimed_job,
    launchers,
    program,
    select,
    with_parts,
    with_ray_jobs,
)
from tests.cases import cases, with_table

OWN = 9
ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def torch(rank, size="8"):
    local = str(int(rank) % 8)
    return {"environment": {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, **ADDRESS}}


def lightning(local, size, node):
    """As lightning/fabric/strategies/launchers/subprocess_script.py gives them."""
    ranks = {"LOCAL_RANK": local, "NODE_RANK": node, "WORLD_SIZE": size}
    return {"environment": {**ranks, **ADDRESS}}


def step(task, size="2", number="0", job="88"):
    values = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": number, "SLURM_PROCID": task}
    return {"environment": {**values, "SLURM_STEP_NUM_TASKS": size}}


def ompi(rank, size="4"):
    return {"environment": {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size}}


FACTS = {
    **{"torch": torch, "lightning": lightning, "step": step, "ompi": ompi},
    "cpu": lambda seconds: {"cpu_s": float(seconds)},
    "uid": lambda uid: {"uid": int(uid)},
    "cgroup": lambda job: {"cgroup_job": job},
    "start": lambda seconds: {"start_s": float(seconds)},
    # The leader of its group or session has ended.
    "lost": lambda leader: {"lost_leader": int(leader)},
    "forked": lambda: {"is_forked": True},
    # A Python that has written over its command line.
    "titled": lambda: {"program": "python3.11"},
}


def process(text: str) -> ScannedProcess:
    head, *facts = text.split(" | ")
    pid, parent, command = head.split(" ", 2)
    name = command.split(" ", 1)[0]
    environment: dict[str, str] = {}
    fields: dict[str, object] = {}
    for kind, *words in (fact.split(" ") for fact in facts):
        if variable := re.fullmatch(r"([A-Z_]+)=(.*)", kind):
            environment[variable[1]] = variable[2]
        elif kind != "hangs":
            fact = FACTS[kind](*words)
            environment |= fact.pop("environment", {})
            fields |= fact
    hangs = "hangs" in facts
    executable = "python3.11" if re.match(r"python|torchrun", name) else name
    known = None if hangs else environment
    made = ScannedProcess(
        int(pid), int(parent), name, 1.0, 1.0, command, executable, known, "", hangs
    )
    return replace(made, **fields)


def processes(*texts: str) -> list[ScannedProcess]:
    return [process(text) for text in texts]


@pytest.mark.parametrize("case", cases(__file__, "cases/ranks.json"))
def test_ranks_of_a_tree_of_processes(case):
    rows = processes(*case["processes"])
    for order in (rows, rows[::-1]):
        ranks = select(
            order, Selection(match=case.get("match", "")), OWN,
            computes=lambda above, child: [above.pid, child.pid] in case.get("computes", ()),
        )  # fmt: skip
        assert [[rank.process.pid, rank.identity.rank] for rank in ranks] == case["ranks"]


TWO = ["10 1 python t.py | torch 0", "11 1 python t.py | torch 1"]


@with_table("rows, found")
def test_what_an_ended_rank_has_left_is_no_rank(rows, found):
    ranks = select(processes(*TWO, *rows), Selection(), OWN)
    assert tuple((r.process.pid, r.note.partition(",")[0]) for r in ranks[2:]) == found


def test_all_ranks_that_an_ended_launcher_has_left_are_ranks():
    rows = [f"{row} | lost 9 | forked | start {number}" for number, row in enumerate(TWO)]
    assert [rank.note for rank in select(processes(*rows), Selection(), OWN)] == ["", ""]


JOBS = processes(
    "10 1 python train.py | torch 0 | step 0",
    "11 1 python train.py | torch 1 | TORCHELASTIC_RUN_ID=exp7 | MASTER_ADDR=b",
    "12 1 python serve.py --port 1",
    "13 12 python worker",
    "14 1 python train.py | cgroup 91",
)


@with_table("selection, pids")
def test_selected_processes(selection, pids):
    ranks = select(JOBS, Selection(**selection), OWN)
    found = {rank.process.pid: rank.identity for rank in ranks}
    assert sorted(found) == list(pids)
    if one := found.get(11):
        numbers = (one.rank, one.local_rank, one.world_size)
        assert "match" in selection or (numbers, one.job, one.master) == (
            (1, 1, 8),
            "exp7",
            "b:29500",
        )


RENDEZVOUS = processes(
    "21 1 bash -c torchrun train.py | step 3",
    "22 21 python /usr/bin/torchrun --nnodes=4 --rdzv-id=exp7 train.py | step 3",
    "30 1 python -m torch.distributed.run --nnodes 1:2 t.py",
    "40 1 mpirun -np 2 ./a.out",
    "50 1 python /usr/bin/deepspeed t.py",
    "51 50 python -m deepspeed.launcher.launch t.py",
)


@with_table("selection, pids")
def test_launchers_whose_ranks_have_not_begun(selection, pids):
    selection = Selection(**selection)
    ranks = launchers(RENDEZVOUS, selection, OWN)
    assert [rank.process.pid for rank in ranks] == list(pids)
    notes = [rank.note for rank in ranks if rank.process.pid == 22]
    assert notes == [f"{LAUNCHER}: it is to run on 4 nodes"] * len(notes)
    assert select(RENDEZVOUS, selection, OWN) == []


@pytest.mark.parametrize("launcher", ["accelerate launch", "accelerate-launch"])
def test_a_training_alone_below_accelerate_is_shown_in_place_of_the_launcher(launcher):
    """accelerate gives no number to a single process (simple_launcher of its commands/launch)."""
    rows = processes(
        f"60 1 python /usr/bin/{launcher} t.py",
        "61 60 python t.py",
        "62 61 python t.py",
        "63 60 python -c from multiprocessing.resource_tracker import main;main(5)",
    )
    (rank,) = launchers(rows, Selection(), OWN)
    assert (rank.process.pid, rank.note, rank.identity.rank) == (61, "", None)


RAY = "/opt/lib/python3.11/site-packages/ray"


def on_ray(*above: str, services: int, fact: str = "") -> list[ScannedProcess]:
    """The processes of a node of Ray's, as Ray 2.60 starts them; `services` starts them."""
    tree = [
        f"20 {services} {RAY}/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray",
        f"21 {services} python -u {RAY}/autoscaler/_private/monitor.py",
        f"22 {services} python {RAY}/dashboard/dashboard.py --host=127.0.0.1",
        f"23 {services} python -u {RAY}/_private/log_monitor.py",
        f"24 {services} {RAY}/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/s",
    ]
    actors = ["DashboardAgent", "IDLE", "TrainController.run", "RayTrainWorker"]
    actors += ["RayTrainWorker.execute"]
    tree += [f"{30 + n} 24 ray::{name} | RAY_JOB_ID=01000000" for n, name in enumerate(actors)]
    # A loader's worker of 33.
    tree += ["35 33 ray::RayTrainWorker | RAY_JOB_ID=01000000"]
    return processes(*above, *(f"{row} | {fact}" if fact else row for row in tree))


def test_a_worker_that_ray_has_started_before_its_job_is_in_the_only_job_of_its_user():
    early = "ray::Rollout | RAY_JOB_ID=ffffffff"
    rows = ["30 24 ray::Rollout | RAY_JOB_ID=01000000", f"31 24 {early}", f"32 24 {early} | uid 7"]
    for further, job in (([], "01000000"), (["33 24 ray::A | RAY_JOB_ID=02000000"], "ffffffff")):
        made = {p.pid: (p.environment or {})["RAY_JOB_ID"]
                for p in with_ray_jobs(processes(*rows, *further))}  # fmt: skip
        assert (made[30], made[31], made[32]) == ("01000000", job, "ffffffff")


DRIVER = "10 1 python driver.py"
RAY_START = "19 9000 python /usr/bin/ray start --block --head | step 0"
SLURM_RAY = on_ray("9000 1 slurmstepd: [88.0]", RAY_START, services=19, fact="step 0")


@pytest.mark.parametrize(("rows", "selection", "job"), [
    (on_ray(DRIVER, services=10), Selection(), "01000000"),
    (on_ray(DRIVER, services=1), Selection(job="01000000"), "01000000"),
    # srun has numbered the nodes, and the driver's own step.
    (SLURM_RAY, Selection(), "88"),
    (SLURM_RAY, Selection(job="01000000"), "88"),
    ([*SLURM_RAY, process("12 1 python driver.py | step 0 2 1")], Selection(), "88"),
    (on_ray(f"{DRIVER} | ompi 0", services=10, fact="ompi 0"), Selection(), "01000000"),
])  # fmt: skip
def test_workers_of_ray_train(rows, selection, job):
    beside = processes("60 1 python train.py | torch 0", "61 1 python train.py | torch 1")
    ranks = select([*beside, *rows], selection, OWN)
    found = [(rank.process.pid, rank.identity.rank, rank.identity.job) for rank in ranks]
    # A job beside it keeps its ranks.
    own = [] if selection.job else [(60, 0, "a:29500"), (61, 1, "a:29500")]
    assert found == [*own, (33, None, job), (34, None, job)]


def test_an_actor_of_rays_that_has_been_given_a_number_is_a_rank():
    """As verl does, by the environment of each actor."""
    rows = on_ray(DRIVER, services=10, fact="step 0")
    own = (f"{40 + rank} 24 ray::WorkerDict.update | step 0 | torch {rank} 2" for rank in (0, 1))
    rows += processes(*own)
    ranks = select([row for row in rows if "TrainWorker" not in row.command], Selection(), OWN)
    assert [(rank.process.pid, rank.identity.rank) for rank in ranks] == [(40, 0), (41, 1)]


@with_table("executable, command, name")
def test_the_program_of_a_process(executable, command, name):
    assert program(ScannedProcess(1, 0, "x", command=command, program=executable)) == name


def test_the_busiest_are_offered_where_there_is_no_rank():
    many = processes(*(f"{100 + n} 1 python {n}.py | cpu {n}" for n in range(30)))
    others = processes("50 1 bash | cpu 1000", f"{OWN} 1 python x | cpu 1000")
    assert [row.pid for row in busiest_pythons([*many, *others], OWN)] == list(range(129, 119, -1))


def test_a_heterogeneous_job_has_the_ranks_of_all_its_parts():
    rows = processes("30 1 train | step 0 | cgroup 3", "31 1 train | step 1 | cgroup 4")
    for parts, numbers in ((("4",), [0, 1]), ((), [0])):
        ranks = select(with_parts(rows, "3", parts), Selection(job="3"), OWN)
        assert [rank.identity.rank for rank in ranks] == numbers
        assert {rank.identity.owner for rank in ranks} == {"job 3"}


def test_what_another_user_claims_decides_nothing_about_a_jobs_ranks():
    # Ranks in C++ of a step of Slurm's; a Python of another user's says the same of itself.
    own = processes(*(f"{30 + n} 1 train | step {n} | uid 7 | cgroup 88" for n in (0, 1)))
    claims = "SLURM_JOB_ID=88 | uid 4001"
    rows = (f"{50 + n} 1 python train.py | torch {n % 2} 2 | {claims}" for n in range(200))
    fakes = processes(*rows)
    ranks = select([*fakes, *own], Selection(job="88"), OWN)
    first = [(rank.process.pid, rank.identity.rank, rank.stranger) for rank in ranks[:2]]
    assert first == [(30, 0, False), (31, 1, False)]
    assert len(ranks) == 2 + MAX_STRANGERS
    assert all(rank.stranger and "is another user's" in rank.note for rank in ranks[2:])
    owned = select(fakes + own, Selection(uid=7), OWN)
    assert [rank.process.pid for rank in owned] == [30, 31]
    plain = [replace(row, cgroup_job="") for row in own]
    # Slurm tells whose it is; the ids of that user's containers, and root's, are the job's.
    inside = processes("70 1 python train.py | torch 2 4 | SLURM_JOB_ID=88 | uid 100000")
    inside = [replace(inside[0], main_uid=7), replace(inside[0], pid=71, uid=0, main_uid=0)]
    ranks = select([*fakes, *plain, *inside], Selection(job="88", owner=7), OWN)
    assert {rank.process.pid for rank in ranks if not rank.stranger} == {30, 31, 70, 71}
    assert len(ranks) == 4 + MAX_STRANGERS
    # Neither are the ranks of another user's own job that has the number as torchrun's run id.
    run = processes(
        "90 1 python train.py | torch 3 4 | TORCHELASTIC_RUN_ID=88 | uid 8 | cgroup 99"
    )
    for owner, is_stranger in ((7, True), (8, False)):
        ranks = select([*plain, *run], Selection(job="88", owner=owner), OWN)
        assert {rank.stranger for rank in ranks if rank.process.pid == 90} == {is_stranger}
    # Where Slurm does not run the job, there are only claims, whosever they are.
    ranks = select([*own, *fakes], Selection(job="88", owner=7, is_elsewhere=True), OWN)
    assert len(ranks) == MAX_STRANGERS
    assert {claimed_job(rank.note) for rank in ranks if rank.stranger} == {"88"}
    # Without Slurm's word nobody can tell: all are looked at, and the owners take turns.
    ranks = select([*fakes, *plain], Selection(job="88"), OWN)
    turns = Turns(ranks, limit_s=100)
    looks = []
    while taken := turns.take():
        looks.append(ranks[taken[0]].process.uid)
        turns.give_back(taken[1], 10 if looks[-1] == 4001 else 1)
    # One look of hers is as long as ten of the job's.
    assert looks[:3] in ([7, 4001, 7], [4001, 7, 7])
    assert (looks.count(7), looks.count(4001)) == (len(plain), 10)


#: What a user can name below the login's own cgroups is none of Slurm's.
USERS = "0::/user.slice/user-4001.slice/user@4001.service"


@with_table("text, job")
def test_only_slurms_own_cgroups_tell_the_job(text, job):
    assert slurm_job(text) == job
