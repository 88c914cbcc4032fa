"""The command `cerberus`: `generate`, `bench`, `train` and `info`.

Nothing heavy is imported before the command line has been checked, so help and refusals come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: command line without the program's name, by default the process's.

    Returns:
        0 when done, 1 when something needed is missing or broken, 2 for wrong use, 130 after an interrupt. The
        last three come with one line on standard error; ``CERBERUS_TRACEBACK=1`` shows where an error came from.
    """
    try:
        status = _run(None if arguments is None else list(arguments))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe left; nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def _run(arguments: list[str] | None) -> int:
    import typer

    from .app import app
    from .messages import is_expected, one_line, usage_line

    # The class moved between releases of typer, this relation did not.
    usage_error: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")
    try:
        status = app(arguments, prog_name="cerberus", standalone_mode=False)
    except usage_error as error:
        return _say(usage_line(error), USAGE_ERROR)
    except typer.Abort:
        return _say("interrupted", INTERRUPTED)
    except typer.Exit as error:
        status = error.exit_code
    except Exception as error:
        if os.environ.get("CERBERUS_TRACEBACK") or not is_expected(error):
            raise
        return _say(one_line(error), FAILURE)
    if status == INTERRUPTED:
        return _say("interrupted", INTERRUPTED)
    return status or 0


def _say(line: str, status: int) -> int:
    print(f"\ncerberus: {line}" if status == INTERRUPTED else f"cerberus: {line}", file=sys.stderr)
    return status
