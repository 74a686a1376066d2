"""Paged KV cache: pages, their sizes, and the prefixes that requests share."""
