"""`python -m prooflens.cli`."""

from prooflens.cli import main

main()
