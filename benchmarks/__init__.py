"""Benchmarks on the lab: `benchmarks/run [NAME]`. Ratios of one run, no promise of seconds."""
