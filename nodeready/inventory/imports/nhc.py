"""Checks of LBNL's Node Health Check: a line ``TARGET || CHECK`` of nhc.conf.

The meaning of each check is that of NHC's README (https://github.com/mej/nhc). Actions (restart,
kill, mount) are left out, because a check of a site only reads.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from getopt import GetoptError, getopt
from typing import Any

from nodeready.inventory.imports.converted import (
    CONVERTED,
    COVERED,
    IMPOSSIBLE,
    NO_LIMIT,
    SETTING,
    IdMaker,
    ImportedLine,
    NotConvertible,
)
from nodeready.shell import join, quote

Table = dict[str, Any]
#: The words of a check -> the tables that it becomes, without id.
Convert = Callable[[list[str]], list[Table]]

#: Function of NHC, or of its usual additions -> the checks of nodeready that have it, and how.
_COVERED = {
    "check_hw_ib": "rdma.state and rdma.rate; rdma_ports sets the number of ports",
    "check_ib_link_state": "rdma.state",
    "check_ib_link_speed": "rdma.rate",
    "check_ib_link_flapping": "rdma.errors",
    "check_nvsmi_healthmon": "the checks of gpus",
    "check_nv_healthmon": "the checks of gpus",
    "check_nv_health": "the checks of gpus",
    "check_gpu_count": "gpus.count; gpu_count sets the number",
    "check_gpu_xid": "gpus.kernel_faults",
    "check_gpu_ecc": "gpus.ecc_errors and gpus.remapped_rows",
    "check_gpu_clock_throttling": "gpus.throttle",
    "check_gpu_persistence": "gpus.persistence; gpu_persistence sets it",
    "check_nvlink_status": "gpus.nvlink",
    "check_chrony_drift": "host.clock",
    "check_ptpd_drift": "host.clock",
    "check_nccl_allreduce": "nodeready smoke, and proof.collective",
}

#: Checks of NHC that have no counterpart -> the reason.
_NO_COUNTERPART = {
    **dict.fromkeys(
        ("check_ps_cpu", "check_ps_mem", "check_ps_physmem", "check_ps_time", "check_ps_kswapd"),
        "judges what processes use: a job may use it",
    ),
    **dict.fromkeys(
        ("check_ps_unauth_users", "check_ps_userproc_lineage"),
        "judges users' processes by the jobs of the resource manager",
    ),
    **dict.fromkeys(
        ("check_moab_sched", "check_moab_rm", "check_moab_torque"), "judges a scheduler, no node"
    ),
}

_ASSIGNMENT = re.compile(r"(?:export\s+)?[A-Za-z_]\w*=")
_NAMED = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_VARIABLE = re.compile(r"\$\(\(.*?\)\)|\$\{[^}]*\}|\$\([^)]*\)|\$\w*|`")
_SIZES = {"": 0, "k": 0, "m": 1, "g": 2, "t": 3, "p": 4, "e": 5}


def read(text: str, name: str) -> list[ImportedLine]:
    """What becomes of each line of nhc.conf that is no comment."""
    ids, variables = IdMaker(), dict[str, str]()
    return list(_lines(text, name, ids, variables))


def _lines(
    text: str, name: str, ids: IdMaker, variables: dict[str, str]
) -> Iterator[ImportedLine]:
    for number, raw in enumerate(text.split("\n"), 1):
        line, place = raw.strip(), f"{name}:{number}"
        if not line or line.startswith("#"):
            continue
        target, bars, check = (part.strip() for part in line.partition("||"))
        if not bars:
            target, check = "*", line
        if _ASSIGNMENT.match(check):
            if target == "*":
                variables.update(_assigned(check))
            yield ImportedLine(place, line, SETTING, "a setting of NHC")
            continue
        nodes = "" if target in ("*", "/.*/", "/./") else target
        covered = _COVERED.get(check.split()[0] if check else "")
        if covered:
            yield ImportedLine(place, line, COVERED, covered, nodes=nodes)
            continue
        try:
            words = _need(_split(check, variables), 1)
            tables = _convert(words)
        except NotConvertible as error:
            yield ImportedLine(place, line, IMPOSSIBLE, str(error), nodes=nodes)
            continue
        checks = tuple({"id": ids.make(*_id_words(words)), **table} for table in tables)
        detail = ", ".join(f"site.{check['id']}" for check in checks)
        yield ImportedLine(place, line, CONVERTED, detail, checks, nodes)


def _assigned(check: str) -> dict[str, str]:
    try:
        words = shlex.split(check)
    except ValueError:
        return {}
    pairs = (word.partition("=") for word in words if "=" in word)
    return {name: value for name, _, value in pairs if "$" not in value}


def _split(check: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a check, as bash makes them. Raises NotConvertible."""
    # Text in single quotes is taken as it is.
    parts = re.split(r"('[^']*')", check)
    for index in range(0, len(parts), 2):
        parts[index] = _NAMED.sub(
            lambda match: variables.get(match[1] or match[2], match[0]), parts[index]
        )
    loose = re.sub(r'\\.|"[^"]*"', "", "".join(parts[::2]))
    if re.search(r"[;&|<>]", loose) or re.match(r"(if|for|while|case|!|\{|\()\b", loose):
        raise NotConvertible("a shell command of several parts: write it as run")
    if missing := _VARIABLE.search("".join(parts[::2]).replace("\\$", "")):
        raise NotConvertible(f"needs the value of {missing[0]}: write a line NAME=VALUE before")
    try:
        words = shlex.split("".join(parts))
    except ValueError as error:
        raise NotConvertible(f"cannot be split into words: {error}") from None
    return words


def _id_words(words: list[str]) -> list[str]:
    return [words[0].removeprefix("check_"), *(word for word in words[1:] if word[:1] != "-")]


def _convert(words: list[str]) -> list[Table]:
    function, arguments = words[0], words[1:]
    convert = _CONVERT.get(function)
    if convert is not None:
        return convert(arguments)
    if function in _NO_COUNTERPART:
        raise NotConvertible(_NO_COUNTERPART[function])
    if function.startswith("check_"):
        raise NotConvertible(f"{function} is no check of NHC itself: write its command as run")
    # NHC runs any command, and the check passes when it succeeds.
    return [{"run": join(words), "status": 0}]


def _options(arguments: list[str], letters: str) -> tuple[list[tuple[str, str]], list[str]]:
    """The options (letter, value) and the words after them. Raises NotConvertible."""
    try:
        pairs, words = getopt(arguments, letters)
    except GetoptError as error:
        raise NotConvertible(str(error)) from None
    return [(name[1:], value) for name, value in pairs], words


def _need(arguments: list[str], count: int) -> list[str]:
    """At least this many words. Raises NotConvertible."""
    if len(arguments) < count:
        raise NotConvertible("has too few words")
    return arguments


# --- Match strings: a glob, /an expression/, {a range}; a ! before it negates.


def match_string(text: str) -> tuple[str, bool]:
    """The regular expression for one line, and whether no line may match.

    Raises NotConvertible for a range of nodes.

    >>> match_string("n*.viz")
    ('n.*\\\\.viz', False)
    >>> match_string("!/PAUSED/")
    ('.*(?:PAUSED).*', True)
    """
    is_negated, text = text.startswith("!"), text.removeprefix("!")
    if len(text) > 1 and text[0] == text[-1] == "/":
        return f".*(?:{_python_expression(text[1:-1])}).*", is_negated
    if text[:1] in ("{", "@") and text[-1:] in ("}", "@"):
        raise NotConvertible(f"{text} is a range of nodes")
    return _glob(text), is_negated


_CLASSES = {
    "[:space:]": r"\s",
    "[:blank:]": r" \t",
    "[:digit:]": "0-9",
    "[:alpha:]": "A-Za-z",
    "[:alnum:]": "A-Za-z0-9",
    "[:upper:]": "A-Z",
    "[:lower:]": "a-z",
    "[:xdigit:]": "0-9A-Fa-f",
}


def _python_expression(expression: str) -> str:
    """An expression of POSIX as Python writes it. Raises NotConvertible."""
    for posix, python in _CLASSES.items():
        expression = expression.replace(posix, python)
    expression = re.sub(r"\\[<>]", r"\\b", expression)
    try:
        re.compile(expression)
    except re.error as error:
        raise NotConvertible(f"/{expression}/: {error}") from None
    return expression


def _glob(text: str) -> str:
    parts = re.split(r"(\*|\?|\[[^\]]+\])", text)
    special = {"*": ".*", "?": "."}
    return "".join(
        special.get(part)
        or (f"[^{part[2:]}" if part.startswith("[!") else part if part[:1] == "[" else "")
        or re.escape(part).replace(r"\ ", " ")
        for part in parts
    )


def _all_lines(matches: list[str]) -> str:
    """One expression: each match string has its line, or, negated, has none."""
    read = [match_string(text) for text in matches]
    if len(read) == 1 and not read[0][1]:
        return f"^{read[0][0]}$"
    looks = (f"(?{'!' if negated else '='}[\\s\\S]*^{line}$)" for line, negated in read)
    return r"\A" + "".join(looks)


# --- Sizes and numbers.


def kilobytes(text: str) -> float:
    """A size of NHC in kB: a number, and k (the default), M, G, T, also with a B.

    Raises NotConvertible.

    >>> kilobytes("32MB")
    32768.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtpe]?)b?", text.strip().lower())
    if match is None:
        raise NotConvertible(f"{text!r} is no size")
    if re.fullmatch(r"[\d.]+\s*b", text.strip().lower()):
        return float(match[1]) / 1024
    return float(match[1]) * 1024.0 ** _SIZES[match[2]]


def _count(text: str) -> float:
    """A number of inodes, with a suffix of thousands."""
    match = re.fullmatch(r"(\d+)([kmgt]?)", text.lower())
    if match is None:
        raise NotConvertible(f"{text!r} is no number")
    return float(match[1]) * 1000.0 ** _SIZES[match[2]]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise NotConvertible(f"{text!r} is no number") from None


def _range(low: float, high: float) -> list[float]:
    return [int(end) if end == int(end) and end < NO_LIMIT else end for end in (low, high)]


# --- The checks.


def _timeout(seconds: str) -> int:
    return max(1, min(60, round(_number(seconds))))


def _cmd_output(arguments: list[str]) -> list[Table]:
    options, words = _options(arguments, "t:r:m:e:")
    values = dict(options)
    matches = [value for letter, value in options if letter == "m"]
    run = values.get("e") or join(_need(words, 1))
    table: Table = {"run": run, "timeout_s": _timeout(values.get("t", "5"))}
    if not matches:
        return [{**table, "status": _status(values.get("r", "0"))}]
    return [{**table, "matches": _all_lines(matches)}]


def _cmd_status(arguments: list[str]) -> list[Table]:
    options, words = _options(arguments, "t:r:")
    values = dict(options)
    status = _status(values.get("r", "0"))
    timeout_s = _timeout(values.get("t", "5"))
    return [{"run": join(_need(words, 1)), "timeout_s": timeout_s, "status": status}]


def _status(text: str) -> int:
    status = int(_number(text))
    if status > 123:
        raise NotConvertible(f"exit status {status}: a shell uses it itself")
    return status


def _mount(mode: str) -> Convert:
    """mode: ``rw``, ``ro``, or "" for any mount"""

    def convert(arguments: list[str]) -> list[Table]:
        options, words = _options(arguments, "0rt:s:o:O:e:E:f:F:")
        values = dict(options)
        points = [value for letter, value in options if letter in "fF"]
        if not points:
            # The old form: mountpoint, source, type, options.
            points = words[:1]
            values.update({k: v for k, v in zip("sto", words[1:], strict=False) if v})
        _need(points, 1)
        wishes = [values.get(letter, "*") for letter in "sto"]
        if mode:
            wishes[2] = f"/(^|,){mode}($|,)/"
        lines = []
        for wish in wishes:
            line, negated = match_string(wish)
            lines.append(f"(?!{line}$).*" if negated else line)
        return [
            {
                "run": f"awk '$2 == {_awk(point)} {{print $1; print $3; print $4}}' /proc/mounts",
                "matches": rf"^{lines[0]}\n{lines[1]}\n{lines[2]}$",
                **_severity(values),
            }
            for point in points
        ]

    return convert


def _awk(text: str) -> str:
    """A text as awk's string, in single quotes of the shell."""
    escaped = text.replace(" ", r"\040").replace("\\", "\\\\").replace('"', r"\"")
    return '"' + escaped.replace("'", r"\047") + '"'


def _severity(options: Mapping[str, str]) -> Table:
    return {"severity": "warn"} if "0" in options else {}


#: Columns of df -P and df -Pi.
_USED, _FREE = 3, 4


def _df(column: int, is_maximum: bool, inodes: bool = False) -> Convert:
    def convert(arguments: list[str]) -> list[Table]:
        point, limit = _need(arguments, 2)[:2]
        df = f"df -P{'i' if inodes else 'k'} {quote(point)}"
        if limit.endswith("%"):
            value = _number(limit[:-1])
            # A file system without a fixed number of inodes has 0 of them.
            share = f"$2 > 0 ? 100 * ${column} / $2 : {0 if is_maximum else 100}"
            run = f"{df} | awk 'NR == 2 {{print ({share})}}'"
            return [{"run": run, "range": _range(*((0, value) if is_maximum else (value, 100)))}]
        value = _count(limit) if inodes else kilobytes(limit)
        run = f"{df} | awk 'NR == 2 {{print ${column}}}'"
        ends = (0.0, value) if is_maximum else (value, NO_LIMIT)
        return [{"run": run, "range": _range(*ends)}]

    return convert


def _df_total(inodes: bool) -> Convert:
    def convert(arguments: list[str]) -> list[Table]:
        point, *limits = _need(arguments, 2)
        parse = _count if inodes else kilobytes
        low = parse(limits[0]) if limits[0] else 0.0
        high = parse(limits[1]) if limits[1:] and limits[1] else NO_LIMIT
        run = f"df -P{'i' if inodes else 'k'} {quote(point)} | awk 'NR == 2 {{print $2}}'"
        return [{"run": run, "range": _range(low, high)}]

    return convert


def _meminfo(*keys: str, has_maximum: bool) -> Convert:
    names = "|".join(keys)
    run = f"awk '/^({names}):/ {{kb += $2}} END {{printf \"%d\\n\", kb}}' /proc/meminfo"

    def convert(arguments: list[str]) -> list[Table]:
        low = kilobytes(_need(arguments, 1)[0])
        high = kilobytes(arguments[1]) if has_maximum and arguments[1:] else NO_LIMIT
        fudge = arguments[2] if has_maximum and arguments[2:] else "0"
        if fudge.endswith("%"):
            share = _number(fudge[:-1]) / 100
            low, high = low * (1 - share), high * (1 + share)
        else:
            low, high = low - kilobytes(fudge), high + kilobytes(fudge)
        return [{"run": run, "range": _range(max(0, round(low)), round(high))}]

    return convert


def _cpuinfo(arguments: list[str]) -> list[Table]:
    expected = [str(int(_number(word))) for word in _need(arguments, 1)[:3]]
    counts = ("sockets", "cores", "cpus")[: len(expected)]
    return [
        {
            "run": "lscpu -p=SOCKET,CORE,CPU | awk -F, '!/^#/ {cpus++; if (!($1 in s)) {s[$1]; "
            "sockets++} if (!(($1, $2) in c)) {c[$1, $2]; cores++}} "
            f"END {{print {', '.join(counts)}}}'",
            "equals": " ".join(expected),
        }
    ]


def _device(arguments: list[str]) -> list[Table]:
    device = _need(arguments, 1)[0]
    return [{"run": f"test -e {quote(f'/sys/class/net/{device}')}", "status": 0}]


def _mcelog(arguments: list[str]) -> list[Table]:
    # NHC passes where the daemon does not run.
    return [{"run": "mcelog --client 2>/dev/null || :", "equals": ""}]


def _dmi(arguments: list[str]) -> list[Table]:
    negated = bool(arguments) and arguments[0] in ("!", "-!", "-n")
    options, words = _options(arguments[1:] if negated else arguments, "h:t:")
    if "h" in dict(options):
        raise NotConvertible("a handle of dmidecode can change with the firmware: leave out -h")
    text = _need(words, 1)[0]
    line, not_this = match_string(text)
    section = text.lstrip("!/^*").partition(":")[0]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9 -]*", section) or ":" not in text:
        raise NotConvertible("names no section of dmidecode")
    run = (
        'dmidecode | awk \'/^[A-Z]/ {section = $0} /^\\t[^\\t]/ {sub(/^\\t/, ""); '
        'print section ": " $0}\' | sort -u | grep -F -- ' + quote(f"{section}: ")
    )
    look = "!" if negated or not_this else "="
    return [
        {"run": run, "matches": rf"\A(?{look}[\s\S]*^{line}$)" if look == "!" else f"^{line}$"}
    ]


def _dmi_raw(arguments: list[str]) -> list[Table]:
    tables = []
    for text in _need(arguments, 1):
        line, negated = match_string(text)
        if negated or text.startswith("/"):
            raise NotConvertible("the output of dmidecode is too long to be judged as a whole")
        run = f"dmidecode | grep -F -m 1 -- {quote(text.strip('*'))}"
        tables.append({"run": run, "matches": f"{line}$"})
    return tables


def _file_contents(arguments: list[str]) -> list[Table]:
    path, *matches = _need(arguments, 2)
    if not path.startswith("/"):
        raise NotConvertible("the path is not absolute")
    return [{"file": path, "matches": _all_lines(matches)}]


def _file_test(arguments: list[str]) -> list[Table]:
    options, paths = _options(arguments, "abcdefghkprstuwxOGLSN")
    letters = dict.fromkeys(letter for letter, _ in options)
    if not {*letters}.isdisjoint("tN"):
        raise NotConvertible("test -t and -N are bash's own")
    tests = [
        f"test -{'e' if letter == 'a' else letter} {quote(path)}"
        for path in _need(paths, 1)
        for letter in letters
    ]
    return [{"run": " && ".join(_need(tests, 1)), "status": 0}]


def _file_stat(arguments: list[str]) -> list[Table]:
    options, paths = _options(arguments, "D:G:M:N:O:T:U:d:g:m:n:o:t:u:")
    formats = {"U": "%U", "G": "%G", "u": "%u", "g": "%g"}
    ages = {"n": ("%Y", "-le"), "o": ("%Y", "-ge"), "N": ("%Z", "-le"), "O": ("%Z", "-ge")}
    numbers = {"t": "%t", "T": "%T"}
    tests = []
    for path in _need(paths, 1):
        for letter, value in options:
            if letter in formats:
                tests.append(f'[ "$(stat -c {formats[letter]} {quote(path)})" = {quote(value)} ]')
            elif letter in "mM":
                bits = f"0{int(value, 8):o}" if re.fullmatch("[0-7]+", value) else ""
                if not bits:
                    raise NotConvertible(f"{value!r} is no mode in octal digits")
                has = f"0$(stat -c %a {quote(path)})"
                tests.append(f"[ $(( {has} & {bits} )) -eq $(( {bits} )) ]")
            elif letter in ages:
                time, comparison = ages[letter]
                age = f"$(( $(date +%s) - $(stat -c {time} {quote(path)}) ))"
                tests.append(f"[ {age} {comparison} {int(_number(value))} ]")
            elif letter in numbers:
                number = f"0x$(stat -c {numbers[letter]} {quote(path)})"
                tests.append(f"[ $(( {number} )) -eq {int(_number(value))} ]")
            else:
                raise NotConvertible(f"-{letter} has no counterpart")
    return [{"run": " && ".join(_need(tests, 1)), "status": 0}]


def _process(pattern: str, user: str, *, running: bool = True) -> Table:
    """Whether pgrep finds a process with this command line."""
    if user.startswith("!"):
        raise NotConvertible("pgrep cannot leave out the processes of one user")
    owner = f"-u {quote(user)} " if user else ""
    run = f"pgrep {owner}-f {quote(pattern)} >/dev/null"
    return {"run": run, "status": 0 if running else 1}


def _program(name: str) -> str:
    """The expression of pgrep for a program, with or without its directory."""
    return f"^([^ ]*/)?{re.escape(name)}:?( |$)"


def _ps_service(arguments: list[str]) -> list[Table]:
    options, words = _options(arguments, "0fSrcsku:d:m:e:E:")
    values = dict(options)
    service = values.get("d") or _need(words, 1)[0]
    if "m" in values:
        line, negated = match_string(values["m"])
        if negated:
            raise NotConvertible("a negated process")
        pattern = line if "f" in values else f"^{line}( |$)"
    else:
        pattern = re.escape(service) if "f" in values else _program(service)
    # -s and -k stop a service, and so does -E: it must not run.
    running = {"s", "k", "E"}.isdisjoint(values)
    return [{**_process(pattern, values.get("u", ""), running=running), **_severity(values)}]


def _ps_daemon(running: bool) -> Convert:
    def convert(arguments: list[str]) -> list[Table]:
        command, user, *extra = [*_need(arguments, 1), ""][: max(2, len(arguments))]
        if extra:
            raise NotConvertible("arguments of the command: write it with pgrep -f as run")
        return [_process(_program(command), user, running=running)]

    return convert


def _loadavg(arguments: list[str]) -> list[Table]:
    return [
        {
            "run": f"awk '{{print ${column}}}' /proc/loadavg",
            "range": _range(0, _number(limit)),
        }
        for column, limit in enumerate(_need(arguments, 1)[:3], 1)
        if limit
    ]


def _ping(arguments: list[str]) -> list[Table]:
    options, targets = _options(arguments, "I:W:c:i:s:t:w:")
    flags = [part for letter, value in options for part in (f"-{letter}", value)]
    limits = flags if {"c", "w"} & dict(options).keys() else ["-c", "1", "-W", "3", *flags]
    words = ["ping", "-q", "-n", *limits]
    pings = [f"{join([*words, target])} >/dev/null" for target in _need(targets, 1)]
    return [{"run": " && ".join(pings), "status": 0, "timeout_s": 30}]


def _socket(arguments: list[str]) -> list[Table]:
    options, _ = _options(arguments, "0a!n:p:s:l:r:t:u:d:e:E:")
    values = dict(options)
    port = values.get("l", "").rpartition(":")[2]
    is_listening = values.get("s", "").strip("/").upper() == "LISTEN"
    if not (is_listening and port.isdecimal() and values.get("p", "tcp") in ("tcp", "tcp6")):
        raise NotConvertible("only a listening TCP port has a counterpart")
    if {"r", "t", "u", "d"} & values.keys():
        raise NotConvertible("ss tells a port, not its owner or peer: leave out -r, -t, -u, -d")
    run = f"ss -ltnH {quote(f'sport = :{port}')}"
    judged: Table = {"equals": ""} if "!" in values else {"matches": "."}
    return [{"run": run, **judged, **_severity(values)}]


_CONVERT: dict[str, Convert] = {
    "check_cmd_output": _cmd_output,
    "check_cmd_status": _cmd_status,
    "check_dmi_data_match": _dmi,
    "check_dmi_raw_data_match": _dmi_raw,
    "check_file_contents": _file_contents,
    "check_file_stat": _file_stat,
    "check_file_test": _file_test,
    "check_fs_free": _df(_FREE, is_maximum=False),
    "check_fs_ifree": _df(_FREE, is_maximum=False, inodes=True),
    "check_fs_inodes": _df_total(inodes=True),
    "check_fs_iused": _df(_USED, is_maximum=True, inodes=True),
    "check_fs_mount": _mount(""),
    "check_fs_mount_ro": _mount("ro"),
    "check_fs_mount_rw": _mount("rw"),
    "check_fs_size": _df_total(inodes=False),
    "check_fs_used": _df(_USED, is_maximum=True),
    "check_hw_cpuinfo": _cpuinfo,
    "check_hw_eth": _device,
    "check_hw_gm": _device,
    "check_hw_mcelog": _mcelog,
    "check_hw_mem": _meminfo("MemTotal", "SwapTotal", has_maximum=True),
    "check_hw_mem_free": _meminfo(
        *("MemFree", "Buffers", "Cached", "SwapFree"), has_maximum=False
    ),
    "check_hw_physmem": _meminfo("MemTotal", has_maximum=True),
    "check_hw_physmem_free": _meminfo("MemFree", "Buffers", "Cached", has_maximum=False),
    "check_hw_swap": _meminfo("SwapTotal", has_maximum=True),
    "check_hw_swap_free": _meminfo("SwapFree", has_maximum=False),
    "check_net_ping": _ping,
    "check_net_socket": _socket,
    "check_ps_blacklist": _ps_daemon(running=False),
    "check_ps_daemon": _ps_daemon(running=True),
    "check_ps_loadavg": _loadavg,
    "check_ps_service": _ps_service,
}
