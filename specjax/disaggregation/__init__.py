"""Disaggregation: one engine prefills prompts, another one decodes them."""
