"""A trained network made ready for search: its weights packed, in the number format that suits the machine.

``prepare`` gives an object with the part of a network that search uses. A network it does not know, anything but a
plain Transformer, goes on as it is: ``unfit`` says why.
"""

from regard.fast.layers import without_detours
from regard.fast.network import Fast
from regard.fast.picking import pick, prepare, unfit
from regard.fast.workers import Crew, Lost, at_once, cores

__all__ = [
    "Crew",
    "Fast",
    "Lost",
    "at_once",
    "cores",
    "pick",
    "prepare",
    "unfit",
    "without_detours",
]
