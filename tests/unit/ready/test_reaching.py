"""How nodes logged in to each other by ssh and pdsh: attributed and judged."""

import pytest

from nodeready.core.base import Unknown
from nodeready.core.policy import Policy
from nodeready.runs.ready.mesh import peers_of, ring_and_skips
from nodeready.runs.ready.reach import reach
from nodeready.subjects.proof import facts
from nodeready.subjects.proof.checks import pdsh, ssh
from nodeready.subjects.proof.facts import PdshAnswer, PdshRun, Peers, Proved, SshTry, User
from nodeready.subjects.ssh_client.checks import CAUSES, cause_of
from tests.builders.verdicts import assert_says
from tests.cases import cases, read_table

POLICY = Policy()
WORDS = read_table(__file__, "WORDS")
ML = User("ml", 1000, True, "")


@pytest.mark.parametrize("case", cases(__file__, "data/ssh_causes.json"))
def test_the_cause_and_the_line_that_shows_it(case):
    line = case.get("line", 0)
    shown = case["said"].splitlines()[line] if isinstance(line, int) else line
    assert cause_of(case["said"]) == (case["cause"], shown)


def test_every_cause_has_words_and_a_fix_for_any_text():
    for cause in CAUSES.values():
        text = (cause.words + cause.fix).format(user="ml", said="{said} {0}", file="f")
        assert cause.words, cause.key
        assert bool(cause.fix) != cause.deploy, cause.key
        assert "{user}" not in text


class Fleet:
    """Nodes that all reach each other, until something is broken."""

    def __init__(self, count):
        self.names = [f"node00{number}" for number in range(1, count + 1)]
        self.host = {name: name for name in self.names}
        self.peers = peers_of(self.names, ring_and_skips(count))
        self.broken, self.pdsh, self.defaults, self.unreachable = {}, {}, {}, set()

    def breaks(self, source, target, words="", rc=255, answer="", **more):
        """source, target: a name, or None for every node"""
        for item in self.names if source is None else [source]:
            for other in self.names if target is None else [target]:
                self.broken[item, other] = SshTry(other, rc, answer, words, **more)

    def peers_of(self, name):
        tries = tuple(
            self.broken.get((name, peer), SshTry(peer, 0, self.host[peer], ""))
            for peer in self.peers[name]
        )
        targets = tuple(item.name for item in tries if item.rc == 0 and item.answer)
        run = PdshRun(targets, tuple(PdshAnswer(peer, self.host[peer]) for peer in targets), 0, "")
        own = self.defaults.get(name, ())
        return Peers(self.host[name], True, tries, True, self.pdsh.get(name, run), own)

    def results(self, lost=()):
        by_name = {name: self.peers_of(name) for name in self.names if name not in lost}
        reached = reach(by_name, self.unreachable)
        results = {}
        for name in self.names:
            peers = by_name.get(name, Unknown("did not finish in time"))
            proved = Proved(ML, peers=peers, reach=reached.get(name))
            results[name] = ssh(proved, POLICY), pdsh(proved, POLICY)
        return results

    def bad(self, which=0, **how):
        return {name: both[which] for name, both in self.results(**how).items() if both[which].bad}

    def actual(self, which=0, **how):
        return {name: result.actual for name, result in self.bad(which, **how).items()}


@pytest.mark.parametrize("case", cases(__file__, "data/logins_of_fleets.json"))
def test_bad_nodes_are_named_once_and_others_are_excused(case):
    fleet, lost = Fleet(case["nodes"]), case.get("lost", ())
    fleet.host.update(case.get("hosts", {}))
    fleet.unreachable = {*case.get("unreachable", ())}
    for row in case.get("broken", ()):
        pair, _, words = row.partition(" ")
        source, target = (None if name == "*" else name for name in pair.split(">"))
        fleet.breaks(source, target, WORDS.get(words, words))
    results, bad = fleet.results(lost), fleet.bad(lost=lost)
    assert {name: item.actual for name, item in bad.items()} == case["ssh"]
    assert fleet.bad(1, lost=lost).keys() == {*lost}
    if "owner" in case:
        assert {result.owner for result in bad.values()} == {case["owner"]}
    for name, texts in case.get("others", {}).items():
        for result, text in zip(results[name], texts, strict=False):
            assert result.actual == (text or result.actual)
    assert all(results[name][0].status in ("unknown", "fail") for name in lost)


def test_a_node_alone_has_no_peer():
    (both,) = Fleet(1).results().values()
    assert [(item.status, item.actual) for item in both] == [("na", "no other node to try")] * 2


@pytest.mark.parametrize("count", [3, 4, 6])
def test_where_nothing_works_no_node_is_well(count):
    fleet = Fleet(count)
    fleet.breaks(None, None, WORDS["unknown_key"])
    bad = fleet.bad()
    assert bad.keys() == {*fleet.names}
    assert all(item.fix.startswith("nodeready deploy") for item in bad.values())


def test_the_known_hosts_line_of_a_changed_key_is_the_source():
    fleet = Fleet(2)
    for file in ("/etc/ssh/ssh_known_hosts", "/home/ml/.ssh/known_hosts"):
        words = WORDS["changed"].replace("/etc/ssh/ssh_known_hosts", file)
        fleet.breaks("node002", "node001", words)
        assert fleet.bad()["node002"].source == f"{file}:3"


@pytest.mark.parametrize("case", cases(__file__, "data/logins.json"))
def test_a_single_login(case):
    fleet = Fleet(4)
    more = {key: case[key] for key in ("overrides", "forced") if key in case}
    fleet.breaks("node001", "node003", case["said"], case["rc"], case["answer"], **more)
    bad = fleet.bad()
    if case["actual"] is None:
        assert bad == {}
    else:
        assert bad["node001"].actual.startswith(f"cannot log in to node003: {case['actual']}")
        assert bad["node001"].fix
        assert fleet.bad(1) == {}


@pytest.mark.parametrize("text", ["", "node002"])
def test_a_node_that_answers_no_pdsh_as_itself_fails_no_other(text):
    fleet = Fleet(6)
    for name in fleet.names:
        rows = [(peer, text if peer == "node003" else peer) for peer in fleet.peers[name]]
        answers = tuple(PdshAnswer(*row) for row in rows if row[1])
        fleet.pdsh[name] = PdshRun(fleet.peers[name], answers, 0, "")
    assert fleet.bad() == {}
    assert fleet.bad(1).keys() == {"node003"}
    assert fleet.actual(1)["node003"].startswith("does not answer the pdsh of node001, node002")


@pytest.mark.parametrize("case", cases(__file__, "data/pdsh_answers.json"))
def test_answers_of_pdsh_are_counted(case):
    fleet = Fleet(4)
    answers = tuple(PdshAnswer(*pair) for pair in case["answers"])
    fleet.pdsh["node001"] = PdshRun(fleet.peers["node001"], answers, case["rc"], case["said"])
    bad = fleet.bad(1)
    assert fleet.actual(1) == ({"node001": case["actual"]} if case["actual"] else {})
    assert all(item.fix for item in bad.values())


def judged(check, peers, policy=POLICY):
    """The result of a node that tried its peers alone."""
    return check(Proved(ML, peers=peers, reach=reach({"a": peers})["a"]), policy)


def test_pdsh_leaves_out_the_domain_that_all_have():
    tries = tuple(SshTry(f"{name}.example", 0, name, "") for name in ("a", "b"))
    run = PdshRun(("a.example", "b.example"), (PdshAnswer("a", "a"), PdshAnswer("b", "b")), 0, "")
    reached = reach({"node001": Peers("node001", True, tries, True, run)})["node001"]
    assert (reached.distinct, reached.missing, reached.same) == (2, (), ())


def test_a_pdshrc_that_ends_the_shell_fails():
    tries = (SshTry("b", 0, "b", ""),)
    run = PdshRun(("b",), (PdshAnswer("b", "b"),), 0, "")
    for said, status in (("", "ok"), ("exit status 1", "fail: exit status 1")):
        assert_says(judged(pdsh, Peers("a", True, tries, True, run, pdshrc=said)), status)


def test_without_pdsh_ssh_or_a_session():
    peers = Peers("a", True, (SshTry("b", 0, "b", ""),), False, None)
    for packages, status in ((("gdb", "pdsh"), "fail"), (("gdb",), "na")):
        assert judged(pdsh, peers, Policy(packages=packages)).status == status
    result = judged(ssh, Peers("a", False, (), False, None))
    assert result.actual.startswith("no ssh that the user can run")
    proved = Proved(User("ml", -1, True, "no such user: ml"))
    for check in (ssh, pdsh):
        result = check(proved, POLICY)
        assert (result.status, result.actual) == ("na", "no session: see proof.user")


@pytest.mark.parametrize("case", cases(__file__, "data/pdsh_defaults.json"))
def test_the_remote_command_that_pdsh_takes_by_default(case):
    """pdsh(1): -R, PDSH_RCMD_TYPE; bash(1): INVOCATION."""
    fleet = Fleet(4)
    fleet.defaults["node001"] = tuple(
        facts.RcmdDefault(
            **{"kind": "login", "set_by": "", "works": row["rcmd"] == "ssh", "messages": "", **row}
        )
        for row in case["defaults"]
    )
    bad = fleet.bad(1)
    if case["actual"] is None:
        assert bad == {}
    else:
        assert bad.keys() == {"node001"}
        result = bad["node001"]
        is_fixable = case["fix"] == "deploy"
        assert case["actual"] in result.actual
        fix = "nodeready deploy INVENTORY --only pdsh" if is_fixable else case["fix"]
        assert fix in result.fix
        assert result.fixable is is_fixable
