"""The program with its modules compiled for the Python that runs here: it starts in half the time.

The compiled program is the same zip with the code beside each source, where Python's import looks
for it. Another Python takes the sources from the same zip: slower, and otherwise the same.
"""

from __future__ import annotations

import hashlib
import io
import marshal
import sys
import zipfile
from importlib.util import MAGIC_NUMBER, source_hash

#: PEP 552, an unchecked hash-based .pyc: import does not compare the source with its hash.
_UNCHECKED_HASH = (1).to_bytes(4, "little")


def make(program: bytes, place: str) -> bytes:
    """The compiled program.

    program: a bundle's bytes
    place:   the path of the compiled program on the node, for tracebacks
    Raises zipfile.BadZipFile for what is no zip, and SyntaxError for what is no Python.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(program)) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(zipfile.ZipInfo(entry.filename, entry.date_time), content)
            if entry.filename.endswith(".py"):
                code = compile(content, f"{place}/{entry.filename}", "exec", dont_inherit=True)
                head = MAGIC_NUMBER + _UNCHECKED_HASH + source_hash(content)
                named = zipfile.ZipInfo(f"{entry.filename}c", entry.date_time)
                new.writestr(named, head + marshal.dumps(code))
    return made.getvalue()


def main(source: str, target: str, place: str) -> None:
    """Compile the bundle ``source`` into the file ``target``, and print the note about both.

    place: the path to which ``target`` will be moved
    The note is one line: the sha256 of the bundle, the sha256 of the compiled program, Python's
    magic number. Raises OSError, and what `make` raises.
    """
    with open(source, "rb") as file:
        program = file.read()
    made = make(program, place)
    with open(target, "wb") as file:
        file.write(made)
    digests = (hashlib.sha256(data).hexdigest() for data in (program, made))
    print(*digests, MAGIC_NUMBER.hex())
    sys.stdout.flush()
