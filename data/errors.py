"""The one kind of error a user is meant to see, and how a program leaves when it meets one."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake the user can mend: one sentence that says what is wrong and what would be right."""


@contextmanager
def exit_cleanly() -> Iterator[None]:
    """Wrap a program's main: what a user can cause ends in one line on stderr, never in a traceback.

    UserError exits with code 1, and so does what the operating system refuses (OSError: a full disk, a name too long).
    Ctrl-C exits with 130 (128 + SIGINT). A reader that went away (`... | head`) exits quietly with 141 (128 + SIGPIPE).
    Everything else is a bug of ours and keeps its traceback.
    """
    _make_output_safe()
    try:
        yield
        sys.stdout.flush()  # a closed pipe shows here, where it can still be caught, and not at interpreter exit
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Python flushes stdout once more on its way out; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _make_output_safe() -> None:
    """Let no print fail for what cannot be shown: a closed output goes nowhere, an odd character becomes a mark."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the stream closed, `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="replace")
