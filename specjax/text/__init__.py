"""Text in and out: tokenizers, chat templates, stop strings."""
