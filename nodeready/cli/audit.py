"""`nodeready audit`, `learn`, `explain`, `bundle`: what differs, what most nodes share, what a
check means, and the node's own program that audits it there. None of them changes a node.
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from nodeready import __version__
from nodeready.audit.document import FAILED, UNREACHABLE, Audit, audit_code
from nodeready.audit.peers import majority, render
from nodeready.audit.reading import Reading, readers
from nodeready.audit.recorded import (
    NO_TEXT,
    OF_VERDICTS,
    Asked,
    Source,
    collect,
    reports,
    sorted_out,
    source,
)
from nodeready.audit.run import audit_of, combined, groups, looked_at, remember
from nodeready.audit.verdict import SourceError
from nodeready.cli.options import (
    Refused,
    asking,
    option,
    output_file,
    report,
    steps_option,
    trust_option,
)
from nodeready.cli.screen import Screen, refuse_unwritable, show
from nodeready.cli.start import (
    Common,
    Nodes,
    declared,
    interrupt_on_signals,
    look,
    nodes_of,
    remember_failed,
)
from nodeready.exit_codes import OK, exit_code
from nodeready.files import write_atomically
from nodeready.policy import Policy
from nodeready.policy.policy import as_data, digest, reason
from nodeready.reports.monitoring import nagios_code
from nodeready.reports.plan import show_errors
from nodeready.reports.registry import Line, Options, find, grouped, line, names
from nodeready.reports.registry import nodes as folded
from nodeready.subjects.registry import (
    LEARNED,
    SUBJECTS,
    CheckSelection,
    SelectionError,
    meant,
    page,
    select,
)
from nodeready.subjects.result import Page
from nodeready.text import counted, now
from nodeready.transport.base import INTERRUPTED
from nodeready.transport.bundle import build
from nodeready.transport.local import Local
from nodeready.transport.look import PROBE_TIMEOUT_S, Look, SnapshotQuestion

#: The statuses of the nodes that ``--limit @last-failed`` means.
FAILING = (UNREACHABLE, FAILED, "fail", "unknown", "warn")


def document(
    nodes: Nodes,
    screen: Screen,
    selection: CheckSelection,
    looks: list[Look],
    started: str,
    *,
    reading: Reading | None = None,
) -> Audit:
    """The audit of these looks: completed by what all nodes tell, judged, and compared.

    reading: has their snapshots; None: the looks have
    """
    from nodeready.subjects.context import FleetContext, judged
    from nodeready.transport.ssh import fleet_context

    looks = looks if reading is None else reading.settled(looks)
    context = FleetContext(nodes.policies)
    if all(one.kind != INTERRUPTED for one in looks):
        context = fleet_context(nodes.carrier, nodes.policies, looks, nodes.all)
    if reading is not None:
        context = reading.combined(context, nodes.carrier.met())
        found, problem = reading.audit(
            *(looks, context, selection, started),
            lambda name: groups(nodes.all, name, len(nodes.all)),
            complete=not nodes.carrier.interrupted,
        )
        if problem and screen.verbose:
            screen.say(problem)
        return found
    context = combined(context, looks, nodes.carrier.met())
    problem = remember(looks, context)
    if problem and screen.verbose:
        screen.say(problem)
    return audit_of(
        judged(looks, context),
        selection,
        started,
        nodes.all,
        nodes.policies,
        complete=not nodes.carrier.interrupted,
    )


@click.command()
@click.argument("inventory")
@report(*names("audit"))
@option("--only", metavar="CHECK,...", help="Only these checks or subjects: gpus,nics.mtu.")
@option("--skip", metavar="CHECK,...", help="Not these.")
@option(
    "--fail-on",
    type=click.Choice(["fail", "warn"]),
    default="fail",
    help="What makes the exit status 3; 'warn': warnings and outliers, too.",
)
@option(
    "--timeout",
    type=click.IntRange(1, 3600),
    default=PROBE_TIMEOUT_S,
    metavar="S",
    help="Seconds for the look at one node, once it is connected; or for SOURCE.",
)
@option(
    "--recorded",
    metavar="SOURCE",
    help="Ask no node: its gate's last verdict, from Prometheus (a URL) or a directory.",
    general=False,
)
@option(
    "--token-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="With --recorded: the token (bearer) for Prometheus is in FILE.",
    general=False,
)
@steps_option
@asking
def audit(
    inventory: str,
    *,
    format: str,
    output: str | None,
    only: str | None,
    skip: str | None,
    fail_on: str,
    timeout: int,
    recorded: str | None,
    token_file: str | None,
    job: str | None,
    **shared: Any,
) -> int:
    """Say for every node of INVENTORY what differs from the policy. Never writes to a node.

    \b
    Examples:
      nodeready audit @local
      nodeready audit inventories/prod.py --only ptrace,gpus.ecc_errors
      nodeready audit 'gpu[001-064]' --format json -o audit.json
      nodeready audit inventories/prod.py -q --fail-on warn        # from cron
      nodeready audit inventories/prod.py --format prometheus \\
          -o /var/lib/prometheus/node-exporter/nodeready.prom
      nodeready audit inventories/prod.py --recorded http://prometheus:9090
    """
    options = Common(**shared)
    place = _source(recorded, token_file) if recorded else None
    try:
        selection = select(only, skip)
    except SelectionError as error:
        raise Refused(str(error)) from None
    refuse_unwritable(output)
    screen = options.screen()
    started = now()
    with contextlib.ExitStack() as after:
        if place is not None:
            found, nodes = _collected(
                inventory, options, place, timeout, selection, part=bool(only or skip)
            )
        else:
            nodes = nodes_of(inventory, options, job=job, tell=screen.note)
            reading = None
            if readers(len(nodes.policies)):
                # The readers are made before any connection is.
                reading = after.enter_context(Reading(nodes.policies, find("audit", format).tell))
            with nodes.carrier:
                read = SnapshotQuestion.read if reading is None else reading.read
                seen = look(nodes, screen, looked_at(selection), timeout, read=read)
                if nodes.carrier.interrupted:
                    screen.say_partial(
                        each.name for each in seen if not (each.reached or each.error)
                    )
                found = document(nodes, screen, selection, seen, started, reading=reading)
        code = audit_code(found, fail_on)
        failing = [node.name for node in found.nodes if node.status in FAILING]
        show(
            *("audit", format, found, screen),
            output=output,
            silent=screen.quiet and not failing,
            options=Options(fail_on=fail_on),
        )
        remember_failed(nodes, failing)
        return nagios_code(found) if format == "nagios" else code


# --- `audit --recorded`: the verdicts that the nodes gave themselves.

#: The options that say how a node is asked.
_ASKING = (
    *("sudo", "ssh_user", "ssh_key"),
    *("via", "job", "salloc", "topology", "ssh_processes"),
)


def _source(words: str, token_file: str | None) -> Source:
    """What ``--recorded`` names. Raises Refused, also for options that ask a node."""
    context = click.get_current_context()
    given = {
        name
        for name in context.params
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    for name in _ASKING:
        if name in given:
            raise Refused(f"--{name.replace('_', '-')}: no node is asked with --recorded")
    if "recorded" in given and re.match(r"[A-Za-z]+://[^/]*@", words):
        raise Refused(
            "--recorded: a password on the command line is seen by everybody: put the URL into "
            "NODEREADY_AUDIT_RECORDED or config.toml, or a token into --token-file"
        )
    try:
        return source(words, _token(token_file))
    except ValueError as error:
        raise Refused(f"--recorded: {error}") from None


def _token(path: str | None) -> str:
    """The token in a file, or "". Raises Refused."""
    if path is None:
        return ""
    try:
        with open(path, "rb") as file:
            token = file.read(_MOST_TOKEN + 1).decode("ascii").strip()
    except OSError as error:
        raise Refused(f"--token-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        token = ""
    if not re.fullmatch(r"[\x21-\x7e]+", token) or len(token) > _MOST_TOKEN:
        raise Refused(f"--token-file {path}: has no token: one word")
    return token


#: Bytes of a file with a token.
_MOST_TOKEN = 16384


def _collected(
    words: str,
    options: Common,
    place: Source,
    limit_s: int,
    selection: CheckSelection,
    *,
    part: bool,
) -> tuple[Audit, Nodes]:
    """The audit that the nodes' last verdicts make, and the nodes, whom nobody asked.

    part: --only or --skip left checks out

    Raises Refused, and ClickException where the verdicts cannot be collected.
    """
    from nodeready.inventory.load import endpoint
    from nodeready.subjects.gate.files import node_policy
    from nodeready.subjects.ssh_client.known_hosts import Names

    alone = {check for one in SUBJECTS.values() if one.alone for check in one.ids()}
    if not {*selection.checks} & {*alone, *OF_VERDICTS}:
        raise Refused("--only: no node judges its own gate: ask the nodes, without --recorded")
    interrupt_on_signals()
    started, screen = now(), options.screen()
    loaded, _, policies = declared(words, options)
    endpoints = {host.name: endpoint(host) for host in loaded}
    for name, one in endpoints.items():
        if one.local:
            endpoints[name] = one._replace(names=(*one.names, os.uname().nodename))
    asked = Asked(policies, node_policy, selection, everything=not part, version=__version__)
    names, total = Names(endpoints), len(loaded)
    try:
        heard, partial = collect(place, names, len(policies), limit_s)
    except SourceError as problem:
        raise click.ClickException(str(problem)) from None
    found, strangers = sorted_out(heard, names)
    moment = time.time()
    reports_, about = reports(
        found, asked, lambda name: groups(loaded, name, total), place, moment
    )
    if partial:
        screen.say(f"{place.shown}: says that its answer is partial: verdicts may be missing")
    if strangers:
        screen.note(
            f"verdicts of {counted(len(strangers), 'host')} that are no node of the inventory:"
            f" {folded(strangers)}"
        )
    if any(one.actual == NO_TEXT for node in reports_ for one in node.results):
        screen.note(
            "metrics have no texts: nodeready audit INVENTORY --limit @last-failed has them"
        )
    audit_ = Audit(started, now(), digest(policies.values()), reports_, recorded=about)
    return audit_, Nodes(Local(), policies, loaded)


@click.command()
@click.argument("inventory")
@output_file("Write it to FILE, which must not exist yet.")
@option("--force", is_flag=True, help="Replace FILE when it exists.")
@steps_option
@asking
def learn(inventory: str, output: str | None, force: bool, job: str | None, **shared: Any) -> int:
    """Write what most nodes of INVENTORY have in common as a group_data file to review.

    GPU model and count, driver, VBIOS, NIC names and speeds, RDMA ports, kernel, mounts: each
    with the number of nodes that agree, and the names of those that do not. Never writes to a
    node. Learn each kind of node by itself.

    \b
    Examples:
      nodeready learn inventories/prod.py --limit h100 -o inventories/group_data/h100.py
      nodeready learn 'gpu[001-064]'
    """
    options = Common(**shared)
    if output is not None and Path(output).exists() and not force:
        raise Refused(f"{output} exists: choose another name, or --force to replace it")
    screen = options.screen()
    nodes = nodes_of(inventory, options, job=job, tell=screen.note)
    with nodes.carrier:
        looks = look(nodes, screen, LEARNED)
        if nodes.carrier.interrupted:
            raise KeyboardInterrupt
        seen = {one.name: one.snapshot for one in looks if one.snapshot and not one.error}
        screen.tell(show_errors(looks))
        remember_failed(nodes, [one.name for one in looks if one.error], lost=True)
        if seen:
            text = render(majority(seen), list(seen), now())
            if output is None:
                click.echo(text, nl=False)
            else:
                write_atomically(Path(output), [text])
                screen.note(f"{output}: review it before you use it")
        return exit_code(
            failed=any(one.error and not one.unreachable for one in looks),
            unreachable=any(one.unreachable for one in looks),
        )


#: Longer lines of prose are hard to read.
_WIDEST = 90
_DEFAULTS = {field.name: field.default for field in fields(Policy)}


def _prose(text: str) -> str:
    """A docstring's words without its markup."""
    return re.sub(r"``(.+?)``", r"\1", text, flags=re.S)


def _wrapped(text: str, width: int, indent: str = "") -> Iterator[Line]:
    """Paragraphs, each filled anew; lists and examples stay as they stand."""
    for number, paragraph in enumerate(_prose(text).split("\n\n")):
        if number:
            yield line("")
        lines = paragraph.splitlines()
        if any(row.startswith((" ", "- ", ">>>")) or re.match(r"\w+: {2,}", row) for row in lines):
            yield from (line(indent, row) for row in lines)
            continue
        yield from (
            line(row)
            for row in textwrap.wrap(
                " ".join(lines),
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


def _part(title: str, text: str, width: int) -> Iterator[Line]:
    """A title of its own line, its text below it."""
    yield line("")
    yield line((title, "bold"))
    yield from _wrapped(text, width, "  ")


def _page(page: Page, width: int) -> Iterator[Line]:
    """The whole page of one check."""
    yield line((page.id, "bold"))
    yield line("")
    yield from _wrapped(page.meaning, width)
    for key in page.settings:
        title = f"Setting {key}, by default {_DEFAULTS[key]!r}"
        yield from _part(title, reason(key), width)
    if page.fixed_by:
        from nodeready.operations import STEPS

        does = {step.name: step.does for step in STEPS}[page.fixed_by]
        told = f"{does}\n\nnodeready deploy INVENTORY --only {page.subject}"
        yield from _part(f"Repaired by the operation {page.fixed_by}", told, width)
    by: dict[str, list[str]] = {}
    for who, what in page.acts:
        by.setdefault(who, []).append(what)
    for who, whats in by.items():
        yield line("")
        yield line((who, "bold"))
        for what in whats:
            first, *rest = textwrap.wrap(_prose(what), width - 4, break_long_words=False)
            yield line(f"  - {first}")
            yield from (line(f"    {row}") for row in rest)


def _listed(subjects: list[str], width: int) -> Iterator[Line]:
    """Every check of these subjects, a line each."""
    room = max(len(check.id) for name in subjects for check in SUBJECTS[name].checks)
    for number, subject in enumerate(subjects):
        if number:
            yield line("")
        yield from (
            line((row, "bold"))
            for row in textwrap.wrap(f"{subject}: {SUBJECTS[subject].about}", width)
        )
        for check in SUBJECTS[subject].checks:
            brief = textwrap.shorten(
                _prose(check.brief), max(30, width - room - 4), placeholder="..."
            )
            yield line(f"  {check.id:<{room}}  {brief}")


@click.command()
@click.argument("check", nargs=-1)
@option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colours on the terminal.",
)
def explain(check: tuple[str, ...], color: str) -> int:
    """Say what CHECK judges and why, which settings decide it, and what repairs what it finds.

    CHECK is an id such as ptrace.scope, as the audit prints it, or a subject such as ptrace.
    Without one, every check is listed. No node is asked.

    \b
    Examples:
      nodeready explain
      nodeready explain limits
      nodeready explain ptrace.scope
    """
    from nodeready.cli.screen import Screen

    screen = Screen(color)
    width = min(screen.width, _WIDEST)
    pages: list[Iterator[Line]] = []
    for word in check:
        if word in SUBJECTS:
            pages.append(_listed([word], width))
            continue
        try:
            pages.append(_page(page(word), width))
        except KeyError:
            close = meant(word)
            hint = f"did you mean {close}?" if close else "nodeready explain lists all"
            raise Refused(f"explain {word}: no such check or subject; {hint}") from None
    for number, rows in enumerate(pages or [_listed(list(SUBJECTS), width)]):
        if number:
            screen.show([line("")])
        screen.show(rows)
    return 0


# --- `bundle`: the node's own audit as one file.


def _one(wanted: Mapping[str, Policy]) -> Policy:
    """The policy that all of these nodes have. Refused, with the keys, when they differ."""
    if len({*wanted.values()}) == 1:
        return next(iter(wanted.values()))
    data = {name: as_data(policy) for name, policy in wanted.items()}
    keys = [key for key in next(iter(data.values())) if len(_values(data, key)) > 1]
    told = "; ".join(
        f"{key} ({', '.join(f'{folded(names)}: {value}' for value, names in _values(data, key))})"
        for key in keys
    )
    raise Refused(f"a bundle has one policy, and these nodes differ: {told}: choose by --limit")


def _values(data: Mapping[str, Mapping[str, Any]], key: str) -> list[tuple[str, list[str]]]:
    """The values of one setting with the nodes that have it, the most common first."""
    return grouped((repr(settings[key]), name) for name, settings in data.items())


@click.command()
@click.argument("inventory", required=False)
@output_file("Where the program goes.", default="nodeready.pyz")
@option("--limit", metavar="NODES", help="The policy of these nodes: gpu[001-004], a group.")
@trust_option
def bundle(inventory: str | None, *, output: str, limit: str | None, trust_inventory: bool) -> int:
    """Write the node's own program: one file that needs Python 3.9 there and nothing else.

    It looks at the node on which it runs, proves it, keeps a verdict and answers a job's prolog.
    INVENTORY gives the policy that it judges by; without one it is the default. The same content
    makes the same bytes. No node is contacted.

    \b
    Examples:
      nodeready bundle inventories/prod.py --limit h100 -o nodeready.pyz
      scp nodeready.pyz gpu001: && ssh gpu001 ./nodeready.pyz audit
    """
    refuse_unwritable(output)
    policy, whose = None, "the default policy"
    if inventory is not None:
        _, _, wanted = declared(inventory, Common(limit=limit, trust_inventory=trust_inventory))
        policy = _one(wanted)
        whose = f"the policy of {counted(len(wanted), 'node')}"
    elif limit is not None:
        raise Refused("--limit: of which INVENTORY?")
    made = build(policy)
    write_atomically(Path(output), [made], 0o755)
    known = digest([policy or Policy()])
    click.echo(f"nodeready: {output}: {len(made) / 1e6:.1f} MB, {whose} ({known})", err=True)
    return OK
