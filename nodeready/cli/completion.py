"""`nodeready completion`: the shell's completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash: nodeready completion bash >/etc/bash_completion.d/nodeready
    zsh:  nodeready completion zsh >"${fpath[1]}/_nodeready"
    fish: nodeready completion fish >~/.config/fish/completions/nodeready.fish
    """
    from nodeready.cli import cli

    maker = get_completion_class(shell)
    assert maker is not None
    script = maker(cli, {}, "nodeready", "_NODEREADY_COMPLETE")
    # bash: click asks bash for its version first, which only an installed bash can answer.
    click.echo(script.source_template % script.source_vars())
