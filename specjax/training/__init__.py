"""Training of EAGLE-3 draft heads on a target's own generations."""
