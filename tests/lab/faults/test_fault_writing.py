"""Writing to a disk that is full, through links, cut off: old or new, never a mix."""

import contextlib
import re
import subprocess
from pathlib import Path

import pytest

from nodeready.fleet.inventory.nodeset import fold
from nodeready.runs.deploy.actions import StepChange, WriteFile
from tests.command import ours
from tests.helpers import apply, on

OURS = "/etc/sysctl.d/99-zz-nodeready-ptrace.conf"
OLD = "kernel.yama.ptrace_scope = 2\n"
NEW = "kernel.yama.ptrace_scope = 0"
LIMITS = "/etc/security/limits.d/zz-nodeready.conf"

FULL = f"""
mount -t tmpfs -o size=8k,mode=755 none /etc/sysctl.d
cat > {OURS}
cat /dev/zero > /etc/sysctl.d/x || :
"""
LINK = f"""
cat > /root/real; ln -s real /root/middle; ln -s ../../root/middle {OURS}
chmod 640 /root/real; chown ml:ml /root/real; echo umask 077 >/root/.bashrc
"""


def test_a_full_disk_and_a_symlinked_config_file(fresh_nodes, fleet, tool):
    """The old file stays whole; the target is edited, and its link, mode and owner stay; a new
    file is readable to all, whatever the umask. What is no file or read-only, test_promise asks.
    """
    good, full, linked = fresh_nodes(3)
    for node, spoil in ((full, FULL), (linked, LINK)):
        node.enter(["sh", "-c", spoil], input=OLD)
    done = tool(
        "deploy", fleet([good, full, linked]), "--yes", "--only", "ptrace,limits", status=1
    )
    assert f"{full.name}: ptrace.scope: no space left on {OURS}\n" in done.out
    # The other steps of this node, and the other nodes, are done.
    changed = fold([good.name, linked.name])
    assert f"changed     {changed}: ptrace.scope, limits.logins\n" in done.out, done
    assert full.read(OURS) == OLD
    assert full.run("sysctl -n kernel.yama.ptrace_scope").stdout == "1\n"
    assert (NEW in good.read(OURS), NEW in linked.read("/root/real")) == (True, True)
    stat = f"readlink {OURS}; stat -c '%a %U %G' /root/real {LIMITS}"
    assert linked.run(stat).stdout == "../../root/middle\n640 ml ml\n644 root root\n"
    for node in (full, linked):
        assert node.run(f"cat {LIMITS}").stdout
        assert ours(node) == []


def test_selinux_label_is_kept(fresh_node, fleet, tool):
    """Of a file that is there; a new one gets what the node's policy says. With stand-ins: they
    note what they are asked, since few machines that run tests have SELinux.
    """
    fresh_node.enter(["sh", "-c", "mount -t tmpfs none /sys/fs; mkdir /sys/fs/selinux"])
    fresh_node.write("/sys/fs/selinux/enforce", "1")
    for name in ("chcon", "restorecon"):
        note = f'#!/bin/sh\necho "{name} $*" >>/run/labels\n'
        fresh_node.write(f"/usr/local/sbin/{name}", note, mode=0o755)
    fresh_node.write(OURS, OLD)
    tool("deploy", fleet([fresh_node]), "--yes", "--only", "ptrace,limits", status=0)
    labels = fresh_node.read("/run/labels").splitlines()
    assert len(labels) == 2, labels
    assert re.fullmatch(
        rf"chcon --reference=\./{re.escape(Path(OURS).name)} -- \./\.nodeready\.\S{{6}}", labels[0]
    )
    assert labels[1] == f"restorecon -- {LIMITS}"


#: A stand-in for a tool: it does its work (or half of it, or none), and the power goes.
_CUT = """#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin
{work}
touch /run/cut
kill -9 0
"""
_HALF = '[ -f /proc/self/fd/1 ] || exec base64 "$@"; base64 "$@" | head -c 20'
CUTS = {
    "temp file made": ("mktemp", 'mktemp "$@"'),
    "half written": ("base64", _HALF),
    "not yet renamed": ("mv", ":"),
    "renamed": ("mv", 'mv "$@"'),
}


def test_cut_off_while_writing(fresh_nodes, fleet, tool):
    """At every stage: what is visible is the old file or the new, and the next run tidies up."""
    nodes = dict(zip(CUTS, fresh_nodes(len(CUTS)), strict=True))
    for name, (command, work) in CUTS.items():
        nodes[name].write(OURS, OLD)
        nodes[name].write(f"/usr/local/sbin/{command}", _CUT.format(work=work), mode=0o755)
    where = fleet(list(nodes.values()))
    done = tool("deploy", where, "--yes", "--only", "ptrace", status=1)
    assert f"{len(CUTS)} failed, 0 unreachable" in done.out
    for name, (command, _) in CUTS.items():
        node = nodes[name]
        assert node.read("/run/cut") == "", name
        assert (node.read(OURS) == OLD) == (name != "renamed"), name
        left = [line for line in ours(node) if ".nodeready." in line]
        assert len(left) == (name != "renamed"), (name, left)
        node.enter(["rm", f"/usr/local/sbin/{command}"])
    tool("deploy", where, "--yes", "--only", "ptrace", status=0)
    for name, node in nodes.items():
        assert NEW in node.read(OURS)
        # Where the new file was in place, nothing was left and nothing is written again.
        assert ours(node) == [], name


def test_a_file_that_changed_since_it_was_looked_at(fresh_node):
    """Somebody edits theirs between the plan and the change: their text is not overwritten."""
    run = on(fresh_node)
    for old, now in ((b"old\n", b"theirs\n"), (None, b"theirs\n"), (b"old\n", None)):
        fresh_node.enter(["rm", "-f", "/etc/theirs"])
        if now is not None:
            fresh_node.write("/etc/theirs", now)
        change = StepChange("test.write", (), (WriteFile("/etc/theirs", b"ours\n", old),))
        with pytest.raises(AssertionError, match="since it was looked at; run again"):
            apply(run, [change])
        found = fresh_node.enter(["cat", "/etc/theirs"], check=False).stdout
        assert found == (now or b"").decode()


def test_a_full_disk_of_this_machine_is_one_line_and_the_old_report_stays(tmp_path, tool):
    """Of reports, incidents and the files of the state; nothing half-written is left."""
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], check=True)
    try:
        (place / "old").write_text("old")
        with contextlib.suppress(OSError):
            (place / "fill").write_bytes(bytes(1 << 17))
        tool.home = tool.home / "home"
        tool.home.symlink_to(place)
        said = f"nodeready: No space left on device: {place}/"
        (tmp_path / "dump.txt").write_text(
            "Process 7: python3\n\nThread 7 (idle)\n    f (a.py:3)\n"
        )
        for words in (
            ("audit", "@local", "--only", "ptrace", "--format", "json", "-o", place / "old"),
            ("bundle", "@local", "-o", place / "new"),
            ("stacks", "--from", tmp_path / "dump.txt", "-o", place / "stacks"),
        ):
            done = tool(*words)
            # The memory of looks has a line of its own.
            lines = [line for line in done.lines if "this look was not kept: " not in line]
            assert (done.status, len(lines), done.out) == (1, 1, ""), done
            assert lines[0].startswith(said), done
        done = tool("incident", "--local", "--job", "x", "-o", place / "incident", status=1)
        assert done.out.count("No space left on device: ") == 2, done
        # What a run keeps for the next one is not what it was asked for.
        assert tool("audit", "@local", "--only", "ptrace.scope").status in (0, 3)
        assert (place / "old").read_text() == "old"
        files = [path.name for path in place.rglob("*") if path.is_file()]
        # An empty memory is one: the next look makes its tables.
        assert {*files} - {"last-failed", "memory.db"} == {"fill", "old"}
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_what_a_killed_change_left_goes_with_the_next_change_of_any_file(fresh_node):
    run = on(fresh_node)
    killed = WriteFile("/usr/local/bin/tool", b"x", None, validator=("sh", "-c", "kill -9 0"))
    with pytest.raises(AssertionError):
        apply(run, [StepChange("test.write", (), (killed,))])
    assert len(ours(fresh_node)) == 1
    apply(run, [StepChange("test.write", (), (WriteFile("/etc/other", b"x", None),))])
    assert ours(fresh_node) == []
