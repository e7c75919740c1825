"""`python -m ligerzoo` is the command `ligerzoo`."""

import sys

from ligerzoo.cli import main

if __name__ == "__main__":
    sys.exit(main())
