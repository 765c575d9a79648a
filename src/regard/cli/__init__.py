"""The command line, one module per group of commands.

A command parses its arguments, calls one function of the package, and prints the result. Modules that are slow to
import, above all torch, are imported inside the commands, so that ``regard --help`` is fast.
"""
