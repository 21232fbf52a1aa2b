"""What a node whose root is hostile does to the connection costs that node alone.

evil   three nodes; on one, root answers in place of what we run there

The other nodes' rows are what they are without the hostile one.
"""

import time

import pytest

from tests.lab.rows import rows

#: In place of `timeout`, with which each of our commands begins. HOW is put in front of it.
EVIL = r"""#!/usr/bin/python3 -I
import base64, gzip, os, re, subprocess, sys, time, zlib

HOW = %r
TEXT = (
    "\x1b]0;x\x07\x1b[31m</script><script>alert(1)</script>\"}\n# HELP x\nfoo{a=\"b\"} 1|,=cmd"
    "\u202e[bold]x[/]]]><!--"
)
# Lines that a careless pattern tries to read in more ways than there is time for.
BLANKS = {
    "core_dumps": "/etc/systemd/coredump.conf:1:Storage=xBLANKSy",
    "limits": "/proc/1/limits:1:Max openBLANKS!",
}
sys.excepthook = lambda kind, problem, where: sys.stderr.write(f"hostile: {problem!r}\n")


def say(data):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


while HOW == "flood":
    say(b"A" * (1 << 20))
while HOW == "errors":
    sys.stderr.buffer.write(b"A" * (1 << 20))
while HOW == "drip":
    say(b"A")
    time.sleep(0.2)
if HOW == "prompt":
    sys.stderr.write("sudo: a password is required\n")
    say(b"[sudo] password for root: ")
    sys.exit(1)
# The script may have given the program a descriptor of its own.
words = ["/usr/bin/timeout", *sys.argv[1:]]
done = subprocess.run(words, stdout=subprocess.PIPE, close_fds=False)
said = done.stdout
if HOW == "half":
    say(said[: len(said) // 2])
    os.kill(os.getppid(), 9)
    os.kill(0, 9)
match = re.search(rb"(?s)nodeready/1 (\w+) gzip\n(.*?)\n(?=nodeready/1 \1 end)", said)
if match:
    nonce, inner = match[1].decode(), gzip.decompress(base64.b64decode(match[2]))
    lines = inner.decode("utf-8", "surrogateescape").split("\n")
    for at, line in enumerate(lines):
        head, mark, _ = line.rpartition("=" if "=" in line else ":")
        if at %% 3 == 0 and mark and nonce not in line:
            lines[at] = head + mark + TEXT.replace("\n", " ")
    if HOW == "blanks":
        for section, line in BLANKS.items():
            at = lines.index("@" + nonce + " begin " + section)
            lines.insert(at + 1, line.replace("BLANKS", 200000 * " "))
    packed = gzip.compress("\n".join(lines).encode("utf-8", "surrogateescape"), 1)
    if HOW == "bomb":
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(600)) + packer.flush()
    said = said[: match.start(2)] + base64.b64encode(packed) + said[match.end(2) :]
say(said)
sys.exit(done.returncode)
"""

#: What of the looks depends on nothing but the node's own settings.
STILL = ("--only", "ptrace,core_dumps,limits,pdsh,ports,iommu,debug_tools")
#: Most memory of a command, in KiB: of one whose three nodes are sound it is 62 MiB.
MOST_KB = 160 << 10


def results(done, names):
    return [one for name in names for one in done.nodes[name]["results"]]


@pytest.mark.parametrize(
    "how", rows(["flood", "errors", "half", "bomb", "prompt", "blanks"], "half", "bomb")
)
def test_a_node_that_answers_with_malice_costs_itself(tool, fleet, fresh_nodes, how):
    first, evil, last = fresh_nodes(3)
    both, inventory = [first.name, last.name], fleet([first, evil, last])
    for node in (first, last):
        node.enter(["sh", "-c", "echo hello >/var/log/job.log"])
    sound = tool("audit", inventory, *STILL, "--format", "json")
    evil.write("/usr/local/bin/timeout", EVIL % how, mode=0o755)
    done = tool.measured("audit", inventory, *STILL, "--format", "json")
    assert done.status == (4 if how == "half" else 3), done
    pairs = zip(results(done, both), results(sound, both), strict=True)
    assert [pair for pair in pairs if pair[0] != pair[1]] == []
    assert done.peak_kb < MOST_KB
    tail = tool.measured("tail", inventory, "/var/log/job.log", "--format", "json")
    groups = tail.document["groups"]
    assert both == [file["node"] for one in groups for file in one["files"]]
    assert tail.peak_kb < MOST_KB
    for text in (done.out, done.err, tail.out, tail.err):
        assert text.replace("\n", "").isprintable()


def test_a_node_that_answers_a_byte_at_a_time_keeps_nobody_waiting(tool, fleet, fresh_nodes):
    first, evil = fresh_nodes(2)
    inventory = fleet([first, evil])
    evil.write("/usr/local/bin/timeout", EVIL % "drip", mode=0o755)
    began = time.monotonic()
    done = tool("audit", inventory, *STILL, "--timeout", "5", "--format", "json")
    # The limit is for the whole answer: were it for the next byte, it would never be reached.
    assert time.monotonic() - began < 40
    assert "unknown" not in {one["status"] for one in results(done, [first.name])}
    assert {one["status"] for one in results(done, [evil.name])} == {"unknown"}
    assert "5 s" in str(done.nodes[evil.name]), done
