"""Benchmarks, which `specjax bench NAME` runs."""
