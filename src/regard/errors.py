"""The one exception that speaks to a person."""


class RegardError(Exception):
    """Something the user can put right: what was wrong, where it stands, what is allowed.

    The command line prints it as ``regard: …`` without a traceback and exits with status 2.
    A mistake of our own is an ``assert``, never this.
    """
