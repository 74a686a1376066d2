"""Target and draft networks."""
