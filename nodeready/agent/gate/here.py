"""The commands `audit` and `ready` of the node's own program: this machine alone, within a limit.

They change nothing, and write a file only for `--output`. The policy is that of a given file, the
site's file, the bundle, and the defaults. Each file is a JSON object with the keys of group_data;
the first file that has a key counts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from nodeready.agent import audit_document
from nodeready.agent.asking import Answer, Key, Request, answer_of, collect, once, request
from nodeready.agent.audit_document import Audit, Ready
from nodeready.agent.local import Local
from nodeready.agent.snapshots import snapshot_question
from nodeready.core.policy import (
    AUDIT,
    READY,
    Policy,
    PolicyError,
    check_settings,
    digest,
    key_text,
)
from nodeready.core.result import FleetFacts, Result, shared
from nodeready.core.settings import closest_word, port_range
from nodeready.core.text import parse_span, utc_now
from nodeready.subjects.registry import LOOKED_AT, SUBJECTS, CheckSelection, SelectionError, select
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.subjects.ssh_client.facts import SshClient

if TYPE_CHECKING:
    from nodeready.subjects.proof.facts import ProofConfig

#: The subjects that a node observes of itself.
LOCAL_SUBJECTS = tuple(name for name in LOOKED_AT if SUBJECTS[name].judged_on_node)
LIMIT_S = 60  # seconds for an audit without `--timeout`
_RESERVE_S = 1.0  # seconds at the end of a limit for checks and reports, at most a fourth of it
#: Seconds between the limit of a section and that of the snapshot. No network delays the answer,
#: so one second is enough; each further second would take time from the probes of a busy node.
_MARGIN_S = 1


def ready(
    policy: Policy, selection: CheckSelection, budget_s: int, proofs: bool = True, level: int = 1
) -> Ready:
    """Probe, prove and judge: the proofs run beside the probes, under one budget in seconds.
    level: of dcgmi diag, if its check is selected
    """
    return Ready(audit(policy, selection, budget_s, READY, proofs=proofs, level=level), budget_s)


def audit(
    policy: Policy,
    selection: CheckSelection,
    limit_s: float = LIMIT_S,
    moment: str = AUDIT,
    *,
    proofs: bool = False,
    level: int = 1,
) -> Audit:
    """Probe this machine and judge it, within ``limit_s`` seconds even if a probe hangs.
    moment: which of the site's own checks are made; see `core.policy.site_checks`
    proofs, level: as for `ready`
    """
    started, started_s, policy_digest = utc_now(), time.monotonic(), digest([policy])
    policy = policy.at(moment).with_site_checks(selection.checks)
    time_s = limit_s - min(_RESERVE_S, limit_s / 4)
    subjects = [name for name in selection.subjects if name in LOCAL_SUBJECTS]
    transport = Local()
    (name,) = transport.nodes
    # The script's limit is shorter than its request's: it can end a slow probe and still answer.
    question = snapshot_question(name, policy, subjects, max(1, int(time_s)), _MARGIN_S)
    longer = replace(question.request, limit_s=question.request.limit_s + 1)
    requests: dict[Key, Request] = {"snapshot": longer}
    config = None
    if proofs and "proof" in selection.subjects:
        config = _proof_config(policy, time_s, transport.tag)
        requests["proofs"] = request(name, "nodeready.agent.proofs.program", config)

    def ask(requests: Mapping[Key, Request]) -> dict[Key, Answer]:
        conversations = {key: once(question) for key, question in requests.items()}
        outcomes = collect(transport, conversations, deadline=started_s + time_s)
        if transport.interrupted:
            raise KeyboardInterrupt
        return {key: answer_of(outcome) for key, outcome in outcomes.items()}

    answers = ask(requests)
    answer = answers["snapshot"]
    late = f"no answer within {time_s:.0f} s"
    unknown = question.all_unknown(late, answer.stdout[:200]) if answer.gap else None
    snapshot = unknown or question.read(answer)
    if config is not None:
        from nodeready.subjects.proof import facts
        from nodeready.subjects.proof.active import with_medians

        proof = facts.read(answers["proofs"].stdout, config)
        # After the snapshot, which would show the tests as a job's load.
        needed = {row.proof for row in SUBJECTS["proof"].checks if row.id in selection.checks}
        active_proofs = tuple(name for name in facts.ACTIVE if name in needed)
        left_s = max(1, int(started_s + time_s - time.monotonic()) - 2)
        config = replace(config, proofs=active_proofs, limit_s=left_s)
        if config.proofs:
            active = request(name, "nodeready.agent.proofs.active", config, level=level)
            text = ask({"active": active})["active"].stdout
            tested = with_medians({name: facts.read(text, config)})[name]
            proof = replace(proof, bandwidth=tested.bandwidth, diagnostic=tested.diagnostic)
        snapshot = replace(snapshot, subjects={**snapshot.subjects, "proof": proof})
    results, seconds = selection.of(judge_alone(snapshot, policy)), time.monotonic() - started_s
    report = audit_document.NodeReport.of(name, results, snapshot=snapshot, seconds=seconds)
    return Audit(started, utc_now(), policy_digest, (report,))


def _proof_config(policy: Policy, limit_s: float, tag: str) -> ProofConfig:
    from nodeready.subjects.debug_tools.facts import PY_SPY
    from nodeready.subjects.proof.facts import SESSION, ProofConfig

    nonce, py_spy = f"nodeready-{os.urandom(8).hex()}", PY_SPY if policy.py_spy_version else ""
    # This node knows no other node that it could reach.
    proofs, limit_s = tuple(name for name in SESSION if name != "peers"), max(1, int(limit_s) - 2)
    return ProofConfig(
        nonce, tag, user=policy.job_user, proofs=proofs, limit_s=limit_s, py_spy=py_spy
    )


# --- The checks without the fleet: a node does not know the host keys of its peers.

_CHECK = "ssh_client.known_hosts"


def judge_alone(snapshot: Snapshot, policy: Policy) -> list[Result]:
    """The results of all subjects in the snapshot of this node, without its peers.

    Only an audit of the fleet can compare the block of host keys in known_hosts with the keys of
    the nodes. So `ssh_client.known_hosts` fails here only if the block is missing; otherwise it
    does not apply.
    """
    observed = snapshot.subjects.get("ssh_client")
    if policy.ssh_client_mode != "known_hosts" or not isinstance(observed, SshClient):
        return judge(snapshot, policy)
    if not observed.known_hosts.digest:
        from nodeready.subjects.ssh_client.known_hosts import fleet_lines

        own_lines = fleet_lines({os.uname().nodename: snapshot}, policy.ssh_known_hosts)
        return judge(snapshot, policy, FleetFacts(known_hosts=own_lines))
    # The fleet's lines are unknown. The node's own lines replace them, so that further checks of
    # ssh_client are judged. A large block was probed without its lines.
    stand_in = observed.known_hosts.lines or ("# a block without its lines",)
    results = judge(snapshot, policy, FleetFacts(known_hosts=stand_in))
    reason = "there are keys; an audit of all nodes tells whether they are right"
    not_judged = shared(_CHECK, "na", "", reason)
    return [not_judged if result.check == _CHECK else result for result in results]


PATH = "/etc/nodeready/policy.json"  # the site's policy on this node
EMBEDDED = "policy.json"  # where the bundle has its policy, beside this module


def load(file: str | None = None) -> Policy:
    """The policy of this node.

    The value of a setting is that of ``file``, else of PATH, else of the bundle, else the default.
    Raises PolicyError, a line per problem, also when ``file`` is missing.
    """
    settings = _settings(_embedded(), "the bundle's policy")
    if (site := _read(PATH, is_required=False)) is not None:
        settings.update(_settings(site, PATH))
    if file is not None:
        settings.update(_settings(_read(file), file))
    return Policy(**settings)


def _embedded() -> bytes:
    data = b"{}"
    with contextlib.suppress(OSError):
        data = globals()["__loader__"].get_data(f"{os.path.dirname(__file__)}/{EMBEDDED}")
    return data


def _read(path: str, is_required: bool = True) -> Any:
    """The bytes of a file; None: it is missing and not required. Raises PolicyError."""
    from nodeready.core.files import read_regular

    try:
        return read_regular(path)
    except FileNotFoundError:
        if is_required:
            raise PolicyError([f"{path}: there is no such file"]) from None
        return None
    except OSError as error:
        raise PolicyError([f"{path}: {error.strerror}"]) from None


def _settings(text: bytes, source: str) -> dict[str, Any]:
    """The settings of one JSON text. Raises PolicyError, also for a key that is no setting."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError([f"{source}: is no JSON: {error}"]) from None
    if not isinstance(data, dict):
        raise PolicyError([f"{source}: must be a JSON object: {{'ptrace_scope': 0}}"])
    names = [field.name for field in fields(Policy)]
    settings: dict[str, Any] = {}
    problems = []
    for key in data.keys() - set(names):
        close = closest_word(key, names)
        hint = f"did you mean {close}?" if close else "there is no such setting"
        problems.append(f"{source}: unknown setting {key_text(key)}: {hint}")
    try:
        settings = check_settings({key: data[key] for key in names if key in data}, source)
    except PolicyError as error:
        problems += error.problems
    problems += [
        f"{source}: waivers: {waiver.check!r}: nodes: belongs into an inventory; this is one node"
        for waiver in settings.get("waivers", ())
        if waiver.nodes
    ]
    if problems:
        raise PolicyError(sorted(problems))
    return settings


# --- `audit`: what differs from the policy on this node.


def _seconds(words: str) -> int:
    """The type of an option that takes a span of time."""
    try:
        return int(parse_span(words))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def arguments(parser: ArgumentParser) -> None:
    """The options of `audit`."""
    _report_arguments(parser, "audit", "print nothing on success")
    parser.add_argument("--only", metavar="CHECK,...", help="only these checks or subjects")
    parser.add_argument("--skip", metavar="CHECK,...", help="checks or subjects to skip")
    text = "lowest status that exits with 3"
    parser.add_argument("--fail-on", choices=("fail", "warn"), default="fail", help=text)
    text = "maximum time, such as 20s or 5m; default %(default)s"
    parser.add_argument("--timeout", type=_seconds, default=LIMIT_S, metavar="TIME", help=text)


def _report_arguments(parser: ArgumentParser, kind: str, quiet: str) -> None:
    """The options of the report, which both commands have. quiet: the help of --quiet"""
    names = _formats().format_names(kind, on_node=True)
    parser.add_argument("--format", choices=names, default="table")
    text = "write the report to FILE, atomically"
    parser.add_argument("-o", "--output", metavar="FILE", help=text)
    parser.add_argument("-q", "--quiet", action="store_true", help=quiet)
    parser.add_argument("-v", "--verbose", action="count", default=0, help="every check")


def run(policy: Policy, options: Namespace) -> int:
    """`audit`. Returns the exit code. Raises PolicyError for a selection without a check."""
    try:
        chosen = select([policy.at(AUDIT)], options.only, options.skip, LOCAL_SUBJECTS)
    except SelectionError as error:
        raise PolicyError([str(error)]) from None
    document = audit(policy, chosen, max(1, options.timeout))
    code = audit_document.audit_code(document, options.fail_on)
    _report("audit", document, code, options)
    return audit_document.nagios_code(document) if options.format == "nagios" else code


# --- `ready`: go or no-go, proven by acting, within a budget.


def ready_arguments(parser: ArgumentParser) -> None:
    """The options of `ready`."""
    _report_arguments(parser, "ready", "print nothing when the node is ready")
    text = "run the proofs as this user, who will run the job"
    parser.add_argument("--user", metavar="NAME", help=text)
    parser.add_argument("--ports", metavar="FIRST-LAST", help="port range of the job")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs that the node must have")
    text = "maximum time in all, such as 20s or 5m; default %(default)s"
    parser.add_argument("--budget", type=_seconds, default=60, metavar="TIME", help=text)
    text = "also test idle GPUs: nvbandwidth, and DCGM's diagnostics at this level, 1 to 3"
    parser.add_argument("--active", type=int, choices=(1, 2, 3), metavar="LEVEL", help=text)
    parser.add_argument("--no-proofs", action="store_true", help="audit only")


def _with_options(policy: Policy, options: Namespace) -> Policy:
    """The policy, changed by the options. Raises PolicyError for a wrong value."""
    ports = options.ports
    if ports is not None:
        try:
            ports = port_range(ports)
        except ValueError as error:
            raise PolicyError([f"--ports {options.ports}: {error}"]) from None
    changes = (
        ("port_range", "--ports", ports),
        ("gpu_count", "--gpus", options.gpus),
        ("job_user", "--user", options.user),
    )
    for key, option, value in changes:
        if value is not None:
            policy = replace(policy, **check_settings({key: value}, option))
    return policy


def run_ready(policy: Policy, options: Namespace) -> int:
    """`ready`. Returns the exit code. Raises PolicyError for an option that is wrong."""
    from nodeready.subjects.proof.active import ACTIVE_CHECKS

    policy = _with_options(policy, options)
    subjects = LOCAL_SUBJECTS if options.no_proofs else (*LOCAL_SUBJECTS, "proof")
    named = ACTIVE_CHECKS if options.active and not options.no_proofs else ()
    chosen = select([policy.at(READY)], subjects=subjects, named=named)
    budget_s, proofs = max(1, options.budget), not options.no_proofs
    document = ready(policy, chosen, budget_s, proofs, options.active or 1)
    code = audit_document.ready_code(document)
    _report("ready", document, code, options)
    return code


# --- The report: the same formats as on the control machine.


def _formats() -> Any:
    """The registry of formats. By its name, because the room of reports stands above this one."""
    return importlib.import_module("nodeready.reports.registry")


def rendered(kind: str, document: Audit | Ready, form: str, verbose: int = 0) -> Iterator[str]:
    """The report of an audit (kind "audit"), or of a go or no-go ("ready"), in pieces."""
    formats = _formats()
    texts: Iterator[str] = formats.find_format(kind, form).render(
        document, formats.Options(verbose, lines=0)
    )
    return texts


def _report(kind: str, document: Audit | Ready, code: int, options: Namespace) -> None:
    """Write the report as the options say; --quiet omits only the table of a success."""
    if code or not options.quiet or options.output or options.format != "table":
        write(rendered(kind, document, options.format, options.verbose), options.output)


def write(texts: Iterable[str], output: str | None) -> None:
    """Write a report to a file, atomically, or to standard output. Raises OSError."""
    if output is None:
        sys.stdout.writelines(texts)
        return
    from pathlib import Path

    from nodeready.core.files import write_atomically

    write_atomically(Path(output), texts)
