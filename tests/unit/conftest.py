"""What the tests of whole commands share."""

from tests.unit.commands import run

__all__ = ["run"]
