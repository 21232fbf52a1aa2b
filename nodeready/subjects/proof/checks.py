"""The checks of what was proved by acting, as one subject."""

from __future__ import annotations

from nodeready.core.fact_kinds import FactKinds
from nodeready.core.result import Subject
from nodeready.subjects.proof.collective import collective
from nodeready.subjects.proof.core import backtrace, core
from nodeready.subjects.proof.debuggers import (
    attach,
    attach_native,
    attach_nonblocking,
    gdb,
    strace,
)
from nodeready.subjects.proof.history import history
from nodeready.subjects.proof.logins import pdsh, ssh
from nodeready.subjects.proof.mesh import mesh, ports
from nodeready.subjects.proof.resources import resources
from nodeready.subjects.proof.session import user
from nodeready.subjects.proof.session_limits import limits

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
        resources,
        ssh,
        pdsh,
        ports,
        mesh,
        collective,
        history,
    ),
    kinds=FactKinds(
        # The proofs act: their results are compared.
        volatile="""
            user limits attach control logins ssh shell login step tracers core resources peers
            reach mesh collective history
        """
    ),
)
