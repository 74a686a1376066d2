"""Benchmarks; the scripts beside this folder are their doors."""
