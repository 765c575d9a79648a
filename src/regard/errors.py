"""The exception for errors that a user can fix, and how long values are shown in them."""


class RegardError(Exception):
    """An error in the user's input. The message names the bad value, where it was found, and what is allowed.

    The command line prints it as ``regard: …`` without a traceback and exits with status 2. An internal error is an
    ``AssertionError``, never this.
    """


def shorten(text: str, width: int) -> str:
    """A text cut to a width, with an ellipsis at the end."""
    return text if len(text) <= width else text[: width - 1] + "…"
