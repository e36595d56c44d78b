"""Entry point of `python -m sidestream.tools.chaos`."""

import sys

from .run import main

sys.exit(main())
