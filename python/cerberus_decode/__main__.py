"""`python -m cerberus_decode` is the command `cerberus`."""

import sys

from .cli import main

sys.exit(main())
