"""Engines for serving frameworks, which are optional dependencies."""
