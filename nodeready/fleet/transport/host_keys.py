"""The host keys of sshds: known_hosts as ssh reads it, certificates of hosts, revoked keys."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import os
import re
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import gevent
from paramiko import Message, MissingHostKeyPolicy, PKey, SSHException
from pyinfra.connectors.sshuserclient.client import AskPolicy

from nodeready.fleet.transport.ssh_config import SshConfigError
from nodeready.subjects.ssh_client.config import matches

# --- Files of known hosts.


class _KnownKey(NamedTuple):
    """A line of known_hosts. mark: ``@cert-authority``, ``@revoked`` or ``""``"""

    mark: str
    hosts: str
    kind: str
    blob: bytes


class KnownHostsFiles:
    """The keys in these files; a missing file has none.

    optional: files that are skipped if they cannot be read, as ssh does
    Raises SshConfigError for any other file that cannot be read: a known key would look new.
    """

    def __init__(self, files: Iterable[str], optional: Collection[str] = ()) -> None:
        self.files = tuple(files)
        self._by_name: dict[str, list[_KnownKey]] = {}
        self._with_globs: list[_KnownKey] = []
        self._hashed: list[tuple[bytes, bytes, _KnownKey]] = []
        for path in self.files:
            try:
                with open(path, encoding="utf-8", errors="surrogateescape") as file:
                    rows = file.read().splitlines()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as problem:
                if path in optional:
                    continue
                raise SshConfigError(f"known hosts {path}: {problem.strerror}") from None
            for row in rows:
                self.add(row)

    def add(self, row: str) -> None:
        words = row.split()
        mark = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#"):
            return
        try:
            known_key = _KnownKey(
                mark, words[0], words[1], base64.b64decode(words[2], validate=True)
            )
        except (binascii.Error, ValueError):
            return
        if known_key.hosts.startswith("|1|"):
            with contextlib.suppress(binascii.Error, ValueError):
                salt, _, digest = known_key.hosts[3:].partition("|")
                self._hashed.append((base64.b64decode(salt), base64.b64decode(digest), known_key))
        elif set(known_key.hosts) & set("*?!"):
            self._with_globs.append(known_key)
        else:
            for name in known_key.hosts.lower().split(","):
                self._by_name.setdefault(name, []).append(known_key)

    def about(self, name: str) -> list[_KnownKey]:
        """The lines about a host, ``host`` or ``[host]:port``."""
        name = name.lower()
        known_keys = list(self._by_name.get(name, ()))
        known_keys += [
            known_key
            for known_key in self._with_globs
            if matches(known_key.hosts.lower().split(","), name)
        ]
        text = name.encode("utf-8", "surrogateescape")
        for index, (salt, digest, known_key) in enumerate(self._hashed):
            if hmac.digest(salt, text, "sha1") == digest:
                known_keys.append(known_key)
            if index % 2000 == 1999:
                gevent.sleep(0)
        return known_keys


# --- Certificates of hosts.


class _Certificate(NamedTuple):
    """A host's certificate (PROTOCOL.certkeys of OpenSSH), without unused fields."""

    kind: int
    principals: tuple[str, ...]
    after: int
    before: int
    critical: bytes
    authority: bytes
    signature: bytes
    signed: bytes


#: Numbers of the public key, between the nonce and the serial number of a certificate.
NUMBERS = {"ssh-ed25519": 1, "ssh-rsa": 2, "rsa-sha2-256": 2, "rsa-sha2-512": 2}


def _certificate(blob: bytes) -> _Certificate:
    """Parse a certificate. Raises ValueError, struct.error, IndexError."""
    message = Message(blob)
    kind = message.get_text().partition("-cert-")[0]
    message.get_binary()
    for _ in range(NUMBERS.get(kind, 2)):
        message.get_binary()
    message.get_int64()
    role, _name = message.get_int(), message.get_binary()
    inner, principals = Message(message.get_binary()), []
    while len(inner.get_remainder()):
        principals.append(inner.get_text())
    after, before = message.get_int64(), message.get_int64()
    critical, _extensions, _reserved = (message.get_binary() for _ in range(3))
    authority = message.get_binary()
    signed = blob[: len(blob) - len(message.get_remainder())]
    signature = message.get_binary()
    return _Certificate(
        role, tuple(principals), after, before, critical, authority, signature, signed
    )


#: CASignatureAlgorithms of ssh: nothing with SHA-1.
_SIGNATURES = re.compile(r"ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|rsa-sha2-(256|512)")


def _certificate_problem(certificate: _Certificate, name: str) -> str:
    """Why a host's certificate is not valid for this name; "" when it is."""
    now_s = time.time()
    if certificate.kind != 2:
        return "is no host's certificate"
    if not certificate.after <= now_s:
        return "is not valid yet"
    if not now_s < certificate.before:
        return "has expired"
    if certificate.principals and not any(
        matches([principal], name) for principal in certificate.principals
    ):
        return f"is for {', '.join(certificate.principals)[:100]}"
    if certificate.critical:
        return "has options that are not known"
    kind = Message(certificate.signature).get_text()
    authority = PKey.from_type_string(
        Message(certificate.authority).get_text(), certificate.authority
    )
    if not _SIGNATURES.fullmatch(kind):
        return f"is signed with {kind}"
    if not authority.verify_ssh_sig(certificate.signed, Message(certificate.signature)):
        return "is not signed by its authority"
    return ""


# --- The policy for a host key.


def _algorithms(kind: str) -> tuple[str, ...]:
    """The signature algorithms of a kind of key."""
    return ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa") if kind == "ssh-rsa" else (kind,)


class HostKeyError(SSHException):
    """The sshd's host key differs from the known key, or must not be accepted."""


class HostKeyPolicy(MissingHostKeyPolicy):
    """The policy for an sshd's host key, in place of paramiko's.

    name:   as known_hosts has it; bare: without the port
    strict: ``yes``, ``ask``, ``accept-new``, ``no``
    """

    def __init__(self, known_hosts: KnownHostsFiles, name: str, bare: str, strict: str) -> None:
        self.known_hosts, self.name, self.bare, self.strict = known_hosts, name, bare, strict
        self.lines = known_hosts.about(name)
        # As ssh does: without a line for this port, the host's key at its usual port is accepted.
        self.portless_lines = known_hosts.about(bare) if not self.lines and bare != name else []

    def order(self, algorithms: Sequence[str]) -> tuple[str, ...]:
        """The algorithms to ask the sshd for; those of known keys come first."""
        plain = [algorithm for algorithm in algorithms if "-cert-" not in algorithm]
        certified = []
        if any(line.mark == "@cert-authority" for line in self.lines):
            certified = [f"{algorithm}-cert-v01@openssh.com" for algorithm in plain]
        kinds = [line.kind for line in self.lines or self.portless_lines if not line.mark]
        known_first = [
            algorithm for kind in kinds for algorithm in _algorithms(kind) if algorithm in plain
        ]
        return tuple(dict.fromkeys([*certified, *known_first, *plain]))

    def missing_host_key(self, client: Any, hostname: str, key: PKey) -> None:
        """Raises HostKeyError, SSHException."""
        blob, public = key.asbytes(), getattr(key, "public_blob", None)
        if any(line.blob == blob for line in self.lines if line.mark == "@revoked"):
            raise HostKeyError("revoked")
        certificate_problem = None
        if public is not None and "-cert-" in public.key_type:
            certificate_problem = self._certificate_problem(public.key_blob)
            if not certificate_problem:
                return
        plain = [line for line in self.lines if not line.mark]
        if any(line.blob == blob for line in [*plain, *self.portless_lines] if not line.mark):
            return
        if plain:
            raise HostKeyError("does not match")
        if certificate_problem:
            raise HostKeyError(f"certificate {certificate_problem}")
        self._judge_unknown_key(client, key)

    def _certificate_problem(self, blob: bytes) -> str:
        """Why the certificate is refused; "": it is accepted. Raises HostKeyError if revoked."""
        try:
            certificate = _certificate(blob)
            marks = {line.mark for line in self.lines if line.blob == certificate.authority}
            if "@revoked" in marks:
                raise HostKeyError("revoked")
            if "@cert-authority" not in marks:
                return "is of an authority that is not known"
            return _certificate_problem(certificate, self.bare)
        except HostKeyError:
            raise
        except (ValueError, IndexError, struct.error, SSHException):
            return "cannot be read"

    def _judge_unknown_key(self, client: Any, key: PKey) -> None:
        if self.strict == "yes":
            raise SSHException(f"No host key for {self.name} found in known_hosts")
        if self.strict == "no":
            return
        if self.strict == "ask":
            # pyinfra asks the user, and saves the key in the file.
            client._host_keys_filename = (
                self.known_hosts.files[0] if self.known_hosts.files else None
            )
            AskPolicy().missing_host_key(client, self.name, key)
            return
        row = f"{self.name} {key.get_name()} {key.get_base64()}"
        self.known_hosts.add(row)
        # As ssh does: connect even if the file cannot be written.
        with contextlib.suppress(OSError):
            _append(self.known_hosts.files[0] if self.known_hosts.files else os.devnull, row)


def _append(path: str, row: str) -> None:
    if os.path.dirname(path) == os.path.expanduser("~/.ssh"):
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with open(number, "r+b", buffering=0) as file:
        size = os.fstat(number).st_size
        ends_line = not size or os.pread(number, 1, size - 1) == b"\n"
        file.write(f"{'' if ends_line else chr(10)}{row}\n".encode())
