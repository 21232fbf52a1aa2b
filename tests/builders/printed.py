"""What the programs of a probe print of a node's files."""

from collections.abc import Mapping


def grep_lines(files: Mapping[str, str]) -> str:
    """Each line of these files with its path and number, as `grep -n` prints it."""
    return "".join(
        f"{path}:{number}:{text}\n"
        for path, content in files.items()
        for number, text in enumerate(content.split("\n"), 1)
    )
