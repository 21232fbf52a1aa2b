"""What counts against a node was seen by root there, or by two users: of every kind of event."""

import pytest

from nodeready.runs.memory import lemons
from nodeready.runs.memory.look import RESULTS, Event, Look, dump, node_sections
from nodeready.runs.memory.store import Memory
from tests.cases import with_table

DAY_S = 86400.0


@with_table("users, makes_a_lemon")
@pytest.mark.parametrize("kind", lemons.WITNESSES)
def test_a_node_is_a_lemon_by_what_has_its_witnesses(tmp_path, kind, users, makes_a_lemon):
    """One of eight nodes has the event on four days, from each of these users."""
    assert lemons.WITNESSES[kind] in (lemons.ROOT, lemons.USER, lemons.NOBODY)
    sections = {f"rdma{RESULTS}": dump({})}
    with Memory.open(tmp_path / "memory.db", make=True) as kept:
        for day in range(0, 50, 10):
            nodes = [node_sections(f"gpu{number}", sections) for number in range(8)]
            events = [Event(day * DAY_S, "gpu1", "", kind, "a line", user) for user in users]
            look = Look(0, day * DAY_S, "audit", "prod.py", "", True, 0, {})
            kept.keep(look, nodes, events)
        document = lemons.find_lemons(kept, {*kept.names()}, 0.0, 90 * DAY_S)
    named = [lemon.unit for lemon in document.lemons]
    assert named == (["gpu1"] if lemons.WITNESSES[kind] in makes_a_lemon else [])


@with_table("logs, days")
def test_days_on_which_users_logs_count(logs, days):
    events = [
        Event(day * DAY_S, "gpu1", "", "postmortem-gpu", "a line", user)
        for user, user_days in logs.items()
        for day in user_days
    ]
    # The same users' logs of another kind, or of another node, say nothing more.
    events += [
        Event(DAY_S, "gpu1", "", "postmortem-network", "a line", "1004"),
        Event(DAY_S, "gpu2", "", "postmortem-gpu", "a line", "1004"),
    ]
    assert len([*lemons.events_that_count(events)]) == days
