"""A model whose import takes until there is a certain file: the import of a large project on a busy machine."""

from __future__ import annotations

import os
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK
from tests import models

while not Path(os.environ["HELD_UNTIL"]).exists():
    SYSTEM_CLOCK.sleep(0.02)

mlp32 = models.mlp32
