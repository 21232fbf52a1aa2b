"""What known places wait for: the call that tells most, not the lock at the end of it.

A row's name in `hints.json` is its stack, and after ` | ` what else is known: native frames, or
what the kernel waits on.
"""

import pytest

from nodeready.runs.stacks import hints
from nodeready.runs.stacks.document import Frame
from tests.builders.traces import C10D, TRAIN, frames
from tests.cases import cases

SHORT = {
    "TRAIN": TRAIN,
    "C10D": C10D,
    "LOADER": "torch/utils/data/dataloader.py",
    "FETCH": "fetch torch/utils/data/_utils/fetch.py 54",
    "WORKER": "_worker_loop torch/utils/data/_utils/worker.py 348",
    "CONNECTION": "multiprocessing/connection.py",
}


def stack(text):
    for word, whole in SHORT.items():
        text = text.replace(word, whole)
    return [Frame(*row) for row in frames(text)]


def activity(text, native="", **more):
    hint = hints.find(stack(text), stack(native), **more)
    return hint.activity if hint else None


@pytest.mark.parametrize("case", cases(__file__, "hints.json", "place"))
def test_a_place_says_what_it_waits_for(case):
    assert activity(f"TRAIN > {case['name']}") == case["about"]


@pytest.mark.parametrize("case", cases(__file__, "hints.json", "native"))
def test_native_frames_tell_what_python_frames_do_not(case):
    python, native = case["name"].split(" | ")
    assert activity(python, native) == case["about"]


@pytest.mark.parametrize("case", cases(__file__, "hints.json", "kernel"))
def test_the_function_of_the_kernel_names_whom_state_d_waits_for(case):
    hint = hints.in_kernel(case["name"])
    assert (hint.activity if hint else None) == case["about"]


@pytest.mark.parametrize("case", cases(__file__, "hints.json", "call"))
def test_the_kernel_tells_what_a_call_of_c_below_the_users_own_code_waits_for(case):
    channel, waits_on = case["name"].split(" | ")
    kernel = {"channel": channel, "waits_on": waits_on, "master": "gpu1:29500"}
    assert activity("TRAIN", **kernel) == case["about"]
    # A known call says more.
    assert activity("TRAIN > all_reduce C10D 4181", **kernel) == "collective"


@pytest.mark.parametrize("case", cases(__file__, "hints.json", "own"))
def test_the_innermost_call_of_the_users_own_code(case):
    frame = hints.user_frame(stack(case["name"]))
    assert (frame.function if frame else None) == case["own"]


def test_every_hint_is_one_line_that_says_something():
    tables = [*hints._FUNCTION_HINTS.values(), *hints._COMMON_FUNCTION_HINTS.values()]
    rows = (
        hints._DIRECTORY_HINTS,
        hints._NATIVE_HINTS,
        hints._CHANNEL_HINTS,
        hints._SLEEPING_HINTS,
        hints._SYSTEM_CALL_HINTS,
    )
    texts = {hint.text for hint in (*tables, *(hint for table in rows for _, hint in table))}
    for text in texts - {""}:
        assert text.isprintable()
        assert text.startswith(
            ("waits", "is ", "compiles", "saves", "imports", "reads", "writes", "sleeps", "has ")
        )


def test_no_stack_has_no_hint_and_a_hostile_stack_is_read_up_to_a_bound():
    assert activity("") is None
    assert hints.in_kernel("") is None
    assert hints.find([Frame("wait", "threading.py", 1)] * 100_000).activity == "lock"
    assert hints.find([Frame("f", "a/" * 100_000, 1)] * 10) is None
