"""`python -m prooflens`: the command line."""

from prooflens.cli import main

main()
