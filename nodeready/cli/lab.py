"""`nodeready lab`: a cluster of real SSH nodes on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

import click

from nodeready.cli.options import candidates_of
from nodeready.core.exit_codes import exit_code
from nodeready.fleet.inventory.nodeset import fold
from nodeready.lab import PROFILES, Lab, LabError, down, state
from nodeready.lab.faults import FAULTS, GROUPS
from nodeready.lab.host import MAX_NODES, can_raise_limits


def _valid_name(context: click.Context, option: click.Parameter, value: str) -> str:
    try:
        state.directory(value)
    except LabError as error:
        raise click.BadParameter(str(error)) from None
    return value


_name_option = click.option(
    "--name",
    default="lab",
    envvar="NODEREADY_LAB",
    show_envvar=True,
    callback=_valid_name,
    metavar="NAME",
    help="Name of the lab: labs of different names run side by side.",
)


@click.group()
def lab() -> None:
    """A cluster of real SSH nodes on this machine: no container engine, nothing left behind.

    Each node has its own root file system (an overlay of this machine's), its own namespaces,
    address, /proc/sys and sshd. Needs root.
    """


@lab.command()
@click.option(
    "--nodes", default=3, type=click.IntRange(1, MAX_NODES), metavar="N", help="Number of nodes."
)
@click.option(
    "--profile",
    type=click.Choice(list(PROFILES)),
    help="Hardware of the nodes; default: that of the running lab, or cpu.",
)
@click.option(
    "--fault",
    metavar="NAME",
    shell_complete=candidates_of("faults"),
    help="Fault of the last node; `none`: no faults; `list` shows all faults, or those of "
    "--profile.",
)
@_name_option
def up(nodes: int, profile: str | None, fault: str | None, name: str) -> None:
    """Start the lab; safe to repeat: restarts dead nodes, adds missing ones.

    \b
    Examples:
      nodeready lab up --nodes 16
      nodeready lab up --profile h100 --fault ib-half-rate
      pyinfra inventories/lab.py exec -- hostname
    """
    if fault == "list":
        for line in _fault_list(profile):
            click.echo(line)
        return
    if fault not in (None, "none", *FAULTS):
        text = f"no fault {fault!r}; see `nodeready lab up --fault list`"
        raise click.BadParameter(text, param_hint="--fault")
    progress = _Progress()
    node_fault = "" if fault == "none" else fault
    try:
        lab = Lab.up(name, nodes, profile, progress=progress, fault=node_fault)
    except LabError as error:
        raise click.ClickException(str(error)) from None
    finally:
        progress.end()
    folded = fold(node.name for node in lab.nodes)
    if lab.started == len(lab.nodes):
        click.echo(f"{name}: {lab.started} nodes up: {folded}")
    elif lab.started:
        click.echo(f"{name}: {lab.started} of {len(lab.nodes)} nodes started: {folded}")
    else:
        click.echo(f"{name}: already up, {len(lab.nodes)} nodes: {folded}")
    for note in _notes(lab):
        click.echo(note)
    if lab.started and not can_raise_limits():
        lacks = "this machine lacks CAP_SYS_RESOURCE"
        text = f"{lacks}: limits on the nodes cannot be raised above its own"
        click.echo(f"nodeready: {text}", err=True)


@lab.command(name="down")
@_name_option
@click.option("--all", "every", is_flag=True, help="End every lab of this machine.")
@click.pass_context
def stop_lab(context: click.Context, name: str, every: bool) -> None:
    """Stop the lab, also after a crash, and remove every trace."""
    named = context.get_parameter_source("name") is click.core.ParameterSource.COMMANDLINE
    if every and named:
        raise click.UsageError("--name and --all exclude each other")
    try:
        ended = [*filter(down, state.names() if every else [name])]
    except LabError as error:
        raise click.ClickException(str(error)) from None
    for lab_name in ended:
        click.echo(f"{lab_name}: ended")
    if not ended:
        click.echo("no lab runs" if every else f"{name}: no such lab runs")


@lab.command()
def status() -> None:
    """Show the nodes of each lab and how to log in. Exit status 3 if a node is not up."""
    rows = [("LAB", "PROFILE", "UP", "NODES", "ADDRESSES")]
    notes: list[str] = []
    trouble = False
    for name in state.names():
        try:
            lab = Lab.load(name)
        except LabError as error:
            trouble = True
            notes.append(f"{name}: {error}")
            continue
        if lab is None:
            trouble = True
            if state.is_locked(state.directory(name)):
                notes.append(f"{name}: another command is starting or ending it")
            else:
                notes.append(f"{name}: unfinished; clean up: nodeready lab down --name {name}")
            continue
        statuses = {node.name: node.status for node in lab.nodes}
        up_count = list(statuses.values()).count("up")
        first, last = lab.nodes[0].address, lab.nodes[-1].address
        addresses = f"{first}-{last}"
        rows.append((name, lab.profile, f"{up_count}/{len(statuses)}", fold(statuses), addresses))
        for bad in ("dead", "no sshd"):
            if bad_nodes := [node for node, status in statuses.items() if status == bad]:
                trouble = True
                notes.append(f"{name}: {bad}: {fold(bad_nodes)}; restart with `lab up`")
        inventory = f"inventory: {'@lab' if name == 'lab' else f'@lab/{name}'}"
        notes += [f"{name}: {note}" for note in (*_notes(lab), inventory)]
    if len(rows) > 1:
        _table(rows)
    elif not notes:
        click.echo("no lab runs; start one: nodeready lab up")
    for note in notes:
        click.echo(note)
    if trouble:
        sys.exit(exit_code(check=True))


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def _fault_list(profile: str | None) -> Iterator[str]:
    """The faults that a profile can have (None: all), in groups, as wide as the terminal."""
    wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for group, (title, profiles) in GROUPS.items():
        in_group = [fault for fault in FAULTS.values() if fault.group == group]
        listed = [fault for fault in in_group if profile in (None, *fault.profiles)]
        if not listed:
            continue
        yield f"{title} ({_profiles(profiles)})"
        width = max(len(fault.name) for fault in listed)
        for fault in listed:
            only = "" if fault.profiles == profiles else f" ({_profiles(fault.profiles)})"
            first = f"  {fault.name:{width}}  "
            indent = " " * len(first)
            text = f"{fault.about}{only}"
            yield from textwrap.wrap(text, wide, initial_indent=first, subsequent_indent=indent)


def _profiles(profiles: Sequence[str]) -> str:
    return "all profiles" if tuple(profiles) == tuple(PROFILES) else ", ".join(profiles)


def _notes(lab: Lab) -> Iterator[str]:
    """The faults of the nodes, and how to log in."""
    for node in lab.nodes:
        if node.fault in FAULTS:
            yield f"fault on {node.name}: {node.fault}: {FAULTS[node.fault].about}"
    yield f"log in: ssh -F {lab.ssh_config} {lab.nodes[0].name}"


class _Progress:
    """One line that counts nodes, on a terminal only."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.width = 0

    def __call__(self, ready: int, total: int) -> None:
        if self.shown:
            line = f"starting nodes: {ready} of {total}"
            self.width = len(line)
            click.echo(f"\r{line}", nl=False, err=True)

    def end(self) -> None:
        """Clear the line."""
        if self.width:
            click.echo(f"\r{' ' * self.width}\r", nl=False, err=True)
