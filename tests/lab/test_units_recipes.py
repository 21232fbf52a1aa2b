"""The lines of docs/audit.md that send a message when nodes change."""

import http.server
import json
import shutil
import subprocess
import threading

from nodeready.reports import json_report
from tests.builders.fleets import outcomes
from tests.command import cannot_run
from tests.paths import DOCS

SECTION = (DOCS / "audit.md").read_text().partition("### A message when nodes change")[2]
BLOCK = SECTION.partition("```sh\n")[2].partition("```")[0]


def test_a_change_of_a_node_is_sent_once_and_again_if_it_was_refused(tmp_path):
    for program in ("jq", "curl", "diff"):
        if not shutil.which(program):
            cannot_run(f"not installed: {program}")
    bodies, statuses = [], [503, 200, 200]

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(statuses[len(bodies) - 1])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    (tmp_path / "hook.conf").write_text(
        f'url = "http://127.0.0.1:{server.server_port}/hook"\n'
        'header = "Content-Type: application/json"\n'
    )
    audit, *filters = BLOCK.splitlines()
    assert audit == "nodeready audit prod.py -q --format json -o new.json"
    sent = []
    for name in ("ok", "ok", "mixed", "mixed", "mixed", "ok"):
        (tmp_path / "new.json").write_text("".join(json_report.render(outcomes()[name])))
        words = ["sh", "-c", "\n".join(filters)]
        subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
        sent.append(len(bodies))
    server.shutdown()
    server.server_close()
    # Nothing while all nodes are good; a refused message, and again; nothing new; the recovery.
    assert sent == [0, 0, 1, 2, 2, 3], bodies
    assert bodies[0] == bodies[1]
    assert {kind for kind, _ in bodies} == {"application/json"}
    assert "fail" in bodies[0][1]["text"]
