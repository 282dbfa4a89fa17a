"""`python -m services.agent`: the same as `hetpipe serve agent`, from a copy of the source."""

from __future__ import annotations

import sys

from hetpipe.server.agent.main import main

if __name__ == "__main__":
    sys.exit(main())
