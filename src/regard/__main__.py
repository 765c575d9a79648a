"""``python -m regard`` runs the command ``regard``; torchrun starts it this way."""

from regard.cli.main import main

main()
