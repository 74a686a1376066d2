"""Sampling: parameters, the table by request slot, and how a token is drawn."""
