"""Sampling: its parameters, their table by request slot, and the draw of a token."""
