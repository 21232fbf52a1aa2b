"""Runs a benchmark by its name: `benchmarks/run NAME`."""

import importlib
import sys

if __name__ == "__main__":
    module = importlib.import_module(f"benchmarks.{sys.argv[1]}")
    sys.exit(module.BENCHMARK.main(sys.argv[1], module.__doc__))
