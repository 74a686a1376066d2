"""The engine: text or tokens in, text and metrics out."""
