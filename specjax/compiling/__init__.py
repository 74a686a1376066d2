"""Compiling ahead of time, and executables on disk."""
