"""A Python that has imported torch once, and forks ranks: `python stable.py`.

Importing torch costs three seconds of CPU; a fork costs milliseconds. So a job of four ranks is
there in the time that four processes need to find each other. A rank is told on standard input,
one JSON object a line: `rank`, `environment`, `directory` and `acts`. It has its own environment
in /proc/PID/environ, as a rank that a launcher has started, and it leaves this file's code when
it ends: its interpreter ends as any other's. `exit-RANK` in the directory says how it ended.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys

#: Room for a rank's environment: the kernel shows the memory that this process began with.
ROOM = "NODEREADY_TEST_ROOM"


def show(environment):
    """Write the environment to where the kernel looks for it; see proc_pid_environ(5)."""
    # Copies of what is there now: nothing in the process points to the old memory afterwards.
    for name, value in list(os.environ.items()):
        os.environ[name] = value
    os.environ.pop(ROOM, None)
    os.environ.update(environment)
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    # Fields 50 and 51 of proc_pid_stat(5), which counts from 1; the first two are cut off.
    begin, end = int(fields[47]), int(fields[48])
    block = b"".join(f"{name}={value}\0".encode() for name, value in os.environ.items())
    rest = end - begin - len(block)
    if rest < len(ROOM) + 2:
        raise ValueError("a rank's environment needs more room")
    block += f"{ROOM}=".encode().ljust(rest - 1, b"x") + b"\0"
    ctypes.memmove(begin, block, len(block))


def become(order):
    """This process is now the rank: its own session, files and environment."""
    os.setsid()
    os.chdir(order["directory"])
    log = os.open(f"log-{order['rank']}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    quiet = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((quiet, log, log)):
        os.dup2(file, number)
    show(order["environment"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Stable:
    """The forked ranks, by pid."""

    def __init__(self):
        self.ranks = {}
        signal.signal(signal.SIGCHLD, lambda number, frame: self.reap())

    def reap(self):
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                ended = self.ranks.pop(pid, None)
                # The place may be gone: nobody wants to know any more.
                if ended is not None:
                    with contextlib.suppress(FileNotFoundError):
                        # Under its name when it is whole: who waits for it reads it at once.
                        with open(f"{ended}.new", "w") as file:
                            file.write(str(os.waitstatus_to_exitcode(status)))
                        os.replace(f"{ended}.new", ended)

    def fork(self, order):
        # The name of its last words is known before it can end.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid:
            self.ranks[pid] = f"{order['directory']}/exit-{order['rank']}"
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        return pid


def main():
    stable = Stable()
    for line in sys.stdin:
        order = json.loads(line)
        if not stable.fork(order):
            become(order)
            return order
    return None


if __name__ == "__main__":
    import acts

    gc.freeze()
    print("ready", flush=True)
    told = main()
    if told is not None:
        acts.play(told["acts"])
