"""The counters of a look at a node, which the next look is compared with."""

from __future__ import annotations

from nodeready.subjects.context import CounterSample, earlier_counters

BOOT, OTHER = "b00f5f6e-0000-4000-8000-000000000001", "b00f5f6e-0000-4000-8000-000000000002"


def test_another_boot_or_clock_has_no_history():
    text = f'{{"boot_id":"{BOOT}","taken":{{"rdma":[1000.0,{{"mlx5_0/1.link_downed":3}}]}}}}'
    sample = CounterSample.parse(text)
    before = earlier_counters(sample, BOOT, 1060.5)["rdma"]
    assert (before.seconds, before.values) == (60.5, {"mlx5_0/1.link_downed": 3})
    for boot, now in ((OTHER, 2000.0), ("", 2000.0), (BOOT, 999.0)):
        assert earlier_counters(sample, boot, now) == {}
    assert earlier_counters(CounterSample.parse(""), BOOT, 2000.0) == {}
    assert earlier_counters(CounterSample.parse('{"boot_id":"","taken":{}}'), "", 2000.0) == {}
