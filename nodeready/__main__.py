"""`python -m nodeready`."""

from nodeready.cli import main

main()
