import sys

from safeops_lint.command import main

sys.exit(main())
