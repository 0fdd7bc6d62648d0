"""`python -m tandem` is the command `tandem`."""

from tandem.cli import main

main()
