"""`python -m understudy`: the command line, for environments whose scripts are not on the path."""

import sys

from understudy.cli.main import main

sys.exit(main())
