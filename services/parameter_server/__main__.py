"""`python -m services.parameter_server`: the same as `hetpipe serve parameter-server`, from a copy of the source."""

from __future__ import annotations

import sys

from hetpipe.server.shard.main import main

if __name__ == "__main__":
    sys.exit(main())
