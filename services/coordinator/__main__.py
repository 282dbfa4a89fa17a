"""`python -m services.coordinator`: the same as `hetpipe serve coordinator`, from a copy of the source."""

from __future__ import annotations

import sys

from hetpipe.server.coordinator.main import main

if __name__ == "__main__":
    sys.exit(main())
