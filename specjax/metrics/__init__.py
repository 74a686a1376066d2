"""Figures of a running engine."""
