"""The command `safeops`. It is in this package since importing safeops imports torch, which `safeops lint` does not
need."""

import sys


def main():
    if sys.argv[1:2] == ["lint"]:
        from safeops_lint.command import main

        return main(sys.argv[2:], "safeops lint")
    from safeops.cli import main

    return main()
