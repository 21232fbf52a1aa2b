"""Judge what was proved by acting: stacks, cores, limits, the way to the other nodes."""

from __future__ import annotations

from nodeready.checks.declare import Subject
from nodeready.checks.proof_attach import attach, attach_native, attach_nonblocking, gdb, strace
from nodeready.checks.proof_core import backtrace, core
from nodeready.checks.proof_mesh import mesh, ports
from nodeready.checks.proof_reach import pdsh, ssh
from nodeready.checks.proof_session import limits, user

SUBJECT = Subject(
    "proof",
    "The session in which the proofs ran: whose it is, and its limits.",
    checks=(
        user,
        limits,
        attach,
        attach_nonblocking,
        attach_native,
        gdb,
        strace,
        core,
        backtrace,
        ssh,
        pdsh,
        ports,
        mesh,
    ),
)
