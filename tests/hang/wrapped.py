"""Ranks that start the Python that computes, and ranks in roots and namespaces of their own.

Acts for `acts.py`. What is started plays an act of `talks.py` or `protocols.py`.
"""

import ctypes
import os
import subprocess
import sys
import time

#: Of sched.h and sys/mount.h.
_NEWNS, _NEWPID, _PRIVATE, _BIND, _REC = 0x20000, 0x20000000, 1 << 18, 1 << 12, 1 << 14


def words(act):
    """A Python that plays an act."""
    module = next((name for name in ("talks", "protocols") if has(name, act)), "acts")
    return [sys.executable, "-c", f"import {module}; {module}.{act}()"]


def has(module, act):
    return hasattr(__import__(module), act)


def run_c(act):
    subprocess.run(words(act), check=True)


def run_below_shell(act):
    subprocess.run(["bash", "-c", '"$@"; exit $?', "bash", *words(act)], check=True)


def run_and_poll(act):
    """As launchers do that look after several children."""
    child = subprocess.Popen(words(act))
    while child.poll() is None:
        time.sleep(0.5)


def run_and_capture(act):
    """Its output through a pipe."""
    subprocess.run(words(act), check=True, capture_output=True)


def run_twice(act):
    inner = f"import subprocess; subprocess.run({words(act)!r})"
    subprocess.run([sys.executable, "-c", inner], check=True)


def run_debugged(act):
    """Below a debugger that was told to go on: the same process."""
    name = f"train-{os.environ['RANK']}.py"
    with open(name, "w") as file:
        file.write(words(act)[2])
    os.execv(sys.executable, [sys.executable, "-m", "pdb", "-c", "continue", name])


def run_shell(act):
    """The rank is a shell, and the Python is below it."""
    os.execvp("bash", ["bash", "-c", '"$@"; exit $?', "bash", *words(act)])


def beside_monitor(act):
    """A rank with a helper that it does not wait for."""
    import protocols
    import talks

    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        (getattr(talks, act, None) or getattr(protocols, act))()
    finally:
        helper.kill()


def run_stopped(act):
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    subprocess.run([sys.executable, "-c", stop], check=True)


def run_dead(act):
    """Its child has ended, and it waits for the child's word."""
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    read, _write = os.pipe()
    os.read(read, 1)
    child.wait()


# --- Roots and namespaces.


def call(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source, target, kind, flags=0, data=b""):
    call("mount", source.encode(), target.encode(), kind.encode(), flags, data)


def new_root():
    """An overlay over this machine's root, with this directory in it; below a tmpfs."""
    call("unshare", _NEWNS)
    mount("none", "/", "none", _PRIVATE | _REC)
    room = "/mnt"
    mount("none", room, "tmpfs")
    for name in ("upper", "work", "root"):
        os.mkdir(f"{room}/{name}")
    data = f"lowerdir=/,upperdir={room}/upper,workdir={room}/work"
    mount("overlay", f"{room}/root", "overlay", data=data.encode())
    here = os.getcwd()
    for place in ("/proc", "/dev", here):
        os.makedirs(f"{room}/root{place}", exist_ok=True)
        mount(place, f"{room}/root{place}", "none", _BIND | _REC)
    return f"{room}/root"


def in_chroot(act):
    here, root = os.getcwd(), new_root()
    os.chroot(root)
    os.chdir(here)
    os.execv(sys.executable, words(act))


def in_pivoted(act):
    """As enroot and runc do."""
    here, root = os.getcwd(), new_root()
    os.chdir(root)
    os.mkdir("old")
    number = 41 if os.uname().machine == "aarch64" else 155
    call("syscall", number, b".", b"old")
    call("umount2", b"/old", 2)
    os.chroot(".")
    os.chdir(here)
    os.execv(sys.executable, words(act))


def in_unshared(act, *options):
    os.execvp("unshare", ["unshare", *options, *words(act)])


def in_pids(act):
    """A process namespace: the rank is process 1 there, below unshare."""
    in_unshared(act, "--pid", "--fork", "--mount-proc")


def in_user(act):
    """A user namespace, in which it is root."""
    in_unshared(act, "--user", "--map-root-user", "--mount")


def in_user_of_another(act):
    """The same of a user who is not root outside."""
    os.chmod(f"fifo-{os.environ['RANK']}", 0o666)
    os.chmod(".", 0o777)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    in_user(act)


def in_moved(act):
    """Its Python lies where this machine has nothing: a tmpfs of its own."""
    here = os.getcwd()
    call("unshare", _NEWNS)
    mount("none", "/", "none", _PRIVATE | _REC)
    mount("none", "/opt", "tmpfs")
    subprocess.run(["cp", os.path.realpath(sys.executable), "/opt/python-of-job"], check=True)
    os.chdir(here)
    os.execv("/opt/python-of-job", ["/opt/python-of-job", *words(act)[1:]])


#: A rank that has joined the job does these itself.
JOINED = {"run_stopped": run_stopped, "run_dead": run_dead}


def play(text):
    """The act of ``WAY:ACT``, in a Python that has imported nothing."""
    way, act = text.split(":")
    if way in JOINED:
        JOINED[way](act)
    else:
        code = f"import wrapped; wrapped.{way}({act!r})"
        os.execv(sys.executable, [sys.executable, "-c", code])
