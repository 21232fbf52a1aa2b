"""The table of hangs: what every rank does, and what must be said of it.

A part is the acts of `tests/hang/acts.py`, one after the other; `!` marks the one that hangs, else
it is the last. After it come those that the others wait in, so that the job can go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Groups = tuple[tuple[int, ...], ...]

#: A verdict that says that a rank has not called what the others wait in; what kind of cause it is
#: may be said in its place where it is known.
LATE = ("late",)
STORAGE = ("late", "storage")
LOADER = ("late", "loader")


@dataclass(frozen=True)
class Scenario:
    """One row.

    name:     of the test
    what:     what hangs, in words
    parts_of: ranks -> acts; `*` are all others
    suspects: the groups that are suspects, all of them; one of them is on top. (): none
    kinds:    the verdicts that are true of it
    must, never: words that the table must and must not have
    first:    for what all wait in, where nobody can be called a suspect by the stacks alone: any
              of these ranks is first
    fault:    what the test does to ranks: stopped, traced, debugged, killed
    ends:     whether it can go on after the look; else it is ended
    status:   of the command
    unknown:  ranks of which Python's frames alone cannot tell whether they wait for others
    missing:  ranks that WORLD_SIZE counts, and are not there
    moves:    ranks that use the processor while they hang
    core:     tried on every Python, and in the short run
    newest:   not on torch 1.13
    """

    name: str
    what: str
    parts_of: Mapping[str, str]
    suspects: Groups
    kinds: tuple[str, ...]
    must: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    world: int = 4
    first: Groups = ()
    fault: tuple[str, tuple[int, ...]] = ("none", ())
    ends: bool = True
    status: int = 0
    unknown: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    moves: tuple[int, ...] = ()
    core: bool = False
    newest: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Who hangs where a signal cannot help, and goes on by itself when the fault is undone.
    alone: tuple[int, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether its ranks make steps all the time."""
        return not self.suspects and not self.first

    @property
    def parts(self) -> dict[int, tuple[list[str], int]]:
        """Rank -> its acts, and the number of the one that hangs."""
        named = {
            int(rank): acts
            for ranks, acts in self.parts_of.items()
            if ranks != "*"
            for rank in ranks.split(",")
        }
        found = {}
        for rank in range(self.world):
            if rank in self.missing:
                continue
            acts = named.get(rank, self.parts_of.get("*", "")).split()
            if acts[0] != "join" and "-" not in acts:
                acts = ["join", *acts]
            acts = [act for act in acts if act != "-"]
            marked = [number for number, act in enumerate(acts) if act.endswith("!")]
            hangs = marked[0] if marked else len(acts) - 1
            found[rank] = ([act.rstrip("!") for act in acts], hangs)
        return found

    @property
    def released(self) -> set[int]:
        """Who hangs in an act of its own, which a signal ends."""
        return {
            rank
            for ranks, acts in self.parts_of.items()
            for rank in (range(self.world) if ranks == "*" else map(int, ranks.split(",")))
            if "!" in acts and rank not in self.alone and rank not in self.missing
        }

    @property
    def victims(self) -> set[int]:
        """All that wait for a suspect."""
        if not self.suspects:
            return set()
        culprits = {rank for group in self.suspects for rank in group}
        return set(range(self.world)) - culprits - set(self.unknown)


def code(name: str, what: str, act: str, *must: str, **more: object) -> Scenario:
    """Rank 3 is in code of its own, and the others reduce."""
    values: dict[str, object] = {"kinds": LATE, "never": NO_LOADER, **more}
    return Scenario(
        name,
        what,
        {"3": f"{act}! all_reduce", "*": "all_reduce"},
        suspects=((3,),),
        must=(act, *must),
        **values,  # type: ignore[arg-type]
    )


#: Nobody may say so where there is no such thing.
NO_PIPELINE = ("pipeline",)
NO_LOADER = ("loader worker", "num_workers", *NO_PIPELINE)

CODE = (
    code("sleep", "time.sleep in the user's code", "back_off", core=True),
    code("lock", "a lock that another thread holds", "wait_for_lock"),
    code("event", "threading.Event that nobody sets", "wait_for_event"),
    code("queue", "queue.Queue that nobody fills", "wait_for_queue"),
    code(
        "polled-queue",
        "a loop that looks into a queue that nobody fills, 100 times a second",
        "poll_queue",
        moves=(3,),
        core=True,
    ),
    code("input", "input() from a pipe", "ask_user"),
    code("pdb", "a forgotten breakpoint", "debug", "pdb"),
    code("asyncio", "a coroutine that never ends", "serve_metrics"),
    code("subprocess", "a child process that does not end", "convert_images", "sleep", core=True),
    code("shell", "a shell and its child", "shell_out", "sleep"),
    code("socket", "recv from a peer that says nothing", "fetch_from_server"),
    code("http", "a download whose server does not answer", "download_tokenizer"),
    code("file-lock", "flock that the same program holds", "wait_for_file_lock"),
    code("full-pipe", "print into a pipe that nobody reads", "log_to_full_pipe"),
    code("gil", "an extension that sleeps and keeps the interpreter's lock", "hold_gil"),
    code("python-loop", "an infinite loop in Python", "tokenize", moves=(3,), core=True),
    code("regex", "a regular expression in C, without an end", "match_pattern", moves=(3,)),
    code("thread-pool", "a future whose thread waits for a pipe", "map_in_threads"),
    code("join-process", "join of a process that does not end", "join_process"),
    code("process-pool", "Pool.map whose worker does not end", "map_in_processes"),
    code("in-thread", "training in a thread, that reads", "train_in_thread"),
    code("compiler", "a compiler that does not end", "compile_kernel", "slow-cxx"),
    code(
        "inductor", "torch.compile whose C++ compiler does not end", "compile_model", newest=True
    ),
)

IO = (
    code("read", "a read of a FIFO", "read_shard", kinds=STORAGE, core=True),
    code("checkpoint", "torch.save into a FIFO", "save_checkpoint", kinds=STORAGE, core=True),
    code("state-d", "a file system whose server is dead", "list_dataset",
         kinds=("storage",), fault=("dead_mount", (3,)), alone=(3,)),
)  # fmt: skip

LOADERS = tuple(
    code(f"loader-{name}", what, act, *must, kinds=LOADER, never=NO_PIPELINE + never, core=core)
    for name, what, act, must, never, core in (
        ("fork", "a forked worker reads", "load_fork", ("decode",), (), True),
        ("spawn", "a spawned worker reads", "load_spawn", ("decode",), (), False),
        ("forkserver", "a fork server's worker reads", "load_forkserver", ("decode",), (), False),
        ("persistent", "a persistent worker reads", "load_persistent", ("decode",), (), False),
        ("no-worker", "num_workers=0: the rank itself reads", "load_here",
         ("decode",), ("loader worker",), True),
        ("collate", "a worker in collate_fn", "load_collate", ("decode", "collate"), (), False),
        ("deadlock", "a worker waits for a lock that was held at the fork", "load_deadlock",
         ("lock_cache",), (), False),
        ("stopped", "a worker is stopped by a signal", "load_stopped", ("stopped",), (), False),
    )
)  # fmt: skip


def late(name: str, what: str, act: str, **more: object) -> Scenario:
    """Rank 3 reads a file, and the others are in this."""
    values: dict[str, object] = {"kinds": STORAGE, "never": NO_LOADER, **more}
    return Scenario(
        name,
        what,
        {"3": f"read_shard! {act}", "*": act},
        suspects=((3,),),
        must=("read_shard",),
        **values,  # type: ignore[arg-type]
    )


COLLECTIVES = (
    Scenario("recorded", "as async, with dumps of the flight recorder",
             {"3": "all_reduce all_reduce dump_recorder read_shard! all_reduce",
              "*": "all_reduce all_reduce recorded_all_reduce"},
             ((3,),), STORAGE, ("read_shard",), NO_LOADER, unknown=(0, 1, 2), newest=True,
             core=True),
    Scenario("recorded-mismatch", "rank 3 broadcasts, with dumps of the flight recorder",
             {"3": "all_reduce recorded_broadcast", "*": "all_reduce recorded_all_reduce"}, (),
             ("disagree",), ("broadcast",), NO_LOADER, first=((3,),), ends=False, newest=True),
    late("broadcast", "the others in broadcast", "broadcast_objects"),
    late("reduce-large", "the others in a large all_reduce", "large_all_reduce"),
    late("all-gather", "the others in all_gather", "all_gather", core=True),
    late("all-gather-single", "the others in all_gather_into_tensor", "all_gather_single",
         newest=True),
    late("reduce-scatter", "the others in reduce_scatter_tensor", "reduce_scatter", newest=True),
    late("all-to-all", "the others in all_to_all_single", "all_to_all"),
    late("barrier", "the others in barrier", "barrier", core=True),
    late("monitored-barrier", "the others in monitored_barrier", "monitored_barrier"),
    late("objects", "the others in all_gather_object", "gather_objects"),
    late("async", "the others in wait() of an async op, which is C++", "all_reduce_later",
         unknown=(0, 1, 2), kinds=(*STORAGE, "unclear")),
    late("new-group", "the others make a group", "make_group"),
    late("reduce-in-thread", "the others reduce in a thread, main threads join",
         "reduce_in_thread"),
    Scenario("ddp", "rank 3 reads between forward and backward of DDP",
             {"3": "ddp_late!", "*": "ddp_backward"}, ((3,),), STORAGE, ("read_shard",), NO_LOADER,
             core=True),
    Scenario("fsdp2", "rank 3 reads between forward and backward of fully_shard",
             {"3": "fsdp_late!", "*": "fsdp_backward"}, ((3,),), STORAGE, ("read_shard",),
             NO_LOADER, newest=True),
    Scenario("sub-groups", "rank 3 reads; rank 2 waits in their half's group, the others in all",
             {"3": "sub_group read_shard! all_reduce", "2": "sub_group all_reduce",
              "*": "sub_group all_reduce"},
             ((3,),), STORAGE, ("read_shard",), NO_LOADER),
    *(
        Scenario(f"pipeline-{name}", f"stage {at} of four reads",
                 {str(at): "stage_hangs!", "*": "stage_works"}, ((at,),), STORAGE,
                 ("read_shard",), ("loader worker",), newest=True, core=at == 0)
        for name, at in (("first", 0), ("middle", 1), ("last", 3))
    ),
    Scenario("checkpoint-distributed", "rank 3 writes its part of a distributed checkpoint",
             {"3": "save_distributed_blocked!", "*": "save_distributed"}, ((3,),),
             STORAGE, ("save_distributed_blocked",), NO_LOADER, newest=True, ends=False),
    Scenario("store", "rank 3 waits for a key that nobody sets",
             {"3": "wait_for_key! all_reduce", "*": "all_reduce"}, (), ("late", "disagree"),
             ("wait_for_key",), NO_LOADER, first=((3,),), ends=False),
    Scenario("store-late", "the others wait for a key, and rank 3 reads before it sets the key",
             {"3": "read_shard! set_key", "*": "wait_for_key"}, ((3,),), STORAGE,
             ("read_shard",), NO_LOADER),
)  # fmt: skip

_DISAGREE = ("disagree",)
MISMATCHES = (
    Scenario("mismatch", "rank 3 broadcasts where the others reduce",
             {"3": "broadcast", "*": "all_reduce"}, (), _DISAGREE, ("broadcast", "all_reduce"),
             NO_LOADER, first=((3,),), ends=False, core=True),
    Scenario("order", "rank 3 gathers and reduces, the others reduce and gather",
             {"3": "all_gather! all_reduce", "*": "all_reduce! all_gather"}, (), _DISAGREE,
             ("all_gather", "all_reduce"), NO_LOADER, first=((3,),), ends=False),
    Scenario("no-barrier", "rank 3 has left a barrier out",
             {"3": "large_all_reduce", "*": "barrier"}, (), _DISAGREE,
             ("large_all_reduce", "barrier"), NO_LOADER, first=((3,),), ends=False),
    Scenario("send", "rank 3 sends to rank 0, which reduces with the others",
             {"3": "send_large", "*": "all_reduce"}, (),
             ("disagree", "unclear"), ("send_large",),
             NO_LOADER, first=((3,),), ends=False),
    Scenario("wrong-peer", "all receive from a peer that does not send to them",
             {"3": "receive_from_wrong_peer", "*": "all_reduce"}, (),
             ("disagree", "unclear"), ("receive_from_wrong_peer",),
             NO_LOADER, first=((3,),), ends=False),
    Scenario("ring", "all receive, and nobody sends",
             {"*": "receive"}, (), ("quiet", "disagree", "unclear"), ("receive",), NO_LOADER,
             first=((0, 1, 2, 3),), ends=False),
)  # fmt: skip

RANKS = (
    Scenario("stopped", "rank 3 is stopped by a signal",
             {"3": "back_off! all_reduce", "*": "all_reduce"},
             ((3,),), LATE, ("stopped",), NO_LOADER, fault=("stopped", (3,)), status=3, core=True),
    Scenario("traced", "somebody straces rank 3", {"3": "back_off! all_reduce", "*": "all_reduce"},
             ((3,),), LATE, ("traced",), NO_LOADER, fault=("traced", (3,)), status=3),
    Scenario("debugged", "somebody has rank 3 in gdb",
             {"3": "back_off! all_reduce", "*": "all_reduce"}, ((3,),), LATE,
             ("traced",), NO_LOADER, fault=("debugged", (3,)), status=3),
    Scenario("killed", "rank 3 was killed; the others make a group",
             {"3": "back_off!", "*": "make_group"}, ((3,),), ("gone",), ("missing",), NO_LOADER,
             fault=("killed", (3,)), ends=False, status=3, core=True),
    Scenario("exited", "rank 3 called os._exit; the others make a group",
             {"3": "die!", "*": "make_group"}, ((3,),), ("gone",), ("missing",), NO_LOADER,
             ends=False, status=3),
    Scenario("raised", "rank 3 ended with an exception; the others make a group",
             {"3": "raise_error!", "*": "make_group"}, ((3,),), ("gone",), ("missing",),
             NO_LOADER, ends=False, status=3),
    Scenario("never-there", "rank 3 was never started; the others join",
             {"*": "join"}, ((3,),), ("gone",), ("missing",), NO_LOADER, missing=(3,),
             ends=False, status=3, core=True),
    Scenario("join-late", "rank 3 reads before it joins", {"3": "- read_shard! join", "*": "join"},
             ((3,),), STORAGE, ("read_shard",), NO_LOADER),
    Scenario("two-first", "two ranks: the first reads", {"0": "read_shard! all_reduce",
             "1": "all_reduce"}, ((0,),), STORAGE, ("read_shard",), NO_LOADER, world=2, core=True),
    Scenario("two-last", "two ranks: the second reads", {"1": "read_shard! all_reduce",
             "0": "all_reduce"}, ((1,),), STORAGE, ("read_shard",), NO_LOADER, world=2),
    Scenario("minority-waits", "seven of eight read, one is in the collective",
             {"5": "all_reduce", "*": "read_shard! all_reduce"}, ((0, 1, 2, 3, 4, 6, 7),),
             STORAGE, ("read_shard",), NO_LOADER, world=8, core=True),
    Scenario("two-suspects", "rank 1 waits for a lock, rank 3 reads",
             {"1": "wait_for_lock! all_reduce", "3": "read_shard! all_reduce",
              "*": "all_reduce"}, ((3,),), STORAGE, ("read_shard", "wait_for_lock"), NO_LOADER,
             unknown=(1,)),
    Scenario("many-suspects", "five of six are in five places of their own code",
             {"0": "back_off! all_reduce", "1": "tokenize! all_reduce",
              "2": "read_shard! all_reduce",
              "3": "convert_images! all_reduce", "4": "debug! all_reduce", "5": "all_reduce"},
             ((0,), (1,), (2,), (3,), (4,)), (*STORAGE, "unclear"), ("read_shard", "tokenize"),
             NO_LOADER, world=6, moves=(1,)),
    Scenario("all-read", "all read a pipe that nobody writes", {"*": "read_shard! all_reduce"}, (),
             ("storage", "unclear"), ("read_shard",), NO_LOADER, first=((0, 1, 2, 3),)),
)  # fmt: skip


def at_end(name: str, what: str, act: str, *must: str) -> Scenario:
    return Scenario(
        name,
        what,
        {"3": f"{act}!", "*": "all_reduce"},
        suspects=((3,),),
        kinds=LATE,
        must=must,
        never=NO_LOADER,
        ends=False,
    )


ENDS = (
    at_end("atexit", "rank 3 hangs in an atexit function", "hang_at_exit", "back_off"),
    at_end("thread-left", "rank 3 waits for a thread at its exit", "leave_thread", "_shutdown"),
    at_end("destructor", "rank 3 hangs in a destructor", "hang_in_destructor"),
)


def healthy(name: str, what: str, act: str, **more: object) -> Scenario:
    return Scenario(
        name,
        what,
        {"*": act},
        suspects=(),
        **{"kinds": ("not-stuck",), "never": ("suspect", *NO_PIPELINE), **more},  # type: ignore
    )


HEALTHY = (
    healthy("fast", "a step every few milliseconds", "fast", core=True),
    # Two samples at the same line prove no other step: a doubt, and nobody is accused.
    healthy("napping", "a step every 20 ms, most of it asleep", "napping",
            kinds=("not-stuck", "unclear")),
    healthy("long-naps", "a step every three seconds, all of it asleep", "long_naps",
            kinds=("not-stuck", "unclear")),
    healthy("slow", "a step every three seconds and more", "slow", core=True,
            kinds=("not-stuck", "unclear")),
    healthy("loading", "with a data loader that is quick enough", "loading", core=True),
    healthy("compiling", "each step compiles a new graph", "compiling", newest=True),
    Scenario("one-slow", "rank 3 needs a second for each step, the others none",
             {"*": "one_slow"}, (), ("not-stuck", "unclear"), ("moves",),
             ("suspect ", *NO_LOADER)),
    Scenario("one-naps", "rank 3 sleeps for half a second in each step, the others do not",
             {"*": "one_naps"}, (), ("not-stuck", "unclear"), ("moves",),
             ("suspect ", *NO_LOADER)),
)  # fmt: skip

SCENARIOS = (*CODE, *IO, *LOADERS, *COLLECTIVES, *MISMATCHES, *RANKS, *ENDS, *HEALTHY)
