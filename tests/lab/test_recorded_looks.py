"""The looks that tests/unit/fuzz mutates are those of nodes as they are today.

NODEREADY_RECORD=1 records them anew, after a section of the look has changed.
"""

import json
import os
import re
from pathlib import Path

import pytest

from nodeready.core import probe_script
from nodeready.core.base import Output
from nodeready.core.policy import make_policy
from nodeready.subjects import snapshot
from nodeready.subjects.debug_tools import facts
from tests.builders.hostile import RECORDED, RUN_DIGEST, encoded, recorded
from tests.command import POLICY

_DATA = Path(__file__).parents[1] / "unit" / "fuzz" / "data"
_FILE = re.compile(rf"(\n@{RECORDED} file [^\n]*\n)(.*?)(\n@{RECORDED} eof\n)", re.S)


def legible(text: str, name: str) -> str:
    """What a section printed, its files as they are on the node, and the node called gpu001."""

    def plain(match: re.Match[str]) -> str:
        (content,) = Output(match[0], 0, nonce=RECORDED).files().values()
        return f"{match[1]}{content.decode('utf-8', 'surrogateescape')}{match[3]}"

    lab = re.sub(r"/run/nodeready/lab/[\w.-]+/fs", "/run/nodeready/lab/lab/fs", text)
    return _FILE.sub(plain, lab).replace(name, "gpu001")


def verdicts(texts: dict[str, str]) -> dict[str, str]:
    policy = make_policy(POLICY)
    outputs = {n: Output(encoded(text), 0, nonce=RECORDED) for n, text in texts.items()}
    seen = {
        probe.subject: snapshot.observe(probe, {s.name: outputs[s.name] for s in probe.sections},
                                         policy)
        for probe in snapshot.probes()
    }  # fmt: skip
    return {r.check: r.status for r in snapshot.judge(snapshot.Snapshot(seen), policy)}


@pytest.mark.parametrize("profile", ["h100", pytest.param("mi300x", marks=pytest.mark.nightly)])
def test_a_recorded_look_is_judged_as_a_look_today(profile, fresh_nodes, inventory, tool):
    (node,) = fresh_nodes(1, profile=profile)
    assert tool("deploy", str(inventory([node], **POLICY)), "--yes").status in (0, 3)
    sections = snapshot.sections(snapshot.probes())
    node.write("/root/look.sh", probe_script.make_script(sections, make_policy(POLICY), RECORDED))
    said = probe_script.parse_answer(
        node.run("sh /root/look.sh </dev/null").stdout, sections, RECORDED
    )
    texts = {name: legible(output.text, node.name) for name, output in said.items()}
    if os.environ.get("NODEREADY_RECORD"):
        text = json.dumps(texts, indent=0).replace(facts.digest(), RUN_DIGEST)
        (_DATA / f"{profile}.json").write_text(f"{text}\n")
    assert recorded(profile).keys() == texts.keys()
    assert verdicts(recorded(profile)) == verdicts(texts)
