"""What the ranks of a slow job do: steps of work, each of which ends in a collective.

`plan.json` (`tests/hang/slow_jobs.py`) says how long a step's work takes, which rank takes longer,
by what, and when. An act for `acts.py`: a training's code, by a user's names.
"""

import itertools
import mmap
import os
import random
import select
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from plans import plan
from talks import clients, connect, listen, rank, world
from torch.utils.data import DataLoader, Dataset

#: Bytes that a step reads of its shard; a page.
_CHUNK, _PAGE = 1 << 18, 4096


class Job:
    def __init__(self):
        self.plan = plan()
        self.draw = random.Random(f"{self.plan['seed']}-{rank()}")
        self.is_slow = rank() == self.plan["slow"]
        self.reduce = {"gloo": self.over_gloo, "star": self.over_star, "ring": self.over_ring}[
            self.plan["way"]
        ]()
        self.kind = self.plan["kind"]
        if self.kind == "loader":
            self.batches = iter(DataLoader(Shard(self), num_workers=1, prefetch_factor=1))
        if self.kind == "storage":
            self.shard = os.open(f"shard-{rank()}", os.O_RDONLY | os.O_DIRECT)
            self.buffer = mmap.mmap(-1, _CHUNK)

    def seconds(self):
        """How long this step's work takes on this rank."""
        seconds = self.plan["step_s"] * self.draw.lognormvariate(0, self.plan["jitter"])
        begin, end, cycle = self.plan["passing"]
        is_now = not cycle or begin <= (time.time() - self.plan["began"]) % cycle < end
        return seconds * (self.plan["factor"] if self.is_slow and is_now else 1)

    # --- The work of a step.

    def work(self, step):
        getattr(self, self.kind)()
        if self.plan["logs"] and rank() == 0 and step % 10 == 0:
            log_metrics(step)

    def forward(self):
        time.sleep(self.seconds())

    def burn(self):
        """A part of the step takes CPU time; of the slow rank more."""
        seconds = self.seconds()
        extra_s = max(0.0, seconds - self.plan["step_s"]) if self.is_slow else 0.0
        time.sleep(seconds - extra_s)
        spend(0.01 + extra_s)

    def throttled(self):
        """Its cgroup is throttled by the test."""
        time.sleep(self.plan["step_s"])
        spend(self.plan["burn_s"])

    def loader(self):
        next(self.batches)

    def storage(self):
        """Reads of the slow rank are throttled by the test."""
        time.sleep(self.plan["step_s"])
        self.read_shard()

    def read_shard(self):
        os.preadv(self.shard, [self.buffer], self.draw.randrange(256) * _CHUNK)

    def network(self):
        time.sleep(self.plan["step_s"])

    # --- The collectives.

    def over_gloo(self):
        dist.init_process_group("gloo", timeout=timedelta(hours=1))
        gradients = torch.ones(1000)

        def all_reduce():
            dist.all_reduce(gradients)

        return all_reduce

    def over_star(self):
        gradients = b"x" * self.plan["bytes"]
        if rank() == 0:
            others = clients(listen())

            def gather():
                left = dict.fromkeys(others.values(), len(gradients))
                while left:
                    for connection in select.select(list(left), [], [])[0]:
                        left[connection] -= len(connection.recv(min(left[connection], 1 << 16)))
                        if not left[connection]:
                            del left[connection]
                for connection in others.values():
                    connection.sendall(gradients)

            return gather
        connection = connect(0)
        if self.plan["kind"] == "network" and self.is_slow:
            # The class of the traffic shaper that the test has made.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 0x00010040)

        def exchange():
            connection.sendall(gradients)
            receive(connection, len(gradients))

        return exchange

    def over_ring(self):
        """Twice around, as all ranks have to have heard of all."""
        gradients = b"x" * self.plan["bytes"]
        server = listen()
        after = connect((rank() + 1) % world())
        (before,) = clients(server, 1).values()

        def pass_on():
            for _ in range(2):
                if rank() == 0:
                    after.sendall(gradients)
                    receive(before, len(gradients))
                else:
                    receive(before, len(gradients))
                    after.sendall(gradients)

        return pass_on


class Shard(Dataset):
    def __init__(self, job):
        self.job = job

    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        time.sleep(self.job.seconds())
        return float(index)


def log_metrics(step):
    print(f"step {step}: loss 0.5", flush=True)


def spend(seconds):
    until = time.thread_time() + seconds
    values = list(range(200))
    while time.thread_time() < until:
        sorted(value * 7919 % 1000 for value in values)


def receive(connection, count):
    while count:
        count -= len(connection.recv(min(count, 1 << 16)))


def steps():
    job = Job()
    worked_s = 0.0
    for step in itertools.count(1):
        began = time.monotonic()
        job.work(step)
        worked_s += time.monotonic() - began
        with open(f"work-{rank()}", "w") as file:
            file.write(f"{worked_s / step}")
        job.reduce()
        yield step
