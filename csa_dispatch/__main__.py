"""``python -m csa_dispatch``: the command line without an installed script."""

from .cli import main

main()
