"""Entry point of `python -m sidestream.tools.dev.chaos`."""

import sys

from .run import main

sys.exit(main())
