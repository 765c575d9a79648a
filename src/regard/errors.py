"""The exception for errors that a user can fix."""


class RegardError(Exception):
    """An error in the user's input. The message names the bad value, where it was found, and what is allowed.

    The command line prints it as ``regard: …`` without a traceback and exits with status 2. An internal error is an
    ``AssertionError``, never this.
    """
