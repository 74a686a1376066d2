"""The paged KV cache: pages, the budget of pages, and the prefixes that requests share."""
