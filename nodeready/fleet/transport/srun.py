"""The transport by srun: a script runs on the nodes of a job as a step without resources.

For users who have neither ssh to the nodes nor root there, and for thousands of nodes: Slurm's own
tree distributes the step. The step overlaps with the job's steps (srun(1), --overlap) and shares
their resources. A question to all nodes is one step; an interactive script is a step on one
node, over srun's standard input and output.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import gevent
from gevent import subprocess
from gevent.queue import Empty, JoinableQueue, Queue

from nodeready.agent.asking import (
    ANSWER_BYTES,
    ERROR_BYTES,
    INTERRUPT,
    Answer,
    Conversation,
    Exchange,
    Key,
    NodeChannel,
    Outcomes,
    Request,
    ResultT,
    Transport,
    append_up_to,
    end_all,
    exchanges_of,
    late,
    new_nonce,
    node_of,
)
from nodeready.agent.local import LineChannel, as_root, sudo_error
from nodeready.agent.runtime import bug_text
from nodeready.core import shell
from nodeready.core.outcome import FAILED, LOST, OUTPUT, TIMEOUT, UNREACHABLE, Gap
from nodeready.fleet.inventory.nodeset import fold
from nodeready.fleet.transport import Note, ignore
from nodeready.fleet.transport.allocation import JobAllocation, allocate, release, unusable_nodes
from nodeready.fleet.transport.connectors import PipedProgram

#: Seconds to start a step: slurmd needs moments, and srun gives up a node that does not answer
#: after 10 s (TcpTimeout and MessageTimeout, slurm.conf(5)).
STARTING_S = 15
#: Maximum steps at once: each is a process here, and slurmctld creates one after another.
_STEPS = 8
#: Seconds to wait for more nodes with the same next question, which then share a step.
_GATHER_S = 0.3
_PATIENCE_S = 2.0  # seconds for a step to end after its input has ended
#: The environment variables that carry the input, plus an index. srun forwards its standard input
#: only when every node has begun: one that cannot would block all others until srun gives up. Only
#: the job's user and root can read the environment of its processes (proc(5)).
_INPUT = "NODEREADY_INPUT_"
#: Maximum bytes of a variable, below the 128 KiB of one string of execve(2); maximum variables,
#: which must all fit in a quarter of the stack.
_PART, _PARTS = 120 << 10, 6
OnAnswer = Callable[[str, Answer], object]  # gets each node's answer, once


class Srun(Transport):
    """The nodes of one job, asked by steps of the job.

    notify: shows the user a line when an older Slurm needs other options
    works:  the programs that `open` starts use the GPUs, CPUs and memory that the job has on the
            node, which they share with the job's steps. Without it they have no GPU, like the
            scripts of `converse`: Slurm shows a step only the devices that were given to the step
            (cgroup.conf(5), ConstrainDevices)
    sudo:   scripts run as root, by sudo without a password
    """

    one_text = True

    def __init__(
        self, job: JobAllocation, notify: Note = ignore, *, works: bool = False, sudo: bool = False
    ) -> None:
        super().__init__((*job.nodes, *job.refused))
        self.job, self.notify, self.works, self.sudo = job, notify, works, sudo
        self._overlap: tuple[str, ...] = ("--overlap",)
        self._gres: tuple[str, ...] = ("--gres=none",)

    def converse(
        self, conversations: Mapping[Key, Conversation[ResultT]], deadline: float | None = None
    ) -> Outcomes[ResultT]:
        """See Transport. Nodes with the same question share a step.

        An interrupt ends the steps, and nothing else of the job.
        """
        exchanges = exchanges_of(conversations)
        steps = _StepQueue(self)

        def settle(key: Key) -> Outcomes[ResultT]:
            if exchanges[key].is_over:
                yield key, exchanges.pop(key).outcome
            else:
                steps.wait_for(key)

        try:
            for key, exchange in list(exchanges.items()):
                exchange.start()
                if not exchange.is_over and (reason := self.job.refused.get(node_of(key))):
                    exchange.end(Answer(gap=Gap(UNREACHABLE, reason)))
                yield from settle(key)
            while exchanges:
                if answered := steps.next(exchanges, deadline):
                    exchanges[answered[0]].answer(answered[1])
                    yield from settle(answered[0])
        except Empty:
            yield from end_all(exchanges, lambda key: late())
        except KeyboardInterrupt:
            self.interrupted = True
            steps.end()
            yield from end_all(exchanges, lambda key: INTERRUPT)
        finally:
            steps.end()

    def with_same_question(self, exchanges: Mapping[Key, Exchange[ResultT]]) -> dict[str, Key]:
        """Node -> its conversation, for those with the first one's question, in Slurm's order."""
        key_of: dict[str, Key] = {}
        first: tuple[object, ...] = ()
        for key, exchange in exchanges.items():
            request = cast("Request", exchange.request)
            question = (request.script, request.payload, request.limit_s, request.max_bytes)
            first = first or question
            if question == first:
                key_of.setdefault(node_of(key), key)
        order = {name: index for index, name in enumerate(self.job.nodes)}
        return dict(sorted(key_of.items(), key=lambda item: order.get(item[0], len(order))))

    def run_step(self, request: Request, nodes: Sequence[str], on_answer: OnAnswer) -> None:
        """Ask these nodes, and wait for the answers."""
        unanswered = dict.fromkeys(nodes)

        def answer_once(name: str, answer: Answer) -> None:
            del unanswered[name]
            on_answer(name, answer)

        try:
            self._ask(request, nodes, answer_once)
        except Exception as error:  # noqa: BLE001 - our bug is the answer of these nodes
            for name in unanswered:
                on_answer(name, Answer(gap=Gap(FAILED, bug_text(error))))

    def _ask(self, request: Request, nodes: Sequence[str], on_answer: OnAnswer) -> None:
        waiting = nodes
        # If a step fails to start on one node, srun ends it on all. If Slurm has lost a node, srun
        # starts no more tasks and ends those that run. Good nodes get a second try.
        for is_last in (False, True):
            step, is_whole = self._step(request, on_answer, waiting)
            bad = dict(step.unlaunched)
            if is_whole and step.waiting and not bad:
                bad = step.lost = unusable_nodes(self.job, tuple(step.waiting))
                if bad and not request.reads:
                    began = {*step.names.values()} - bad.keys()
                    bad = {**bad, **dict.fromkeys(began, "")}
            waiting = [name for name in step.waiting if name not in bad]
            if is_last or not waiting or not bad:
                step.give_up(request.limit_s, is_whole)
                return
            for name in waiting:
                del step.waiting[name]
            step.give_up(request.limit_s, is_whole)

    def open(self, request: Request) -> NodeChannel:
        """See Transport. A step on this node, which ends with its input."""
        line, stdin = self._command(request.script, request.limit_s, request.payload)

        def start_step() -> _SrunStep:
            if reason := self.job.refused.get(request.node):
                raise ValueError(reason)
            return _SrunStep(self, request.node, line)

        return LineChannel(start_step, stdin, request.mark, sudo=self.sudo)

    def _command(self, script: str, limit_s: int, payload: str | None) -> shell.ShellCommand:
        command = shell.command(script, limit_s, self.tag, payload)
        return as_root(command, "") if self.sudo else command

    def _step(
        self, request: Request, on_answer: OnAnswer, nodes: Sequence[str]
    ) -> tuple[StepOutput, bool]:
        """A step's output, with options that this Slurm accepts; and whether srun ended itself."""
        while True:
            step = StepOutput(new_nonce(), nodes, on_answer, request.max_bytes)
            script, limit_s = step.script(request.script), request.limit_s
            command = self._command(script, limit_s, request.payload)
            argv = self._argv(command, nodes)
            is_whole = self._run(step, argv, command.stdin, limit_s)
            if step.names or not self.drop_refused_option(step, argv):
                return step, is_whole

    def drop_refused_option(self, step: StepOutput, argv: Sequence[str]) -> bool:
        """Omit an option that srun refused from the next steps; returns whether there was one."""
        if "--overlap" in argv and step.has_no_overlap:
            if self._overlap:
                # There, steps overlap unless the job's step is --exclusive.
                self.notify("srun has no --overlap (Slurm before 20.11): asking without it")
            self._overlap = ()
            return True
        if "--gres=none" in argv and step.has_no_gres:
            self._gres = ("--gres=gpu:0",)
            return True
        return False

    def _argv(self, command: shell.ShellCommand, nodes: Sequence[str]) -> list[str]:
        parts = len(_parts(command.stdin))
        return [
            *self._options(nodes), *self._gres,
            "--label", f"--input={'none' if parts else 'all'}",
            "sh", "-c", f"{_from_environment(parts)}{command.line}" if parts else command.line,
        ]  # fmt: skip

    def session_argv(self, node: str, line: str) -> list[str]:
        """The argv of an interactive step on one node that runs this line."""
        # Without --gres a step has the job's GPUs, and since 22.05 --overlap shares them. An older
        # Slurm makes it wait for the job's step: --immediate limits that wait. Without
        # --cpu-bind=none its task would have only one CPU.
        works = (f"--immediate={STARTING_S}", "--cpu-bind=none", "--mem=0")
        resources = works if self.works else self._gres
        return [*self._options([node]), *resources, "--input=0", "sh", "-c", line]

    def _options(self, nodes: Sequence[str]) -> list[str]:
        """srun, with the options of every step."""
        return [
            "srun", f"--jobid={self.job.number}", *self._overlap,
            f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
            f"--nodelist={fold(nodes)}",
            "--mpi=none", "--kill-on-bad-exit=0", "--wait=0", "--chdir=/",
        ]  # fmt: skip

    def _run(self, step: StepOutput, argv: list[str], stdin: str, limit_s: int) -> bool:
        """Run srun and give its output to the step; whether srun came to its own end."""
        program = _SrunProgram(argv, environment={**_environment(), **_parts(stdin)})

        def read_errors() -> None:
            while data := program.read_errors():
                step.add_error(data)

        text = stdin.encode("utf-8", "surrogateescape")
        helpers: list[Any] = [gevent.spawn(read_errors), gevent.spawn(program.send_input, text)]
        try:
            with gevent.Timeout(limit_s + shell.KILL_AFTER_S + STARTING_S):
                while data := program.read_output():
                    step.add(data)
                helpers[0].join()
                program.status("")
            return True
        except gevent.Timeout:
            return False
        finally:
            gevent.killall(helpers)
            program.close()


class _StepQueue:
    """The steps of one call of `Srun.converse`, and the conversations that wait for one."""

    def __init__(self, transport: Srun) -> None:
        self._transport = transport
        self._waiting: dict[Key, None] = {}
        self._since = 0.0
        # Of each running step: node that has not answered -> its conversation.
        self._steps: list[dict[str, Key]] = []
        self._greenlets: list[Any] = []
        self._answers: Queue[tuple[dict[str, Key], str, Answer]] = Queue()

    def wait_for(self, key: Key) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting[key] = None

    def next(
        self, exchanges: Mapping[Key, Exchange[Any]], deadline: float | None
    ) -> tuple[Key, Answer] | None:
        """The next answer; None: try again. Raises Empty at the deadline."""
        remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if self._waiting and len(self._steps) < _STEPS:
            # The nodes that have just answered may ask the same soon.
            gather_s = self._since + _GATHER_S - time.monotonic() if self._steps else 0.0
            if gather_s <= 0:
                self._begin(exchanges)
                return None
            remaining_s = gather_s if remaining_s is None else min(remaining_s, gather_s)
        try:
            answered_step, name, answer = self._answers.get(timeout=remaining_s)
        except Empty:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            return None
        key = answered_step.pop(name)
        self._steps = [step for step in self._steps if step]
        return key, answer

    def _begin(self, exchanges: Mapping[Key, Exchange[Any]]) -> None:
        """Start a step for the first conversation, and for all with the same question."""
        waiting = {key: exchanges[key] for key in self._waiting}
        step = self._transport.with_same_question(waiting)
        request = cast("Request", exchanges[next(iter(step.values()))].request)

        def on_answer(name: str, answer: Answer) -> None:
            self._answers.put((step, name, answer))

        run = gevent.spawn(self._transport.run_step, request, tuple(step), on_answer)
        self._greenlets.append(run)
        self._steps.append(step)
        for key in step.values():
            del self._waiting[key]

    def end(self) -> None:
        """End the steps, and nothing else of the job."""
        gevent.killall(self._greenlets)


class OwnJob(Srun):
    """Nodes in an allocation of our own, from entering to leaving.

    nodes:   to allocate; those that Slurm cannot give now fail with its reason
    options: more options for salloc(1)
    notify, how: as for `Srun`
    """

    def __init__(
        self, nodes: Iterable[str], options: str = "", notify: Note = ignore, **how: bool
    ) -> None:
        super().__init__(JobAllocation("", tuple(nodes)), notify, **how)
        self._salloc_options = options

    def __enter__(self) -> OwnJob:
        self.job = allocate(self.nodes, self._salloc_options, self.notify)
        # The allocation has no other steps: ours may have all its resources.
        self._gres = ()
        return self

    def __exit__(self, *problem: object) -> None:
        release(self.job, self.notify)


class _SrunProgram(PipedProgram):
    def close(self) -> None:
        """At TERM, srun ends its step and nothing else of the job."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=shell.KILL_AFTER_S)
        super().close()


class _SrunStep:
    """A step on one node as a Stream, over srun's standard input: with one node, no other node
    waits until this one has begun.
    """

    def __init__(self, transport: Srun, node: str, line: str) -> None:
        self._transport, self._node, self._line = transport, node, line
        #: The input until the first output: a restart with other options repeats it.
        self._sent, self._has_output = bytearray(), False
        self._start()

    def _start(self) -> None:
        self._argv = self._transport.session_argv(self._node, self._line)
        self._program = _SrunProgram(self._argv, environment=_environment())
        self._step_output = StepOutput("", [self._node], lambda name, answer: None)
        self._unsent: JoinableQueue[bytes] = JoinableQueue()
        self._unsent.put(bytes(self._sent))
        self._writer, self._errors = gevent.spawn(self._send), gevent.spawn(self._read_errors)

    def _send(self) -> None:
        while True:
            # The task may have ended without reading its input: its output says why.
            with contextlib.suppress(OSError):
                self._program.write(self._unsent.get(), None)
            self._unsent.task_done()

    def _read_errors(self) -> None:
        while data := self._program.read_errors():
            self._step_output.add_error(data)

    def read(self, limit_s: float) -> bytes:
        """See Stream. Raises TimeoutError, OSError, and ValueError with why the step ended."""
        until = time.monotonic() + limit_s
        if data := self._program.read(limit_s):
            self._has_output = True
            self._sent.clear()
            return data
        # srun's last error may come after its last output.
        self._errors.join(max(0.0, until - time.monotonic()))
        if not self._errors.ready():
            raise TimeoutError
        if not self._has_output and self._drop_refused_option():
            self.close()
            self._start()
            return self.read(max(0.0, until - time.monotonic()))
        raise ValueError(self._step_output.end_reason(self._node, self._program.status("") == 0))

    def _drop_refused_option(self) -> bool:
        """As `Srun.drop_refused_option`.

        The error may be the task's: a trial step with labels shows whether it is srun's.
        """
        if not (self._step_output.has_no_overlap or self._step_output.has_no_gres):
            return False
        trial = StepOutput("-", [self._node], lambda name, answer: None)
        options = self._argv[: self._argv.index("sh")]
        self._transport._run(trial, [*options, "--label", "sh", "-c", ":"], "", 1)
        return self._transport.drop_refused_option(trial, self._argv)

    def write(self, data: bytes, limit_s: float) -> None:
        """See Stream. Raises TimeoutError, OSError. It does not wait for the task to begin."""
        if not self._has_output:
            self._sent += data
            self._unsent.put(data)
            return
        until = time.monotonic() + limit_s
        if not self._unsent.join(limit_s):
            raise TimeoutError
        self._program.write(data, max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the task's input, which ends the task; otherwise srun ends the step."""
        gevent.killall([self._writer, self._errors])
        with contextlib.suppress(OSError):
            self._program.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.process.wait(timeout=_PATIENCE_S)
        self._program.close()


def _parts(stdin: str) -> dict[str, str]:
    """The environment variables that hold this input; {}: it does not fit."""
    data = stdin.encode("utf-8", "surrogateescape")
    if len(data) > _PART * _PARTS or b"\0" in data:
        return {}
    parts = [data[start : start + _PART] for start in range(0, max(1, len(data)), _PART)]
    return {f"{_INPUT}{index}": os.fsdecode(part) for index, part in enumerate(parts)}


def _from_environment(parts: int) -> str:
    """The beginning of a shell line that pipes the input from the variables."""
    names = [f"{_INPUT}{index}" for index in range(parts)]
    copies = "".join(f"nr_{index}=${name}; " for index, name in enumerate(names))
    values = " ".join(f'"$nr_{index}"' for index in range(parts))
    return f"{copies}unset {' '.join(names)}; printf %s {values} | "


def _environment() -> dict[str, str]:
    """Our environment without the options of srun in it (srun(1), INPUT ENVIRONMENT VARIABLES)."""
    foreign = [name for name in os.environ if name.startswith(("SLURM", "SRUN_"))]
    variables = {n: v for n, v in os.environ.items() if n == "SLURM_CONF" or n not in foreign}
    return {**variables, "LC_ALL": "C"}


_LINE_BYTES = 1024  # srun splits a longer line, and puts a label before each piece
#: srun's error if it has no --overlap (before 20.11), or no Gres with the name "none".
_NO_OVERLAP = re.compile(r"unrecognized option .*overlap")
_NO_GRES = re.compile(r"(?i)invalid generic resource|gres\S* .*(invalid|unknown)")
#: Slurm's error for a step in another user's job, also for root (step_mgr.c).
_DENIED = "Access/permission denied"
_AS_ITS_USER = "ask as the job's user (root: sudo -u USER), or over ssh"
#: The beginning of Slurm's own lines on standard error, and of a task's (srun --label).
_SRUNS = re.compile(r"^\s*(srun|slurmstepd(-\S+)?): (error: )?")
_LABEL = re.compile(rb"\s*([0-9]{1,9}): ")
#: Kept bytes of a task's standard error; and the number that stands for srun itself.
_TASK_ERROR_BYTES, _SRUN = 4 << 10, -1
_LAUNCH = re.compile(r"launch\b.* failed on node (\S+): (.+)", re.IGNORECASE)


class StepOutput:
    """The answers of one step, each as soon as it is whole.

    A task answers only for its own node, which srun tells: it labels each line with the task's
    number, and tasks are numbered in the order in which Slurm lists the step's nodes (srun(1),
    --label, --distribution), which is the job's (squeue(1), %N). The task must print that name.

    nonce:     begins the two lines that `script` adds: the node's name, and the end of its answer;
               "": a step on one node whose lines have no labels
    nodes:     in Slurm's order
    max_bytes: of an answer
    waiting:   the nodes that have not answered
    lost:      node that Slurm has lost -> the reason
    """

    def __init__(
        self, nonce: str, nodes: Iterable[str], on_answer: OnAnswer, max_bytes: int = ANSWER_BYTES
    ) -> None:
        self.nonce = nonce.encode()
        self.on_answer, self._max_bytes = on_answer, max_bytes
        self.waiting = dict.fromkeys(nodes)
        self.lost: Mapping[str, str] = {}
        self._node_of = tuple(self.waiting)
        self.names: dict[int, str] = {}
        self._texts: dict[int, bytearray] = {}
        self._unread = self._unread_errors = b""
        self._errors: dict[int, bytearray] = {}

    def script(self, inner: str) -> str:
        """``inner`` between two lines: the node's name by Slurm (srun(1)), and the end."""
        mark = self.nonce.decode()
        return f'echo {mark} at "$SLURMD_NODENAME"\n(\n{inner}\n)\necho\necho {mark} end'

    def add(self, data: bytes) -> None:
        """Parse a piece of the step's output, each line with its task's label (srun --label)."""
        *rows, self._unread = (self._unread + data).split(b"\n")
        for row in rows:
            if label := _LABEL.match(row):
                self._line(int(label[1]), row[label.end() :])

    def add_error(self, data: bytes) -> None:
        """Parse a piece of standard error; keep the first lines of srun and of each task."""
        *rows, self._unread_errors = (self._unread_errors + data).split(b"\n")
        for row in rows:
            self._error_line(row)

    def _error_line(self, row: bytes) -> None:
        label = _LABEL.match(row) if self.nonce else None
        if label is None:
            append_up_to(self._errors.setdefault(_SRUN, bytearray()), row + b"\n", ERROR_BYTES)
        elif int(label[1]) < len(self._node_of):
            errors = self._errors.setdefault(int(label[1]), bytearray())
            append_up_to(errors, row[label.end() :] + b"\n", _TASK_ERROR_BYTES)

    def _error_rows(self, task: int) -> list[str]:
        """The lines of standard error of a task, or of _SRUN."""
        if self._unread_errors:
            self._error_line(self._unread_errors)
            self._unread_errors = b""
        text = self._errors.get(task, bytearray()).decode("utf-8", "replace")
        return [row.strip() for row in text.splitlines() if row.strip()]

    def _line(self, task: int, line: bytes) -> None:
        words = line.split(b" ")
        if words[0] == self.nonce:
            if len(words) == 3 and words[1] == b"at":
                self._begin(task, words[2].decode("utf-8", "replace"))
            elif words[1:] == [b"end"] and task in self.names:
                text = self._texts.pop(task, bytearray()).decode("utf-8", "surrogateescape")
                self._answer(self.names[task], Answer(text))
            return
        answer_text = self._texts.setdefault(task, bytearray())
        answer_text += line if len(line) == _LINE_BYTES else line + b"\n"
        if len(answer_text) > self._max_bytes:
            # The rest of this answer is dropped line by line.
            answer_text.clear()
            if task in self.names:
                self._answer(self.names[task], Answer(gap=Gap(OUTPUT, "too much output")))

    def _begin(self, task: int, name: str) -> None:
        """Handle the line with which a task names its node."""
        if task in self.names or task >= len(self._node_of):
            return
        node = self.names[task] = self._node_of[task]
        if name != node:
            error = f"its task answered as {name[:64]!a}: a task may answer only for its own node"
            self._answer(node, Answer(gap=Gap(OUTPUT, error)))

    def _answer(self, name: str, answer: Answer) -> None:
        if name in self.waiting:
            del self.waiting[name]
            self.on_answer(name, answer)

    @property
    def error_lines(self) -> list[str]:
        """The lines of srun itself on standard error, without the program's name.

        A task that prints the same lines has its label before them.
        """
        stripped = (_SRUNS.sub("", row) for row in self._error_rows(_SRUN))
        return [row for row in stripped if row]

    @property
    def has_no_overlap(self) -> bool:
        """Whether this srun is older than --overlap."""
        return any(_NO_OVERLAP.search(row) for row in self.error_lines)

    @property
    def has_no_gres(self) -> bool:
        """Whether this Slurm refuses --gres=none."""
        return any(_NO_GRES.search(row) for row in self.error_lines)

    @property
    def unlaunched(self) -> dict[str, str]:
        """Node on which the step could not be started -> why."""
        matches = [match for row in self.error_lines if (match := _LAUNCH.search(row))]
        return {match[1]: match[2] for match in matches}

    def end_reason(self, node: str, exited_0: bool) -> str:
        """Why the step on this node ended, from the errors of srun and the task.

        exited_0: the task's exit status was 0
        """
        if node in self.unlaunched:
            return f"srun could not start there: {self.unlaunched[node]}"
        task_lines = [row for row in self._error_rows(_SRUN) if not _SRUNS.match(row)]
        if task_lines or exited_0:
            return f"ended by itself: {task_lines[-1][:200]}" if task_lines else "ended by itself"
        return f"srun: {self.last_error()}"

    def last_error(self, task_rows: Sequence[str] = ()) -> str:
        """The last error of srun, or else of the task; srun's closing line is not an error."""
        rows = [row for row in self.error_lines if not row.startswith("Job step aborted")]
        rows = rows or [_SRUNS.sub("", row) for row in task_rows]
        last_line = rows[-1] if rows else "it said nothing"
        return f"{last_line}: {_AS_ITS_USER}" if last_line.endswith(_DENIED) else last_line

    def give_up(self, limit_s: int, is_whole: bool) -> None:
        """Answer with an error for every node that has not answered.

        limit_s: seconds of the step; is_whole: srun ended by itself
        """
        unlaunched, began = self.unlaunched, set(self.names.values())
        for name in list(self.waiting):
            about = [row for row in self.error_lines if re.search(rf"\b{re.escape(name)}: ", row)]
            task_rows = self._error_rows(self._node_of.index(name))
            refused = sudo_error("\n".join(task_rows))
            if name in unlaunched:
                reason, kind = f"srun could not start there: {unlaunched[name]}", UNREACHABLE
            elif name in self.lost:
                reason, kind = self.lost[name], UNREACHABLE
            elif refused[0]:
                reason, kind = refused
            elif name in began and not is_whole:
                reason, kind = f"no answer in {limit_s} s", TIMEOUT
            else:
                words = about[-1] if about else self.last_error(task_rows)
                late = "" if is_whole else f" gave no answer in {limit_s} s"
                reason, kind = f"srun{late}: {words}", LOST
            self._answer(name, Answer(gap=Gap(kind, reason)))
