"""SSH keys, made in this process: a `ssh-keygen` for every node would cost more than the node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """An ed25519 key pair: the private half in OpenSSH's format, the public one as one line."""

    private: str
    public: str


def new_key(comment: str) -> Key:
    """A fresh key pair."""
    # Imported when needed: it takes longer than all the rest of `nodeready lab status`.
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())
    public = key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
    return Key(private.decode(), f"{public.decode()} {comment}")
