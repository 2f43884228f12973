"""``python -m tether``, for launchers that start modules."""

import sys

from tether.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
