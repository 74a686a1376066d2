"""Text processing: tokenizers, chat templates, stop strings."""
