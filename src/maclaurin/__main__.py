"""`python -m maclaurin`."""

from maclaurin.cli.main import main

main()
