"""A model whose import takes until there is a certain file: the import of a large project on a busy machine."""

from __future__ import annotations

import os
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK
from tests import models

held_until = os.environ.get("HELD_UNTIL")
while held_until is not None and not Path(held_until).exists():
    SYSTEM_CLOCK.sleep(0.02)

mlp32 = models.mlp32
