"""What one srun printed, told apart by task and by node. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from nodeready.transports.answer import LOST, OUTPUT, TIMEOUT, UNREACHABLE, Answer
from nodeready.transports.channel import ANSWER_BYTES, ERROR_BYTES

#: srun parts a line that is longer than this, and puts a label before each part.
_LINE_BYTES = 1024
#: What srun says that has no --overlap (before 20.11), or that knows no Gres by the name "none".
_NO_OVERLAP = re.compile(r"unrecognized option .*overlap")
_NO_GRES = re.compile(r"(?i)invalid generic resource|gres\S* .*(invalid|unknown)")
_LAUNCH = re.compile(r"launch\b.* failed on node (\S+): (.+)", re.IGNORECASE)


class StepOutput:
    """The answers of one step, each as soon as it is whole.

    nonce: stands before what `script` has the nodes say: their name, and that they are done
    nodes: those that are asked; a name that is none of them is nobody's
    heard: gets each node's answer, once
    """

    def __init__(
        self, nonce: str, nodes: Iterable[str], heard: Callable[[str, Answer], None]
    ) -> None:
        self.nonce = nonce.encode()
        self.heard = heard
        #: The nodes that have not answered.
        self.waiting = dict.fromkeys(nodes)
        self.names: dict[bytes, str] = {}
        self._texts: dict[bytes, bytearray] = {}
        self._rest = b""
        self._errors = bytearray()

    def script(self, inner: str) -> str:
        """``inner``, and who says it: the name that Slurm knows the node by (srun(1))."""
        mark = self.nonce.decode()
        return f'echo {mark} at "$SLURMD_NODENAME"\n(\n{inner}\n)\necho\necho {mark} end'

    def add(self, piece: bytes) -> None:
        """More of its output, as --label has it."""
        *rows, self._rest = (self._rest + piece).split(b"\n")
        for row in rows:
            label, found, said = row.partition(b": ")
            task = label.strip()
            if found and task.isdigit():
                self._line(task, said)

    def complain(self, piece: bytes) -> None:
        """More of its standard error, of which the beginning is kept."""
        self._errors += piece[: ERROR_BYTES - len(self._errors)]

    def _line(self, task: bytes, said: bytes) -> None:
        words = said.split(b" ")
        if words[0] == self.nonce:
            if len(words) == 3 and words[1] == b"at":
                self.names.setdefault(task, words[2].decode("utf-8", "replace"))
            elif words[1:] == [b"end"] and task in self.names:
                text = self._texts.pop(task, bytearray()).decode("utf-8", "surrogateescape")
                self._answer(self.names[task], Answer(True, text))
            return
        text_ = self._texts.setdefault(task, bytearray())
        text_ += said if len(said) == _LINE_BYTES else said + b"\n"
        if len(text_) > ANSWER_BYTES:
            # What comes later of it is the beginning of nothing.
            text_.clear()
            if task in self.names:
                self._answer(self.names[task], Answer(False, error="too much output", kind=OUTPUT))

    def _answer(self, name: str, answer: Answer) -> None:
        if name in self.waiting:
            del self.waiting[name]
            self.heard(name, answer)

    @property
    def complaints(self) -> list[str]:
        """The lines of its standard error, without its own name before them."""
        rows = self._errors.decode("utf-8", "replace").splitlines()
        stripped = (re.sub(r"^\s*[0-9]*:? ?(srun|slurmstepd): (error: )?", "", r) for r in rows)
        return [row.strip() for row in stripped if row.strip()]

    @property
    def has_no_overlap(self) -> bool:
        """Whether this srun is older than --overlap."""
        return any(_NO_OVERLAP.search(row) for row in self.complaints)

    @property
    def has_no_gres(self) -> bool:
        """Whether this Slurm does not take --gres=none."""
        return any(_NO_GRES.search(row) for row in self.complaints)

    @property
    def unlaunched(self) -> dict[str, str]:
        """The nodes on which the step could not be started, and why."""
        found = [match for row in self.complaints if (match := _LAUNCH.search(row))]
        return {match[1]: match[2] for match in found}

    def last(self) -> str:
        """What it complained about last; its closing words tell nothing."""
        rows = [row for row in self.complaints if not row.startswith("Job step aborted")]
        return rows[-1] if rows else "it said nothing"

    def give_up(self, limit_s: int, whole: bool) -> None:
        """An error for every node that is still waited for.

        limit_s: seconds that they had; whole: srun came to its own end
        """
        unlaunched, began = self.unlaunched, set(self.names.values())
        for name in list(self.waiting):
            about = [row for row in self.complaints if re.search(rf"\b{re.escape(name)}: ", row)]
            if name in unlaunched:
                why, kind = f"srun could not start there: {unlaunched[name]}", UNREACHABLE
            elif name in began and not whole:
                why, kind = f"no answer in {limit_s} s", TIMEOUT
            else:
                said = about[-1] if about else self.last()
                late = "" if whole else f" gave no answer in {limit_s} s"
                why, kind = f"srun{late}: {said}", LOST
            self._answer(name, Answer(False, error=why, kind=kind))
