"""Benchmarks that `specjax bench NAME` runs."""
