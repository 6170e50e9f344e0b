"""The `safeops` command. It is not in safeops, which imports torch: `safeops lint` needs neither."""

import sys


def main():
    if sys.argv[1:2] == ["lint"]:
        from safeops_lint.command import main

        return main(sys.argv[2:], "safeops lint")
    from safeops.cli import main

    return main()
