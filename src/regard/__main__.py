"""``python -m regard`` and the command ``regard``; torchrun starts it this way."""

import sys


def main() -> None:
    """Run a command. Ctrl-C while it is imported is not a traceback either."""
    try:
        from regard.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
