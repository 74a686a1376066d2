"""How commands and scripts end where they were given bad input."""

import sys

EXIT_BAD_INPUT = 2


def report_error(program: str, error: Exception) -> int:
    """Name an error in one line on standard error; returns the exit status."""
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"{program}: error: {message}", file=sys.stderr)
    return EXIT_BAD_INPUT
