"""`python -m hetpipe`: the same as the program `hetpipe`."""

from __future__ import annotations

from hetpipe.cli.main import main

if __name__ == "__main__":
    main()
