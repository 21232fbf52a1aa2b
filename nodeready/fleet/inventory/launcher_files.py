"""The ready nodes of `nodeready ready`, in the forms that launchers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nodeready.fleet.inventory.nodeset import fold

#: Form -> its readers.
FORMS = {
    "hostfile": "DeepSpeed and Open MPI: 'gpu001 slots=8'",
    "list": "pdsh, torchrun scripts, ssh loops: a name per line",
    "exclude": "Slurm: the nodes that are not ready, for sbatch --exclude",
}


def text(form: str, ready: Mapping[str, int], not_ready: Iterable[str]) -> str:
    """The file's content.

    form:  one of FORMS
    ready: name -> slots, in the order in which ranks are to be placed
    """
    if form == "exclude":
        names = fold(not_ready)
        return f"{names}\n" if names else ""
    if form == "list":
        return "".join(f"{name}\n" for name in ready)
    return "".join(f"{name} slots={slots}\n" for name, slots in ready.items())
