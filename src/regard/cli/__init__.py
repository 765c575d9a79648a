"""The commands by kind. Each reads its arguments, calls one function of the package, and prints the result."""
