"""The command line."""

from specjax.cli.main import main as main
