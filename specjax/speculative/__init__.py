"""The speculative round (draft, verify, extend) and the state between rounds."""
