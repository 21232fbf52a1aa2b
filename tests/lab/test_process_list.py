"""What any user of a node can read there while we are at work: the process list."""

import re

import pytest

#: Collects every command line that there is until nothing of ours is left, and root's own view of
#: the nonce beside it: the first argument says which.
_WATCH = r"""
import glob, sys, time
seen, ours, until = set(), 0.0, time.monotonic() + 40
name, mark = ("environ", b"NR_TEXT=NR=") if sys.argv[1] == "root" else ("cmdline", b"nodeready:")
print("began", flush=True)
while time.monotonic() < until and not (ours and time.monotonic() > ours + 2):
    for path in glob.glob(f"/proc/[0-9]*/{name}"):
        try:
            text = open(path, "rb").read()
        except OSError:
            continue
        if b"for path in glob" not in text:
            seen.add(text)
            ours = time.monotonic() if mark in text else ours
print(b"\n".join(sorted(seen)).decode("utf-8", "replace"))
"""


def watch(node, tool, who: str, *words: object) -> str:
    """What the watcher saw as this user, while the command ran."""
    node.write("/tmp/watch.py", _WATCH, 0o644)
    node.run(f"python3 -I /tmp/watch.py {who} >/tmp/seen-{who} 2>&1 &", user=who)
    done = tool(*words)
    assert done.status in {0, 3}, done
    node.run(f"while pgrep -u {who} -f '[w]atch.py {who}' >/dev/null; do sleep 0.1; done")
    return node.read(f"/tmp/seen-{who}")


def test_another_user_sees_neither_the_nonce_nor_the_script(fresh_node, fleet, tool):
    """While an audit looks; only the word that marks the run's processes stands there."""
    inventory = fleet([fresh_node])
    nonces = set(
        re.findall(r"NR=([0-9a-f]{16})", watch(fresh_node, tool, "root", "audit", inventory))
    )
    assert nonces
    seen = watch(fresh_node, tool, "ml", "audit", inventory)
    assert "nodeready:" in seen
    # The shell functions of our script, and any nonce.
    assert not re.search(r"nr_(main|section|join|together|take|trap)|NR_LIB|NR=", seen), seen
    assert not re.search(r"\b[0-9a-f]{16}\b", seen), seen
    # No command line of ours is long.
    assert max(len(row) for row in seen.splitlines() if "nodeready:" in row) < 400


@pytest.mark.nightly
def test_nor_of_a_program(fresh_node, fleet, tool):
    seen = watch(fresh_node, tool, "ml", "ready", fleet([fresh_node]), "--only", "proof.limits")
    assert re.search(r"python3?\S* ?.*nodeready:", seen.replace("\0", " "), re.S)
    assert not re.search(r"nodeready-[0-9a-f]{16}|CONFIG|SOURCES|b85decode", seen), seen
