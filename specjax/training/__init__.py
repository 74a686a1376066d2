"""Train EAGLE-3 heads and block drafters on answers that the target generated."""
