"""The decoder of a node's answers, and the encoder of an observation.

A program on a node writes observations as lines, ``NONCE NAME {json}``, and `lines` and `decode`
make dataclasses of them. Other lines are passed over: a profile or a tool that prints in between
cannot know the nonce. A large answer is packed, and `unpack` and `load_json` open it.

An answer is untrusted data, also years later in a file. So it has bounds, which are checked before
objects are made: its bytes, and the memory that its objects would take. Its depth is bounded, each
key occurs once, numbers are finite and within the bounds of their field, and texts are no longer
than their field allows. Anything else is a `DecodeError`, one line, and costs the node's answer.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from nodeready.core.base import ProbeError, Unknown
from nodeready.core.json_types import json_fields

T = TypeVar("T")

#: The answer of a node that has no Python for the program.
NO_PYTHON = "no Python 3.9 or newer"
#: The reason of a node that gave this answer: a finding (exit status 3), not nodeready's failure.
PYTHON_MISSING = f"{NO_PYTHON} on the node: see nodeready explain debug_tools.python"

# --- The values of a field. A dataclass names one of these as the type of its field; a plain int,
# float or str has the bounds of the same name below. A bound is wide where an ordinary user of the
# node chooses the value (a file's time): no user may make the node's answer invalid.

Count = int  # how many there are of something
Pid = int
Port = int
Uid = int  # -1: no such user
Number = int  # of 64 bits, without a sign: a size, an inode, an address
Seconds = float
Name = str  # of a host, a user, a program, a function
Path = str
Line = str
Text = str
Rank = int  # as a launcher numbers it; negative: it has none
Objects = Any  # name -> an object, which another reader decodes

_INTS = {
    "int": (-(1 << 64), 1 << 64), "Count": (0, (1 << 31) - 1),
    "Pid": (0, 1 << 22),  # PID_MAX_LIMIT, proc(5)
    "Port": (0, 65535), "Uid": (-1, (1 << 32) - 1), "Number": (0, (1 << 64) - 1),
    "Rank": (1 - (1 << 31), (1 << 31) - 1),
}  # fmt: skip
_FLOATS = {"float": (-float(1 << 64), float(1 << 64)), "Seconds": (0.0, 1e10)}
#: Characters; of a path PATH_MAX, and what is written around a path.
_TEXTS = {"str": 65536, "Name": 1024, "Path": 8192, "Line": 8192, "Text": 8 << 20}


class DecodeError(ProbeError):
    """An invalid answer. defect: the words in brackets, such as ``nested too deep``"""

    def __init__(self, defect: str, evidence: str = "") -> None:
        super().__init__(f"the answer makes no sense ({defect})", evidence)
        self.defect = defect


# --- JSON within bounds.

MAX_DEPTH = 32  # of nesting
MAX_NUMBER = 1 << 64  # no time, size or address is larger
MAX_COST = 64 << 20  # bytes of memory that the objects of an answer may take, by `cost`

# Bytes that Python takes at most for each: a member of a list or dict with its number, a list, a
# dict with one key, a text without its characters.
_MEMBER, _LIST, _DICT, _TEXT = 40, 88, 240, 56
# Surrogates outside surrogateescape's range (PEP 383): no encoder takes them.
_LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def cost(text: str) -> int:
    """An upper bound of the bytes that the objects of a JSON text take, without making them."""
    characters = len(text) if text.isascii() else 4 * len(text)
    characters += _MEMBER * text.count(",") + _LIST * text.count("[")
    return characters + _DICT * text.count("{") + _TEXT * text.count('"') // 2


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise DecodeError("a key stands there twice")
    return members


def _no_number(text: str) -> Any:
    raise DecodeError(f"{text[:20]} is no number")


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _int(text: str) -> int:
    return int(text) if len(text) <= 20 else _no_number(text)


# In a Python without a limit of digits, one number could take hours.
_LIMITED = 0 < getattr(sys, "get_int_max_str_digits", int)() <= 5000
_DECODER = json.JSONDecoder(
    parse_int=None if _LIMITED else _int,
    parse_float=_float,
    parse_constant=_no_number,
    object_pairs_hook=_once,
)


def load_json(text: str | bytes, max_cost: int = MAX_COST) -> Any:
    """A JSON text as plain data within the bounds. Raises DecodeError.

    max_cost: bytes of memory that it may take
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        _check_cost(text, max_cost)
        decoded = _DECODER.decode(text)
    except RecursionError:
        raise DecodeError("nested too deep") from None
    except UnicodeDecodeError:
        raise DecodeError("no UTF-8") from None
    except json.JSONDecodeError as error:
        raise DecodeError("no JSON") from error
    except ValueError as error:
        raise DecodeError(_LARGE) from error
    surrogates = not text.isascii() or ("\\" in text and _ESCAPED.search(text) is not None)
    _check(decoded, surrogates)
    return decoded


_LARGE = "a number is too large"
#: The maximum of `cost` for one character: four bytes, and the dict that it begins.
_MOST_OF_ONE = 4 + _DICT


def _check_cost(text: str, max_cost: int) -> None:
    # Counting takes a fifth of the time of decoding: a small text need not be counted.
    if len(text) * _MOST_OF_ONE > max_cost and cost(text) > max_cost:
        raise DecodeError("too many members")


def _check(decoded: Any, surrogates: bool) -> None:
    """Raises DecodeError for data that is nested too deep or has an invalid number or text."""
    level: list[Any] = [decoded]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        # One plain loop: a comprehension for each type takes twice as long.
        for value in level:
            kind = type(value)
            if kind is str:
                if surrogates and _LONE.search(value):
                    raise DecodeError("a text is no Unicode")
            elif kind is int:
                if not -MAX_NUMBER <= value <= MAX_NUMBER:
                    raise DecodeError(_LARGE)
            elif kind is list:
                inner += value
            elif kind is dict:
                inner += value.values()
                if surrogates:
                    inner += value
        if not inner:
            return
        level = inner
    raise DecodeError("nested too deep")


def pack(data: bytes) -> str:
    """The bytes as `unpack` takes them."""
    return base64.b64encode(zlib.compress(data)).decode("ascii")


def unpack(text: str, max_bytes: int) -> bytes:
    """The bytes of base64 text that zlib or gzip packed. Raises DecodeError, also for more."""
    try:
        opening = zlib.decompressobj(32 + zlib.MAX_WBITS)
        unpacked = opening.decompress(base64.b64decode(text, validate=True), max_bytes)
    except (ValueError, zlib.error, binascii.Error):
        raise DecodeError("damaged") from None
    if opening.unconsumed_tail:
        raise DecodeError(f"more than {max_bytes >> 20} MiB")
    if not opening.eof:
        raise DecodeError("cut off")
    return unpacked


# --- A line of an answer, there and back.


def line(nonce: str, name: str, observed: Any) -> str:
    """One observation (a dataclass) as its line."""
    return f"{nonce} {name} {json.dumps(dataclasses.asdict(observed), separators=(',', ':'))}"


def packed_line(nonce: str, name: str, observed: Any) -> str:
    """One large observation (a dataclass) as its line, for `packed_answer`."""
    text = json.dumps(dataclasses.asdict(observed), separators=(",", ":"))
    return f'{nonce} {name} "{pack(text.encode("ascii"))}"'


@dataclasses.dataclass(frozen=True)
class Nonsense:
    """In place of a line's data outside the bounds; `decode` raises a DecodeError of it."""

    defect: str


def lines(text: str, nonce: str) -> Iterator[tuple[str, Any]]:
    """Every ``(name, data)`` in what a node printed; a last line that was cut off is passed over.

    Raises DecodeError for more than an answer can have, all lines together.
    """
    _check_cost(text, MAX_COST)
    mark, at = f"{nonce} ", 0
    # The mark may stand inside of a line: what a login prints can end without a newline.
    while (at := text.find(mark, at)) >= 0:
        end = text.find("\n", at)
        row = text[at + len(mark) : end if end >= 0 else len(text)]
        at = end if end >= 0 else len(text)
        name, space, data = row.partition(" ")
        if not space or len(name) > 80 or not name.isidentifier():
            continue
        try:
            yield name, load_json(data)
        except DecodeError as problem:
            if end >= 0:
                yield name, Nonsense(problem.defect)


def decode(kind: type[T], data: Any) -> T:
    """``data`` as this dataclass.

    Its fields are of the types above, int, float, str, bool, another dataclass of its module,
    ``X | None``, ``tuple[X, ...]`` and ``tuple[X, Y]``. Raises DecodeError when the data has
    another shape, or a value that its field cannot have. A class with ``VERSIONED`` is also in
    files of other versions: fields with a default may be missing, and unknown ones are left out.
    """
    # A class is hashable, even one whose instances are not.
    value: T = _reader(kind)(data)  # type: ignore[arg-type]
    return value


def packed_answer(kind: type[T], text: str, nonce: str, name: str, max_bytes: int) -> T | None:
    """The observation of a `packed_line` in what a node printed; None: it has none.

    Raises DecodeError.
    """
    for word, data in lines(text, nonce):
        if word == name and isinstance(data, str):
            return decode(kind, load_json(unpack(data, max_bytes)))
    return None


Reads = Callable[[Any], Any]


@cache
def _reader(kind: type[Any]) -> Reads:
    """The function that takes data for this dataclass or refuses it."""
    module = vars(sys.modules[kind.__module__])
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    fields = {n: _value(text, module, f"{kind.__name__}.{n}") for n, text in types.items()}
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    is_versioned = hasattr(kind, "VERSIONED")

    def read(data: Any) -> Any:
        if isinstance(data, Nonsense):
            raise DecodeError(data.defect)
        if not isinstance(data, Mapping) or (data.keys() != fields.keys() and not is_versioned):
            raise DecodeError(f"no {kind.__name__}", shown(data))
        if data.keys() != fields.keys():
            if missing := required - data.keys():
                raise DecodeError(f"{kind.__name__}.{min(missing)} is missing", shown(data))
            return kind(**{name: fields[name](data[name]) for name in fields.keys() & data.keys()})
        # By position: by name takes a third longer.
        return kind(*[value(data[name]) for name, value in fields.items()])

    return read


def shown(data: Any) -> str:
    if isinstance(data, Mapping):
        return f"{{{', '.join(f'{key[:40]!r}: {short(data[key])}' for key in [*data][:8])}}}"
    return short(data)


def _value(kind: str, module: Mapping[str, Any], source: str) -> Reads:
    def refuse(data: Any) -> Any:
        raise DecodeError(f"{source} cannot be {short(data)}", shown(data))

    if kind.endswith(" | None"):
        read_value = _value(kind[: -len(" | None")], module, source)
        return lambda data: None if data is None else read_value(data)
    if kind.startswith("tuple[") and kind.endswith(", ...]"):
        item = kind[len("tuple[") : -len(", ...]")]
        read_list = _list(item, _value(item, module, source))
        return lambda data: read_list(data) if type(data) is list else refuse(data)
    if kind.startswith("tuple[") and kind.endswith("]"):
        readers = [_value(part, module, source) for part in kind[len("tuple[") : -1].split(", ")]
        return lambda data: (
            tuple(read(item) for read, item in zip(readers, data))
            if type(data) is list and len(data) == len(readers)
            else refuse(data)
        )
    kind = kind.rpartition(".")[2]
    if dataclasses.is_dataclass(module.get(kind)):
        return _reader(module[kind])
    fits = _scalar(kind, source)
    return lambda data: data if fits(data) else refuse(data)


def _scalar(kind: str, source: str) -> Callable[[Any], bool]:
    if kind in _INTS:
        low, high = _INTS[kind]
        return lambda data: type(data) is int and low <= data <= high
    if kind in _FLOATS:
        minimum, maximum = _FLOATS[kind]
        # NaN is in no order with them.
        return lambda data: type(data) in (int, float) and minimum <= data <= maximum
    if kind in _TEXTS:
        length = _TEXTS[kind]
        return lambda data: type(data) is str and len(data) <= length
    if kind == "bool":
        return lambda data: type(data) is bool
    if kind == "Objects":
        return lambda data: type(data) is dict and {*map(type, data.values())} <= {dict}
    raise TypeError(f"{source}: {kind} is no type that an answer can have")


def _list(kind: str, read_item: Reads) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function that reads a list of this type.

    Scalars, and rows of them, are checked by column: one at a time takes five times as long.
    """
    row = kind[len("tuple[") : -1].split(", ") if kind.startswith("tuple[") else []
    columns = [fits for part in row or [kind] if (fits := _column(part))]
    is_table, is_known = bool(row), len(columns) == len(row or [kind])

    def read(data: list[Any]) -> tuple[Any, ...]:
        values: list[Any] = []
        if is_known and not is_table and columns[0](data):
            return tuple(data)
        if is_known and is_table and {*map(type, data)} == {list}:
            is_even = {*map(len, data)} == {len(row)}
            if is_even and all(fits(column) for fits, column in zip(columns, zip(*data))):
                return tuple(map(tuple, data))
        for value in data:
            # Samples of a hung process repeat.
            repeats = values and type(value) is dict and value == data[len(values) - 1]
            values.append(values[-1] if repeats else read_item(value))
        return tuple(values)

    return read


def _column(kind: str) -> Callable[[Sequence[Any]], bool] | None:
    """A test that all values have this type; None: no scalar type, or one rare in lists."""
    kind = kind.rpartition(".")[2]
    if kind in _TEXTS:
        length = _TEXTS[kind]
        return lambda values: {*map(type, values)} == {str} and max(map(len, values)) <= length
    if kind in _INTS:
        low, high = _INTS[kind]
        return lambda values: (
            {*map(type, values)} == {int} and low <= min(values) <= max(values) <= high
        )
    return None


def short(data: Any) -> str:
    """One value in a few words, for an error message."""
    if isinstance(data, str) and len(data) > 40:
        return f"a text of {len(data)} characters"
    if isinstance(data, (list, Mapping)):
        return "a list" if isinstance(data, list) else "an object"
    return ascii(data)[:60]


# --- An observation as data that JSON can hold.


#: The results of `shown_keys`: 10,000 nodes have the same types.
_KEYS: dict[type, dict[str, str]] = {}


def shown_keys(kind: Any) -> dict[str, str]:
    """Field -> key of a dataclass, as documents show it; {} of another type."""
    if kind not in _KEYS:
        fields = json_fields(kind) if dataclasses.is_dataclass(kind) else ()
        _KEYS[kind] = {path: key for key, path, _ in fields}
    return _KEYS[kind]


def plain(observed: Any) -> Any:
    """An observation as dicts, lists, text and numbers.

    A subject that could not be observed is ``{"unknown": reason}``; a file's content is only
    counted; infinity, which JSON cannot hold, becomes None.
    """
    if observed is None or isinstance(observed, (str, int)):
        return observed
    if isinstance(observed, Unknown):
        return {"unknown": observed.reason}
    if keys := shown_keys(type(observed)):
        return {key: plain(getattr(observed, name)) for name, key in keys.items()}
    if isinstance(observed, Mapping):
        return {str(key): plain(value) for key, value in observed.items()}
    if isinstance(observed, (list, tuple)):
        return [plain(value) for value in observed]
    if isinstance(observed, (set, frozenset)):
        return sorted((plain(value) for value in observed), key=str)
    if isinstance(observed, bytes):
        return f"{len(observed)} bytes"
    if isinstance(observed, float):
        return observed if math.isfinite(observed) else None
    return str(observed)
