"""No connection has SHA-1 in it, with any paramiko: an sshd in this process, over a socketpair."""

import socket
from contextlib import nullcontext
from threading import Event

import pytest
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA1
from paramiko import (
    AUTH_SUCCESSFUL,
    Message,
    PKey,
    RSAKey,
    ServerInterface,
    SSHException,
    Transport,
)

from nodeready.fleet.transport.connection import BoundedTransport


class Sshd(ServerInterface):
    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: PKey) -> int:
        return AUTH_SUCCESSFUL


class Sha1Key(RSAKey):
    """Signs with SHA-1, whatever was agreed on."""

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> Message:
        message = Message()
        message.add_string("ssh-rsa")
        message.add_string(self.key.sign(data, padding.PKCS1v15(), SHA1()))
        return message


KEY = rsa.generate_private_key(65537, 2048)


@pytest.mark.parametrize(("key_class", "sshd_has", "error"), [
    (RSAKey, {}, ""),
    (RSAKey, {"keys": "ssh-rsa"}, "Incompatible ssh peer"),
    (RSAKey, {"kex": "diffie-hellman-group14-sha1"}, "Incompatible ssh peer"),
    (RSAKey, {"kex": "diffie-hellman-group-exchange-sha1"}, "Incompatible ssh peer"),
    (RSAKey, {"pubkeys": "ssh-rsa"}, "Unable to agree on a pubkey algorithm"),
    (Sha1Key, {}, "Signature verification failed"),
])  # fmt: skip
def test_an_sshd_that_has_only_sha_1_is_refused(key_class, sshd_has, error):
    ours, theirs = socket.socketpair()
    server, client = Transport(theirs), BoundedTransport(ours)
    for name, algorithm in sshd_has.items():
        setattr(server, f"_preferred_{name}", (algorithm,))
    server.add_server_key(key_class(key=KEY))
    refused = pytest.raises(SSHException, match=error) if error else nullcontext()
    try:
        with refused:
            server.start_server(Event(), Sshd())
            client.start_client(timeout=10)
            client.auth_publickey("ml", RSAKey(key=KEY))
    finally:
        client.close()
        server.close()
