"""What the nodes saw of each other, attributed and judged: pure."""

from __future__ import annotations

import pytest

from nodeready.policy import Policy
from nodeready.ready.localize import reach
from nodeready.ready.mesh import peers_of, ring_and_skips
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof.facts import (
    Answer,
    PdshRun,
    Peers,
    Proved,
    RcmdDefault,
    SshTry,
    User,
)
from nodeready.subjects.proof.reach import pdsh, ssh
from nodeready.subjects.result import ADMIN, NODEREADY
from nodeready.subjects.ssh_client.checks import CAUSES, cause_of

CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Please contact your system administrator.
Add correct host key in /root/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /etc/ssh/ssh_known_hosts:3
Host key for node003 has changed and you have requested strict checking.
Host key verification failed.
"""
REFUSED = "ssh: connect to host node003 port 22: Connection refused"
DENIED = "ml@node003: Permission denied (publickey,keyboard-interactive)."
UNKNOWN_KEY = "Host key verification failed."


@pytest.mark.parametrize(
    ("said", "cause", "line"),
    [
        (CHANGED, "changed_key", "Offending ED25519 key in /etc/ssh/ssh_known_hosts:3"),
        (UNKNOWN_KEY, "unknown_key", UNKNOWN_KEY),
        ("No ED25519 host key is known for n and you have requested strict checking.\n"
         "Host key verification failed.", "unknown_key", None),
        ("WARNING: REVOKED HOST KEY DETECTED!\nHost key verification failed.", "revoked_key",
         None),
        (DENIED, "denied", DENIED),
        ("Received disconnect from 10.0.0.3 port 22:2: Too many authentication failures",
         "too_many_keys", None),
        ("Permissions 0644 for '/home/ml/.ssh/id_rsa' are too open.\nLoad key failed\n" + DENIED,
         "open_key", "Permissions 0644 for '/home/ml/.ssh/id_rsa' are too open."),
        ("Bad owner or permissions on /home/ml/.ssh/config", "config_owner", None),
        # readconf.c: what is wrong stands in the line before the last one.
        ("/home/ml/.ssh/config line 8: unsupported option \"maybe\".\n"
         "/home/ml/.ssh/config: terminating, 1 bad configuration options", "config",
         "/home/ml/.ssh/config line 8: unsupported option \"maybe\"."),
        ("/etc/ssh/ssh_config line 3: Unsupported option \"x\"\n"
         "/etc/ssh/ssh_config line 9: missing argument.\n"
         "/etc/ssh/ssh_config: terminating, 1 bad configuration options", "config",
         "/etc/ssh/ssh_config line 9: missing argument."),
        ("Can't open user config file /etc/ssh/ssh_config.d/x.conf: Permission denied\n"
         "/etc/ssh/ssh_config: terminating, 2 bad configuration options", "config_closed",
         "Can't open user config file /etc/ssh/ssh_config.d/x.conf: Permission denied"),
        # sshconnect.c: a connection through a command has no address.
        ("/bin/bash: line 1: /nowhere: No such file or directory\n"
         "kex_exchange_identification: Connection closed by remote host\n"
         "Connection closed by UNKNOWN port 65535", "proxy",
         "/bin/bash: line 1: /nowhere: No such file or directory"),
        ("kex_exchange_identification: Connection closed by remote host\n"
         "Connection closed by UNKNOWN port 65535", "proxy",
         "Connection closed by UNKNOWN port 65535"),
        ("ssh: Could not resolve hostname jump: Name or service not known\n"
         "kex_exchange_identification: Connection closed by remote host\n"
         "Connection closed by UNKNOWN port 65535", "proxy",
         "ssh: Could not resolve hostname jump: Name or service not known"),
        ("Host key verification failed.\nConnection closed by UNKNOWN port 65535", "proxy",
         "Host key verification failed."),
        ("Cannot execute command-line and remote command.", "remote_command", None),
        ("ssh: error while loading shared libraries: libcrypto.so.3: cannot open shared object "
         "file: No such file or directory", "library", None),
        ("no such identity: /nowhere: No such file or directory\n" + DENIED, "no_key",
         "no such identity: /nowhere: No such file or directory"),
        ('Load key "/home/ml/.ssh/id_rsa": Permission denied\n' + DENIED, "unusable_key",
         'Load key "/home/ml/.ssh/id_rsa": Permission denied'),
        ("@   WARNING: UNPROTECTED PRIVATE KEY FILE!   @\n"
         "Permissions 0644 for '/home/ml/.ssh/id_rsa' are too open.\n" + DENIED, "open_key",
         "Permissions 0644 for '/home/ml/.ssh/id_rsa' are too open."),
        # sshd with PAM: the text of /etc/nologin, then the end.
        ("Maintenance until 5 pm\nConnection closed by 10.0.0.3 port 22", "closed",
         "Maintenance until 5 pm"),
        ("Warning: Permanently added '10.0.0.3' (ED25519) to the list of known hosts.\n"
         "Connection closed by 10.0.0.3 port 22", "closed",
         "Connection closed by 10.0.0.3 port 22"),
        ("You are required to change your password immediately (administrator enforced).\n"
         "WARNING: Your password has expired.\nPassword change required but no TTY available.",
         "password", "You are required to change your password immediately (administrator "
         "enforced)."),
        ("WARNING: Your password has expired.\nYou must change your password now and login "
         "again!", "password", None),
        ("This account is currently not available.", "no_shell", None),
        # sshd 9.8 and later, with PerSourcePenalties.
        ("Not allowed at this time\nkex_exchange_identification: Connection closed by remote "
         "host", "startups", "Not allowed at this time"),
        ("kex_exchange_identification: read: Connection reset by peer\n"
         "Connection reset by 10.0.0.3 port 22", "startups", None),
        ("ssh_exchange_identification: Connection closed by remote host", "startups", None),
        ("Unable to negotiate with 10.0.0.3 port 22: no matching MAC found. Their offer: x",
         "algorithms", None),
        ("Host key ED25519 SHA256:x revoked by file /etc/ssh/revoked", "revoked_key", None),
        # Of the shell there, not of ssh.
        ("bash: line 1: /usr/bin/uname: Permission denied", "other", None),
        ("/home/ml/.ssh/config: line 2: Bad configuration option: hots\n"
         "/home/ml/.ssh/config: terminating, 1 bad configuration options", "config",
         "/home/ml/.ssh/config: line 2: Bad configuration option: hots"),
        (REFUSED, "refused", REFUSED),
        ("ssh: Could not resolve hostname node003: Name or service not known", "resolve", None),
        ("ssh: connect to host node003 port 22: No route to host", "no_route", None),
        ("ssh: connect to host node003 port 22: Connection timed out", "timeout", None),
        ("Connection timed out during banner exchange\n"
         "Connection to 10.0.0.3 port 22 timed out", "silent", None),
        ("kex_exchange_identification: Connection closed by remote host", "startups", None),
        ("Connection reset by 10.0.0.3 port 22", "closed", None),
        ("Access denied by pam_slurm_adopt: you have no active jobs on this node\n"
         "Connection closed by 10.0.0.3 port 22", "slurm", None),
        ("\"System is going down. Unprivileged users are not permitted to log in anymore.\"\n"
         "Connection closed by 10.0.0.3 port 22", "nologin", None),
        ("Your account has expired; please contact your system administrator.\n"
         "Connection closed by 10.0.0.3 port 22", "expired", None),
        ("Unable to negotiate with 10.0.0.3 port 22: no matching host key type found.",
         "host_key_type", None),
        ("first\n\nsomething new \x1b[2J\n", "other", "something new \x1b[2J"),
        ("", "other", "ssh says nothing"),
    ],
)  # fmt: skip
def test_the_cause_by_what_ssh_says(said, cause, line):
    assert cause_of(said)[0] == cause
    if line is not None:
        assert cause_of(said)[1] == line


def test_every_cause_has_words_and_a_fix_for_any_text():
    for cause in CAUSES.values():
        told = (cause.words + cause.fix).format(user="ml", said="{said} {0}", file="f")
        assert cause.words, cause.key
        assert bool(cause.fix) != cause.deploy, cause.key
        assert "{user}" not in told


NAMES = [f"node00{number}" for number in range(1, 7)]


class Fleet:
    """Nodes that all reach each other, until something is said to be broken."""

    def __init__(self, count):
        self.names = NAMES[:count]
        self.host = {name: name for name in self.names}
        self.peers = peers_of(self.names, ring_and_skips(count))
        self.broken = {}
        self.pdsh = {}
        self.defaults = {}
        self.unreachable = set()

    def breaks(self, source, target, said="", rc=255, answer=""):
        """source, target: a name, or None for every node"""
        for one in self.names if source is None else [source]:
            for other in self.names if target is None else [target]:
                self.broken[one, other] = SshTry(other, rc, answer, said)

    def saw(self, name):
        tries = tuple(
            self.broken.get((name, peer), SshTry(peer, 0, self.host[peer], ""))
            for peer in self.peers[name]
        )
        asked = tuple(one.name for one in tries if one.rc == 0 and one.answer)
        run = PdshRun(asked, tuple(Answer(peer, self.host[peer]) for peer in asked), 0, "")
        own = self.defaults.get(name, ())
        return Peers(self.host[name], True, tries, True, self.pdsh.get(name, run), own)

    def judged(self, policy=None, lost=()):
        seen = {name: self.saw(name) for name in self.names if name not in lost}
        found = reach(seen, self.unreachable)
        results = {}
        for name in self.names:
            peers = seen.get(name, Unknown("did not finish in time"))
            proved = Proved(User("ml", 1000, True, ""), peers=peers, reach=found.get(name))
            want = policy or Policy()
            results[name] = ssh(proved, want), pdsh(proved, want)
        return results

    def bad(self, which=0, **how):
        """The results of ssh (0) or pdsh (1) that are bad, by node."""
        return {name: both[which] for name, both in self.judged(**how).items() if both[which].bad}


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_all_is_well(count):
    for shell, parallel in Fleet(count).judged().values():
        assert (shell.status, parallel.status) == ("ok", "ok")


def test_a_node_alone():
    (both,) = Fleet(1).judged().values()
    assert {one.status for one in both} == {"na"}
    assert {one.actual for one in both} == {"no other node to try"}


def test_a_node_that_nobody_gets_into_is_named_once():
    fleet = Fleet(6)
    fleet.breaks(None, "node003", REFUSED)
    (found,) = fleet.bad().values()
    assert fleet.bad().keys() == {"node003"}
    assert found.actual == "3 of 3 peers cannot log in: connection refused; the way back works"
    assert found.owner == ADMIN
    assert fleet.bad(1) == {}
    results = fleet.judged()
    assert results["node002"][0].actual == "2 of 3 peers; node003: see there"
    assert results["node002"][1].actual == "2 of 2 peers"


def test_it_is_named_even_when_it_tells_nothing_itself():
    fleet = Fleet(6)
    fleet.breaks(None, "node003", UNKNOWN_KEY)
    (found,) = fleet.bad(lost={"node003"}).values()
    assert found.actual == "3 of 3 peers cannot log in: the host key is unknown, so ssh would ask"
    assert (found.status, found.owner) == ("fail", NODEREADY)
    assert fleet.judged(lost={"node002"})["node002"][0].status == "unknown"


def test_a_node_that_gets_nowhere_is_named_once():
    fleet = Fleet(6)
    fleet.breaks("node002", None, DENIED)
    (found,) = fleet.bad().values()
    assert found.actual == (
        "cannot log in to 3 of 3 peers: no key of ml is accepted; the way back works"
    )
    both = fleet.judged()["node002"]
    assert (both[1].status, both[1].actual) == ("na", "ssh reaches no peer: see proof.ssh")


def test_one_pair_stays_with_its_source():
    fleet = Fleet(4)
    fleet.breaks("node001", "node003", REFUSED)
    assert {name: one.actual for name, one in fleet.bad().items()} == {
        "node001": "cannot log in to node003: connection refused; the way back works"
    }


def test_of_two_nodes_each_answers_for_its_own_login():
    fleet = Fleet(2)
    fleet.breaks("node001", "node002", UNKNOWN_KEY)
    fleet.breaks("node002", "node001", CHANGED)
    assert {name: one.actual for name, one in fleet.bad().items()} == {
        "node001": "cannot log in to node002: the host key is unknown, so ssh would ask",
        "node002": "cannot log in to node001: the host key is not the one that is known",
    }
    assert fleet.bad()["node002"].source == "/etc/ssh/ssh_known_hosts:3"


@pytest.mark.parametrize("count", [3, 4, 6])
def test_where_nothing_works_nobody_is_well(count):
    fleet = Fleet(count)
    fleet.breaks(None, None, UNKNOWN_KEY)
    bad = fleet.bad()
    assert bad.keys() == {*fleet.names}
    assert all(one.fix.startswith("nodeready deploy") for one in bad.values())


def test_a_node_that_nobody_can_reach_is_no_peer():
    fleet = Fleet(3)
    fleet.breaks(None, "node003", REFUSED)
    fleet.unreachable = {"node003"}
    results = fleet.judged(lost={"node003"})
    assert [results[name][0].actual for name in fleet.names[:2]] == ["1 of 1 peers"] * 2


@pytest.mark.parametrize(
    ("rc", "answer", "said", "actual"),
    [
        (0, "node004", "", "node004 answers"),
        (0, "node003.cluster.example", "", None),
        (0, "NODE003", "", None),
        (0, "", "", "the login runs no command (exit status 0)"),
        (1, "This account is currently not available.", "",
         "the login shell of ml there is nologin"),
        (127, "", "uname: not found", "the login runs no command (uname: not found)"),
        (None, "", "", "timed out"),
        (None, "", UNKNOWN_KEY, "the host key is unknown, so ssh would ask"),
        (255, "", "", "ssh says nothing"),
    ],
)  # fmt: skip
def test_what_one_login_shows(rc, answer, said, actual):
    fleet = Fleet(4)
    fleet.breaks("node001", "node003", said, rc, answer)
    found = fleet.bad()
    if actual is None:
        assert found == {}
    else:
        assert found["node001"].actual.startswith(f"cannot log in to node003: {actual}")
        assert found["node001"].fix
        assert fleet.bad(1) == {}


def test_what_ssh_says_is_data():
    fleet = Fleet(2)
    fleet.breaks("node001", "node002", "{user} {0} %s {said}")
    assert "{user} {0} %s {said}" in fleet.bad()["node001"].actual


def test_nodes_with_one_host_name():
    fleet = Fleet(4)
    fleet.host["node003"] = "node002"
    bad = fleet.bad()
    # Whom the inventory calls so has the name: a node cannot fail another by taking it.
    assert bad.keys() == {"node003"}
    assert bad["node003"].actual.startswith("has the same host name as node002")
    assert fleet.bad(1) == {}
    fleet.host.update(node002="gold", node003="gold")
    assert fleet.bad().keys() == {"node002", "node003"}


@pytest.mark.parametrize("text", ["", "node002"])
def test_a_node_that_answers_nobody_s_pdsh_as_itself_fails_nobody_else(text):
    fleet = Fleet(6)
    for name in fleet.names:
        rows = [(peer, text if peer == "node003" else peer) for peer in fleet.peers[name]]
        fleet.pdsh[name] = PdshRun(
            fleet.peers[name], tuple(Answer(*row) for row in rows if row[1]), 0, ""
        )
    assert fleet.bad() == {}
    bad = fleet.bad(1)
    assert bad.keys() == {"node003"}
    assert bad["node003"].actual.startswith("does not answer the pdsh of node001, node002")


def test_a_node_that_refuses_some_of_its_peers_is_named_itself():
    fleet = Fleet(6)
    fleet.peers = peers_of(fleet.names, range(1, 6))
    for source in ("node001", "node002"):
        fleet.breaks(source, "node003", REFUSED)
    assert fleet.bad().keys() == {"node003"}


def test_the_key_of_ones_own_file_is_shown():
    fleet = Fleet(2)
    fleet.breaks("node001", "node002", CHANGED.replace("/etc/ssh/ssh_", "/home/ml/.ssh/"))
    assert fleet.bad()["node001"].source == "/home/ml/.ssh/known_hosts:3"


def pdsh_of(fleet, answers, said="", rc=0):
    asked = fleet.peers["node001"]
    rows = tuple(Answer(*pair) for pair in answers)
    fleet.pdsh["node001"] = PdshRun(asked, rows, rc, said)


@pytest.mark.parametrize(
    ("answers", "said", "rc", "actual"),
    [
        ([("node002", "node002"), ("node003", "node003")], "", 0, None),
        ([("node003", "node003"), ("node002", "noise"), ("node002", "node002"), ("x", "y")],
         "", 1, None),
        ([("node002", "node002")],
         "node003: ssh: connect to host node003 port 22: Connection refused\n"
         "pdsh@node001: node003: ssh exited with exit code 255", 0,
         "1 of 2 peers did not answer: node003 (ssh: connect to host node003 port 22: "
         "Connection refused)"),
        ([("node002", "node002"), ("node003", "")], "pdsh@node001: node003: command timeout", 0,
         "1 of 2 peers did not answer: node003 (command timeout)"),
        ([], "", None,
         "2 of 2 peers did not answer: node002 (timed out), node003 (timed out)"),
        ([], 'No such rcmd module "ssh"', 1, 'no answer: No such rcmd module "ssh"'),
        ([("node002", "node002"), ("node003", "node002")], "", 0,
         "2 peers, host names: 1: node002 and node003 say node002"),
    ],
)  # fmt: skip
def test_answers_of_pdsh_are_counted(answers, said, rc, actual):
    fleet = Fleet(4)
    pdsh_of(fleet, answers, said, rc)
    found = fleet.bad(1)
    if actual is None:
        assert found == {}
    else:
        assert {name: one.actual for name, one in found.items()} == {"node001": actual}
        assert found["node001"].fix


def test_pdsh_leaves_out_the_domain_that_all_have():
    fleet = Fleet(1)
    tries = tuple(SshTry(f"{name}.example", 0, name, "") for name in ("a", "b"))
    run = PdshRun(("a.example", "b.example"), (Answer("a", "a"), Answer("b", "b")), 0, "")
    found = reach({"node001": Peers("node001", True, tries, True, run)})["node001"]
    assert (found.distinct, found.missing, found.same) == (2, (), ())
    assert fleet.unreachable == set()


@pytest.mark.parametrize(("packages", "status"), [(("gdb", "pdsh"), "fail"), (("gdb",), "na")])
def test_pdsh_that_is_not_installed(packages, status):
    peers = Peers("a", True, (SshTry("b", 0, "b", ""),), False, None)
    seen = Proved(User("ml", 1, True, ""), peers=peers, reach=reach({"a": peers})["a"])
    assert pdsh(seen, Policy(packages=packages)).status == status


def test_no_ssh():
    peers = Peers("a", False, (), False, None)
    seen = Proved(User("ml", 1, True, ""), peers=peers, reach=reach({"a": peers})["a"])
    assert ssh(seen, Policy()).actual.startswith("no ssh that the user can run")


def test_no_session_is_told_once():
    seen = Proved(User("ml", -1, True, "no such user: ml"))
    for result in (ssh(seen, Policy()), pdsh(seen, Policy())):
        assert (result.status, result.actual) == ("na", "no session: see proof.user")


def default(rcmd="rsh", value="rsh", by="", kind="login", *, works=False, said=""):
    return RcmdDefault(kind, rcmd, value, by, works or rcmd == "ssh", said)


MODULE = 'pdsh: No such rcmd module "mrsh"'
DEPLOY = "nodeready deploy INVENTORY --only pdsh"
DEFAULTS = {
    "ssh in both": ((default("ssh", "ssh"), default("ssh", None, kind="interactive")), None, ""),
    "another one that works": ((default("mrsh", "mrsh", works=True),), None, ""),
    "a shell that tells nothing": ((default("", None),), None, ""),
    "none asked": ((), None, ""),
    "the build's": (
        (default(value=None), default(value=None, kind="interactive")),
        "pdsh takes rsh in ml's login and interactive shells, by default",
        DEPLOY,
    ),
    "/etc/environment": (
        (default(by="/etc/environment:3"),),
        "pdsh takes rsh in ml's login shell: PDSH_RCMD_TYPE is rsh by /etc/environment:3",
        DEPLOY,
    ),
    "profile.d": ((default(by="/etc/profile.d/site.sh:3"),), "by /etc/profile.d/site.sh", DEPLOY),
    "profile.d, behind all others": (
        (default(by="/etc/profile.d/~site.sh:3"),),
        "by /etc/profile.d/~site.sh:3",
        "remove the line /etc/profile.d/~site.sh:3",
    ),
    "a file that profile.d reads": (
        (default(by="/opt/site/env.sh:9"),),
        "by /opt/site/env.sh:9",
        "remove the line /opt/site/env.sh:9",
    ),
    "~/.bashrc": (
        (default("ssh", "ssh"), default(by="/home/ml/.bashrc:2", kind="interactive")),
        "pdsh takes rsh in ml's interactive shell: PDSH_RCMD_TYPE is rsh by /home/ml/.bashrc:2",
        "remove the line /home/ml/.bashrc:2",
    ),
    "an alias": (
        (default("rsh", "ssh", "/home/ml/.bashrc:7", "interactive"),),
        "interactive shell by /home/ml/.bashrc:7",
        "remove the line /home/ml/.bashrc:7",
    ),
    "unset again": (
        (default("rsh", None, "/home/ml/.bashrc:7", "interactive"),),
        "interactive shell by /home/ml/.bashrc:7",
        "remove the line /home/ml/.bashrc:7",
    ),
    "nobody knows where": (
        (default(),),
        "PDSH_RCMD_TYPE is rsh",
        "PDSH_RCMD_TYPE=ssh in ml's start-up files",
    ),
    "another one that brings nothing": ((default("exec", "exec"),), "takes exec", "start-up"),
    "no such module": (
        (default("", "mrsh", "/home/ml/.profile:1", said=MODULE),),
        f"pdsh does not start ({MODULE}) in ml's login shell: PDSH_RCMD_TYPE is mrsh by",
        "remove the line /home/ml/.profile:1",
    ),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_pdsh_s_own_remote_command(name):
    """pdsh(1): -R, PDSH_RCMD_TYPE; bash(1): INVOCATION."""
    told, actual, fix = DEFAULTS[name]
    fleet = Fleet(4)
    fleet.defaults["node001"] = told
    found = fleet.bad(1)
    if actual is None:
        assert found == {}
    else:
        assert found.keys() == {"node001"}
        result = found["node001"]
        assert (actual in result.actual, fix in result.fix) == (True, True), result
        assert result.fixable == (result.fix == DEPLOY)
