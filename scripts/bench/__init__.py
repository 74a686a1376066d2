"""Benchmarks, which `python scripts/bench NAME` runs."""
