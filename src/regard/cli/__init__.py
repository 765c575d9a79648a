"""The command line, one module per group of commands.

A command parses its arguments, calls one function of the package, and prints the result. Modules that take long to
import, torch above all, are imported inside the commands, so that ``regard --help`` is fast.
"""
