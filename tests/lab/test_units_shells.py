"""Scripts of ours in the shells of nodes: what tests/unit asks of `sh`, asked of the others."""

from __future__ import annotations

import inspect

import pytest

from tests.unit.subjects import test_gate, test_iommu, test_pdsh, test_snapshot

answer = test_snapshot.answer
for module in (test_gate, test_iommu, test_pdsh, test_snapshot):
    for name, function in vars(module).items():
        if name.startswith("test_") and {"posix_sh", "answer"} & {
            *inspect.signature(function).parameters
        }:
            globals()[name] = function


@pytest.fixture(params=["dash", "bash --posix", "busybox sh"])
def posix_sh(request: pytest.FixtureRequest) -> list[str]:
    return request.param.split()
