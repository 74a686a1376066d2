"""Requests and the order in which they run."""
