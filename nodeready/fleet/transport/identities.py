"""The identities for a login: keys and certificates of files and agents, in the order of ssh."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from gevent.lock import RLock
from paramiko import Message, PasswordRequiredException, PKey, SSHException, Transport
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PublicBlob
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType
from pyinfra.api.exceptions import ConnectError

from nodeready.fleet.transport.host_keys import NUMBERS
from nodeready.fleet.transport.ssh_config import Login, SshConfigError, SshSettings, expand

# --- Identities in files.


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
    except (binascii.Error, ValueError, IndexError, struct.error, SSHException):
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
    all_certificates = [
        *certificates,
        *(identity.certificate for identity in identities if identity.certificate),
    ]
    used = set()
    for certificate in all_certificates:
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
    for blob, held_key in agent_keys.items():
        is_named = blob in named or _certified_key(PublicBlob(held_key.name, blob)) in named
        if is_named and blob not in used:
            used.add(blob)
            yield held_key
    for blob, held_key in agent_keys.items():
        if blob not in used and not only_named:
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
        certificates = [
            certificate for certificate in map(_load_public, files) if certificate is not None
        ]
        keys = offered_keys(identities, certificates, self._agent(), only_named)
        if settings.value("pubkeyauthentication") in ("no", "false"):
            keys = iter(())
            if not login.password:
                raise SshConfigError(
                    f"{login.name}: PubkeyAuthentication no in the ssh configuration here, and "
                    "nodeready logs in with keys"
                )
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
        raise AuthenticationException(f"refused{self._hint()}")

    def _hint(self) -> str:
        for key, name in _UNSUPPORTED.items():
            if key in self._settings.changed_keys:
                return f"; nodeready has no {name}: load the key in an ssh agent"
        return ""


#: Identities that ssh supports and paramiko does not.
_UNSUPPORTED = {"pkcs11provider": "PKCS11Provider", "securitykeyprovider": "SecurityKeyProvider"}
