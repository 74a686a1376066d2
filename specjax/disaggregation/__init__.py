"""Prefill split from decode: prompts computed by one engine, decoded by another."""
