"""`python -m tests.chaos`: the table of what is survived. Exit status 1 if anything is not.

python -m tests.chaos                                       every cell, in an order made from --seed
python -m tests.chaos --only push.after_stage/shard-1/kill  one cell (may be given again)
python -m tests.chaos --only 'snapshot.*'                   one row of the table
python -m tests.chaos --folder DIR                          go on where a command was interrupted that had this folder
python -m tests.chaos --list                                names only, and what is skipped, with reasons
"""

from __future__ import annotations

import sys

from tests.chaos.cells import all_cells, skips
from tests.chaos.command import Command
from tests.chaos.nemesis import FailpointScene

#: Jobs at once. Half of the time is waiting for leases to run out, which costs no processor.
LANES = 2

if __name__ == "__main__":
    command = Command("tests.chaos", "What is survived, and what is not.", all_cells(), skips(), lanes=LANES)
    sys.exit(command.run(FailpointScene()))
