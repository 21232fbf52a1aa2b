"""The keys of a login: the host keys that the user trusts, and the user's own keys."""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import gevent
from gevent.lock import RLock
from paramiko import (
    Message,
    MissingHostKeyPolicy,
    PasswordRequiredException,
    PKey,
    SSHException,
    Transport,
)
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PublicBlob
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.sshuserclient.client import AskPolicy

from nodeready.fleet.transport.ssh_config import Login, SshConfigError, SshSettings, expand
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
                    for row in file.read().splitlines():
                        self.add(row)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as problem:
                if path not in optional:
                    raise SshConfigError(f"known hosts {path}: {problem.strerror}") from None

    def add(self, row: str) -> None:
        words = row.split()
        mark = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#"):
            return
        try:
            blob = base64.b64decode(words[2], validate=True)
        except ValueError:
            return
        known_key = _KnownKey(mark, words[0], words[1], blob)
        if known_key.hosts.startswith("|1|"):
            with contextlib.suppress(ValueError):
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
        known_keys += [k for k in self._with_globs if matches(k.hosts.lower().split(","), name)]
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
    names = tuple(principals)
    return _Certificate(role, names, after, before, critical, authority, signature, signed)


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
    principals = certificate.principals
    if principals and not any(matches([principal], name) for principal in principals):
        return f"is for {', '.join(principals)[:100]}"
    if certificate.critical:
        return "has options that are not known"
    kind = Message(certificate.signature).get_text()
    name = Message(certificate.authority).get_text()
    authority = PKey.from_type_string(name, certificate.authority)
    if not _SIGNATURES.fullmatch(kind):
        return f"is signed with {kind}"
    if not authority.verify_ssh_sig(certificate.signed, Message(certificate.signature)):
        return "is not signed by its authority"
    return ""


# --- The policy for a host key.


#: The signature algorithms of a kind of key that has several.
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")}


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
        ordered = (name for kind in kinds for name in _ALGORITHMS.get(kind, (kind,)))
        known_first = [algorithm for algorithm in ordered if algorithm in plain]
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
        file = next(iter(self.known_hosts.files), None)
        if self.strict == "ask":
            # pyinfra asks the user, and saves the key in the file.
            client._host_keys_filename = file
            AskPolicy().missing_host_key(client, self.name, key)
            return
        row = f"{self.name} {key.get_name()} {key.get_base64()}"
        self.known_hosts.add(row)
        # As ssh does: connect even if the file cannot be written.
        with contextlib.suppress(OSError):
            _append(file or os.devnull, row)


def _append(path: str, row: str) -> None:
    if os.path.dirname(path) == os.path.expanduser("~/.ssh"):
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with open(number, "r+b", buffering=0) as file:
        size = os.fstat(number).st_size
        ends_line = not size or os.pread(number, 1, size - 1) == b"\n"
        file.write(f"{'' if ends_line else chr(10)}{row}\n".encode())


# --- The identities for a login: keys and certificates of files and agents, in the order of ssh.


class SshIdentity(NamedTuple):
    """The content of an IdentityFile."""

    path: str
    key: PKey | None = None  # the private key; None: the file has none, or it is locked
    public: bytes = b""  # the public key; b"": unknown
    certificate: PublicBlob | None = None
    locked: bool = False  # a passphrase is needed for the private key


def _load_public(path: str) -> PublicBlob | None:
    try:
        with open(path, encoding="utf-8") as file:
            return PublicBlob.from_string(file.read(64 << 10))
    except (OSError, ValueError, SSHException, IndexError, struct.error):
        return None


def _public_of_locked(data: bytes) -> bytes:
    """The public key in the file of a locked private key (PROTOCOL.key of OpenSSH); b"": none."""
    try:
        body = b"".join(row for row in data.splitlines() if not row.startswith(b"-----"))
        message = Message(base64.b64decode(body))
        message.get_bytes(15)
        for _ in range(3):
            message.get_binary()
        message.get_int()
        return message.get_binary()
    except (ValueError, IndexError, struct.error, SSHException):
        return b""


@lru_cache(maxsize=256)
def load_identity(path: str, passphrase: str = "") -> SshIdentity | None:
    """The identity in a file; None: the file is missing. Raises ConnectError if it has no key."""
    try:
        with open(path, "rb") as file:
            data = file.read(1 << 20)
    except FileNotFoundError:
        # With only the public key here, the private key is in an agent.
        public = _load_public(f"{path}.pub")
        certificate = _load_public(f"{path}-cert.pub")
        if public is None and certificate is None:
            return None
        return SshIdentity(path, None, public.key_blob if public else b"", certificate)
    except OSError as problem:
        raise ConnectError(f"{path}: {problem.strerror}") from None
    stem = path.removesuffix(".pub")
    certificate = _load_public(f"{stem}-cert.pub") or _load_public(f"{path}-cert.pub")
    public = _load_public(path)
    if public is not None:
        return SshIdentity(path, None, public.key_blob, certificate)
    try:
        key = PKey.from_path(path, passphrase.encode() or None)
    except (PasswordRequiredException, TypeError):
        public = _load_public(f"{path}.pub")
        blob = _public_of_locked(data) or (public.key_blob if public else b"")
        return SshIdentity(path, None, blob, certificate, True)
    except Exception as problem:  # noqa: BLE001 - paramiko raises many kinds for a malformed file
        if "encrypted" in str(problem).lower() or "passphrase" in str(problem).lower():
            return SshIdentity(path, None, _public_of_locked(data), certificate, True)
        raise ConnectError(f"Invalid private key file: {path}") from None
    # paramiko adds the certificate to the key; `offered_keys` offers the two one after another.
    key.public_blob = None
    return SshIdentity(path, key, key.asbytes(), certificate)


# --- Identities in an agent.


class Agent(cast("Any", AgentSSH)):  # type: ignore[misc]
    """An ssh agent. All connections of a run share it and send one request at a time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._conn: Any = None
        self._path, self._lock, self._is_listed = path, RLock(), False

    def keys(self) -> tuple[AgentKey, ...]:
        """Its keys; () when no agent answers there."""
        with self._lock:
            if not self._is_listed:
                with contextlib.suppress(OSError, SSHException, IndexError, struct.error):
                    self._connect(self._open_socket())
                self._is_listed = True
            return tuple(self._keys)

    def _open_socket(self) -> socket.socket:
        conn = socket.socket(socket.AF_UNIX)
        try:
            # The user may have to confirm the use of a key.
            conn.settimeout(60)
            conn.connect(self._path)
        except BaseException:
            conn.close()
            raise
        return conn

    def _send_message(self, message: Any) -> Any:
        with self._lock:
            if self._conn is None:
                self._conn = self._open_socket()
            try:
                return super()._send_message(message)
            except BaseException:
                # The answer to this request may still arrive, and would be taken for the next one.
                self.close()
                raise

    def close(self) -> None:
        """Close the connection; `keys` still has the keys."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None


# --- The keys to offer to an sshd, in order.


def _certified_key(certificate: PublicBlob) -> bytes:
    """The public key of a certificate; b"" for anything else."""
    try:
        plain = certificate.key_type.partition("-cert-")[0]
        message = Message(certificate.key_blob)
        message.get_text()
        message.get_binary()
        key = Message()
        key.add_string(plain)
        for _ in range(NUMBERS.get(plain, 2)):
            key.add_string(message.get_binary())
        return key.asbytes()
    except (IndexError, struct.error, ValueError, SSHException):
        return b""


def offered_keys(
    identities: Sequence[SshIdentity],
    certificates: Sequence[PublicBlob],
    agent: Sequence[AgentKey],
    only_named: bool,
) -> Iterator[PKey]:
    """Keys in the order of ssh (pubkey_prepare of OpenSSH): certificates, keys of the agent that
    the configuration names, other keys of the agent, keys of files.

    only_named: IdentitiesOnly: no other keys of the agent
    """
    agent_keys = {key.asbytes(): key for key in agent}
    files = {identity.public: identity for identity in identities if identity.key is not None}
    used = set()
    for certificate in (*certificates, *(identity.certificate for identity in identities)):
        if certificate is None:
            continue
        if certificate.key_blob in agent_keys:
            used.add(certificate.key_blob)
            yield agent_keys[certificate.key_blob]
            continue
        public = _certified_key(certificate)
        if public in agent_keys:
            agent_key: Any = agent_keys[public]
            certified: Any = AgentKey(agent_key.agent, agent_key.blob, agent_key.comment)
            certified.public_blob = certificate
            yield certified
        elif public in files and (path := files[public].path):
            copy: Any = PKey.from_path(path)
            copy.public_blob = certificate
            yield copy
    named = {identity.public for identity in identities if identity.public}
    for is_named in (True,) if only_named else (True, False):
        for blob, held_key in agent_keys.items():
            names_it = blob in named or _certified_key(PublicBlob(held_key.name, blob)) in named
            if names_it == is_named and blob not in used:
                used.add(blob)
                yield held_key
    for identity in identities:
        if identity.key is not None and identity.public not in used:
            used.add(identity.public)
            yield identity.key


class LoginKeys:
    """Tries the identities at one sshd (paramiko's auth_strategy).

    names: the IdentityFiles that the configuration names
    """

    def __init__(self, agent: Callable[[str], Agent], login: Login, settings: SshSettings) -> None:
        self._open_agent, self._login, self._settings = agent, login, settings
        self.names: list[str] = []
        self._locked = ""

    def _identities(self) -> list[SshIdentity]:
        """The identities in files. Also sets `names`, and the first locked file."""
        settings, login = self._settings, self._login
        if login.key:
            identity = load_identity(os.path.expanduser(login.key), login.passphrase)
            if identity is None:
                raise ConnectError(f"No such private key file: {login.key}")
            self._locked = identity.path if identity.locked else ""
            return [identity]
        if not login.uses_default_keys and "identityfile" not in settings.changed_keys:
            return []
        identities = []
        for path in settings.paths("identityfile"):
            # Like ssh, skip a file that has no key.
            with contextlib.suppress(ConnectError):
                identity = load_identity(path)
                if identity is not None:
                    identities.append(identity)
                    if identity.locked and not self._locked:
                        self._locked = path
        if "identityfile" in settings.changed_keys:
            self.names = list(settings.paths("identityfile"))
        return identities

    def _agent(self) -> tuple[AgentKey, ...]:
        path = self._settings.value("identityagent")
        if not self._login.uses_agent or self._settings.values.get("identityagent") == ("none",):
            return ()
        if path.startswith("$") and not path.startswith("${"):
            path = os.environ.get(path[1:], "")
        elif path and path != "SSH_AUTH_SOCK":
            path = expand(path, self._settings.tokens())
        else:
            path = os.environ.get("SSH_AUTH_SOCK", "")
        return self._open_agent(path).keys() if path else ()

    def authenticate(self, transport: Transport) -> Any:
        """Log in with the first identity that sshd accepts, else with the password.

        Raises AuthenticationException, ConnectError, SSHException, SshConfigError.
        """
        settings, login = self._settings, self._login
        identities = self._identities()
        only_named = bool(login.key) or settings.value("identitiesonly") == "yes"
        files = () if login.key else settings.paths("certificatefile")
        certificates = [*filter(None, map(_load_public, files))]
        keys = offered_keys(identities, certificates, self._agent(), only_named)
        if settings.value("pubkeyauthentication") in ("no", "false"):
            keys = iter(())
            if not login.password:
                place = f"{login.name}: PubkeyAuthentication no in the ssh configuration here"
                raise SshConfigError(f"{place}, and nodeready logs in with keys")
        user, methods = settings.user, ["publickey"]
        for key in keys:
            if "publickey" not in methods:
                break
            try:
                methods = transport.auth_publickey(user, key)
            except BadAuthenticationType as problem:
                methods = list(problem.allowed_types)
            except AuthenticationException:
                if not transport.is_active():
                    raise
            else:
                if not methods:
                    return []
        if login.password:
            return transport.auth_password(user, login.password)
        if self._locked:
            raise ConnectError(f"Private key file ({self._locked}) is encrypted")
        lacking = [name for key, name in _UNSUPPORTED.items() if key in settings.changed_keys]
        hint = f"; nodeready has no {lacking[0]}: load the key in an ssh agent" if lacking else ""
        raise AuthenticationException(f"refused{hint}")


#: Identities that ssh supports and paramiko does not.
_UNSUPPORTED = {"pkcs11provider": "PKCS11Provider", "securitykeyprovider": "SecurityKeyProvider"}
