"""`python -m safeops`, the same as the `safeops` command."""

import sys

from safeops.cli import main

if __name__ == "__main__":
    sys.exit(main())
