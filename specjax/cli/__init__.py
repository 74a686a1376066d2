"""The command line."""

from specjax.cli.main import main as main

__all__ = ["main"]
