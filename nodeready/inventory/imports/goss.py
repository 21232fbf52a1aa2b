"""Checks of goss: the resources of a goss.yaml.

The meaning of each attribute is that of goss's manual (https://github.com/goss-org/goss).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nodeready.inventory.imports.converted import (
    CONVERTED,
    COVERED,
    IMPOSSIBLE,
    IdMaker,
    ImportedLine,
    ImportFileError,
    NotConvertible,
)
from nodeready.shell import quote

Table = dict[str, Any]
#: (name, its attributes) -> pairs of an attribute, and the table that it becomes.
Convert = Callable[[str, dict[str, Any]], Iterator[tuple[str, Table]]]

#: Attributes that judge nothing.
_ABOUT = frozenset({"title", "meta", "skip", "timeout"})
#: Kernel settings that nodeready's own checks judge.
_COVERED = {
    "kernel.yama.ptrace_scope": "ptrace.scope; ptrace_scope sets the value",
    "kernel.core_pattern": "core_dumps.pattern; core_pattern sets the value",
    "kernel.numa_balancing": "host.numa_balancing; numa_balancing sets the value",
}


def read(text: str, name: str) -> list[ImportedLine]:
    """What becomes of each resource. Raises ImportFileError for what is no goss.yaml."""
    import yaml

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        words = " ".join(str(error).split())
        raise ImportFileError(f"{name}: is no YAML: {words}") from None
    if not isinstance(document, dict):
        raise ImportFileError(f"{name}: has no resources: a goss.yaml is a map of them")
    return list(_lines(document, name, IdMaker()))


def _lines(document: Mapping[Any, Any], name: str, ids: IdMaker) -> Iterator[ImportedLine]:
    for kind, resources in document.items():
        if not isinstance(resources, dict):
            yield ImportedLine(f"{name}: {kind}", str(kind), IMPOSSIBLE, "is no map of resources")
            continue
        for resource, attributes in resources.items():
            yield from _resource(str(kind), str(resource), attributes, name, ids)


def _resource(
    kind: str, resource: str, attributes: Any, name: str, ids: IdMaker
) -> Iterator[ImportedLine]:
    place, title = f"{name}: {kind}", f"{kind} {resource}"
    convert = _CONVERT.get(kind)
    if convert is None or not isinstance(attributes, dict):
        reason = "has no attributes" if convert else f"{kind} has no counterpart"
        yield ImportedLine(place, title, IMPOSSIBLE, reason)
        return
    if kind == "kernel-param" and resource in _COVERED:
        yield ImportedLine(place, title, COVERED, _COVERED[resource])
        return
    if "{{" in resource or "{{" in repr(attributes):
        yield ImportedLine(place, title, IMPOSSIBLE, "a template of goss: write its value")
        return
    remaining = {str(key): value for key, value in attributes.items() if key not in _ABOUT}
    timeout = attributes.get("timeout")
    try:
        # What is left of the attributes has no counterpart.
        for attribute, table in convert(resource, remaining):
            remaining.pop(attribute, None)
            check = {"id": ids.make(kind, resource, attribute), **table}
            if isinstance(timeout, int):
                check["timeout_s"] = max(1, min(60, round(timeout / 1000)))
            detail, text = f"site.{check['id']}", f"{title}, {attribute}"
            yield ImportedLine(place, text, CONVERTED, detail, (check,))
    except NotConvertible as error:
        yield ImportedLine(place, title, IMPOSSIBLE, str(error))
        return
    for attribute in remaining:
        reason = f"{attribute} has no counterpart"
        yield ImportedLine(place, f"{title}, {attribute}", IMPOSSIBLE, reason)


def _succeeds(run: str, expected: Any = True) -> Table:
    """The command succeeds, or, where it is expected to fail, fails."""
    if not isinstance(expected, bool):
        raise NotConvertible(f"{expected!r} is neither true nor false")
    return {"run": run if expected else f"! {{ {run}; }}", "status": 0}


def _equals(run: str, expected: Any) -> Table:
    if isinstance(expected, bool) or not isinstance(expected, (str, int, float)):
        raise NotConvertible(f"{str(expected)[:60]!r} is a matcher of goss, or no value")
    return {"run": run, "equals": str(expected)}


def _patterns(expected: Any) -> str:
    """One expression for goss's patterns: each has its line, or, with a !, has none."""
    texts = [expected] if isinstance(expected, (str, int, float)) else expected
    if not isinstance(texts, list) or not all(isinstance(t, (str, int, float)) for t in texts):
        raise NotConvertible("a matcher of goss, or no list of texts")
    looks = []
    for text in map(str, texts):
        negated, bare = text.startswith("!"), text.removeprefix("!")
        is_expression = len(bare) > 1 and bare[0] == bare[-1] == "/"
        # goss: a text is a part of the output, \! and \/ begin a plain one.
        expression = bare[1:-1] if is_expression else re.escape(re.sub(r"^\\(?=[!/])", "", bare))
        try:
            re.compile(expression)
        except re.error as error:
            raise NotConvertible(f"{bare}: {error}") from None
        looks.append(f"(?{'!' if negated else '='}[\\s\\S]*{expression})")
    if not looks:
        raise NotConvertible("an empty list judges nothing")
    return r"\A" + "".join(looks)


def _escaped(value: Any) -> str:
    return re.escape(str(value))


def _each_line(expressions: Iterable[str]) -> str:
    """The expression that matches if each of these has its line."""
    return r"\A" + "".join(rf"(?=[\s\S]*^{expression}$)" for expression in expressions)


def _file(path: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    if not path.startswith("/"):
        raise NotConvertible("the path is not absolute")
    file = quote(path)
    if "exists" in attributes:
        test = f"[ -e {file} ] || [ -L {file} ]"
        yield "exists", _succeeds(test, attributes["exists"])
    formats = {"owner": "%U", "group": "%G", "size": "%s", "uid": "%u", "gid": "%g"}
    for attribute, letters in formats.items():
        if attribute in attributes:
            yield attribute, _equals(f"stat -L -c {letters} {file}", attributes[attribute])
    if "mode" in attributes:
        mode = attributes["mode"]
        # YAML reads 0644 without quotes as a number in octal digits.
        digits = f"{mode:o}" if isinstance(mode, int) else str(mode).lstrip("0") or "0"
        yield "mode", _equals(f"stat -c %a {file}", digits)
    tests = {"file": "f", "directory": "d", "symlink": "L", "socket": "S", "pipe": "p"}
    if attributes.get("filetype") in tests:
        yield "filetype", _succeeds(f"test -{tests[attributes['filetype']]} {file}")
    if "linked-to" in attributes:
        yield "linked-to", _equals(f"readlink -- {file}", attributes["linked-to"])
    for attribute in ("contents", "contains"):
        if attributes.get(attribute):
            yield attribute, {"file": path, "matches": _patterns(attributes[attribute])}
    for attribute in ("md5", "sha256", "sha512"):
        if attribute in attributes:
            run = f"{attribute}sum {file} | cut -d' ' -f1"
            yield attribute, _equals(run, attributes[attribute])


def _package(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    package = quote(name)
    installed = (
        f"if command -v dpkg-query >/dev/null; then dpkg-query -W -f='${{Status}}' {package} "
        "2>/dev/null | grep -q ' installed$'; else rpm -q --quiet -- " + f"{package}; fi"
    )
    if "installed" in attributes:
        yield "installed", _succeeds(installed, attributes["installed"])
    if "versions" in attributes:
        versions = attributes["versions"]
        if not isinstance(versions, list) or not versions:
            raise NotConvertible("versions is no list")
        expression = "|".join(re.escape(str(version)) for version in versions)
        run = (
            "if command -v dpkg-query >/dev/null; then dpkg-query -W -f='${Version}\\n' "
            f"{package}; else rpm -q --qf '%{{VERSION}}\\n' -- {package}; fi"
        )
        yield "versions", {"run": run, "matches": f"^({expression})$"}


def _service(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    for attribute, verb in (("enabled", "is-enabled"), ("running", "is-active")):
        if attribute in attributes:
            run = f"systemctl {verb} --quiet -- {quote(name)}"
            yield attribute, _succeeds(run, attributes[attribute])


def _port(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    match = re.fullmatch(r"(?:(tcp|udp)(6?):)?(\d{1,5})", name)
    if match is None:
        raise NotConvertible("is no port of TCP or UDP")
    kind = "u" if match[1] == "udp" else "t"
    family = " -6" if match[2] else ""
    run = f"ss -l{kind}nH{family} {quote(f'sport = :{match[3]}')}"
    if "listening" in attributes:
        listens = attributes["listening"]
        yield "listening", {"run": run, **({"matches": "."} if listens else {"equals": ""})}
    if attributes.get("ip"):
        if not isinstance(attributes["ip"], list):
            raise NotConvertible("ip is no list")
        addresses = f"{run} | awk '{{print $4}}'"
        lines = (
            rf"\[?{_escaped(ip)}(%\w+)?\]?:\d+"
            if str(ip) not in ("::", "0.0.0.0")
            else rf"(\[::\]|{_escaped(ip)}|\*):\d+"
            for ip in attributes["ip"]
        )
        yield "ip", {"run": addresses, "matches": _each_line(lines)}


def _process(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    if "running" in attributes:
        # The kernel keeps 15 characters of a program's name.
        run = f"pgrep -x -- {quote(re.escape(name[:15]))} >/dev/null"
        if not isinstance(attributes["running"], bool):
            raise NotConvertible("running is neither true nor false")
        yield "running", {"run": run, "status": 0 if attributes["running"] else 1}


def _mount(point: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    target = quote(point)
    if "exists" in attributes:
        yield "exists", _succeeds(f"findmnt -M {target} >/dev/null", attributes["exists"])
    for attribute, column in (("source", "SOURCE"), ("filesystem", "FSTYPE")):
        if attribute in attributes:
            run = f"findmnt -n -o {column} -M {target} | tail -n 1"
            yield attribute, _equals(run, attributes[attribute])
    options = attributes.get("opts")
    if isinstance(options, list) and options:
        looks = (f"(?=(.*,)?{re.escape(str(option))}(,|$))" for option in options)
        run = f"findmnt -n -o OPTIONS -M {target} | tail -n 1"
        yield "opts", {"run": run, "matches": "^" + "".join(looks)}


def _kernel_param(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    if not re.fullmatch(r"[\w./-]+", name):
        raise NotConvertible("is no name of sysctl")
    path = f"/proc/sys/{name.replace('.', '/')}"
    value = attributes.get("value")
    if value is not None:
        yield "value", _equals(f"tr '\\t' ' ' <{quote(path)}", value)


def _command(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    run = str(attributes.pop("exec", name))
    if "exit-status" in attributes:
        status = attributes["exit-status"]
        if isinstance(status, bool) or not isinstance(status, int) or not 0 <= status <= 123:
            raise NotConvertible("exit-status is no number from 0 to 123")
        yield "exit-status", {"run": f"{{ {run}\n}} >/dev/null", "status": status}
    if attributes.get("stdout"):
        yield "stdout", {"run": run, "matches": _patterns(attributes["stdout"])}
    if attributes.get("stderr"):
        errors = f"{{ {run}\n}} 2>&1 >/dev/null"
        yield "stderr", {"run": errors, "matches": _patterns(attributes["stderr"])}
    # Empty lists judge nothing.
    for attribute in ("stdout", "stderr"):
        if attributes.get(attribute) == []:
            attributes.pop(attribute)


def _user(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    user = quote(name)
    if "exists" in attributes:
        yield "exists", _succeeds(f"getent passwd {user} >/dev/null", attributes["exists"])
    for attribute, column in (("uid", 3), ("gid", 4), ("home", 6), ("shell", 7)):
        if attribute in attributes:
            run = f"getent passwd {user} | cut -d: -f{column}"
            yield attribute, _equals(run, attributes[attribute])
    groups = attributes.get("groups")
    if isinstance(groups, list) and groups:
        looks = (rf"(?=(.* )?{re.escape(str(group))}( |$))" for group in groups)
        yield "groups", {"run": f"id -Gn -- {user}", "matches": "^" + "".join(looks)}


def _group(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    group = quote(name)
    if "exists" in attributes:
        yield "exists", _succeeds(f"getent group {group} >/dev/null", attributes["exists"])
    if "gid" in attributes:
        yield "gid", _equals(f"getent group {group} | cut -d: -f3", attributes["gid"])


def _http(url: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    if "headers" in attributes or "request-body" in attributes or "request-headers" in attributes:
        raise NotConvertible("headers and bodies of a request have no counterpart")
    insecure = " -k" if attributes.pop("allow-insecure", False) else ""
    follow = "" if attributes.pop("no-follow-redirects", False) else " -L"
    curl = f"curl -sS{follow}{insecure} --max-time 5"
    if "status" in attributes:
        run = f"{curl} -o /dev/null -w '%{{http_code}}\\n' -- {quote(url)}"
        yield "status", _equals(run, attributes["status"])
    if attributes.get("body"):
        yield "body", {"run": f"{curl} -- {quote(url)}", "matches": _patterns(attributes["body"])}


def _dns(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    if "server" in attributes or ":" in name:
        raise NotConvertible("getent asks the node's own resolver, for addresses alone")
    find = f"getent ahosts {quote(name)}"
    for attribute in ("resolvable", "resolveable"):
        if attribute in attributes:
            yield attribute, _succeeds(f"{find} >/dev/null", attributes[attribute])
    addresses = attributes.get("addrs")
    if isinstance(addresses, list) and addresses:
        run = f"{find} | awk '{{print $1}}' | sort -u"
        yield "addrs", {"run": run, "matches": _each_line(map(_escaped, addresses))}


def _addr(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    match = re.fullmatch(r"tcp6?://\[?([\w.:-]+?)\]?:(\d{1,5})", name)
    if match is None:
        raise NotConvertible("only tcp://HOST:PORT has a counterpart")
    if "reachable" in attributes:
        # bash alone has /dev/tcp.
        words = f"exec 3<>/dev/tcp/{match[1]}/{match[2]}"
        yield (
            "reachable",
            _succeeds(f"bash -c {quote(words)} 2>/dev/null", attributes["reachable"]),
        )


def _interface(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    device = quote(f"/sys/class/net/{name}")
    if "exists" in attributes:
        yield "exists", _succeeds(f"test -e {device}", attributes["exists"])
    if "mtu" in attributes:
        yield "mtu", _equals(f"cat {device}/mtu", attributes["mtu"])
    addresses = attributes.get("addrs")
    if isinstance(addresses, list) and addresses:
        run = f"ip -o addr show dev {quote(name)} | awk '{{print $4}}'"
        yield "addrs", {"run": run, "matches": _each_line(map(_escaped, addresses))}


_CONVERT: dict[str, Convert] = {
    "addr": _addr,
    "command": _command,
    "dns": _dns,
    "file": _file,
    "group": _group,
    "http": _http,
    "interface": _interface,
    "kernel-param": _kernel_param,
    "mount": _mount,
    "package": _package,
    "port": _port,
    "process": _process,
    "service": _service,
    "user": _user,
}
