"""Bounds on numbers and texts exchanged between processes.

They are part of the types of the values (`values.run`, `values.plan`), so everything decoded from JSON or a message is
checked against them. Values created within a process are not checked.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

#: Upper bound of clocks, counts, bytes and terms, so that their sums fit into signed 64-bit integers.
MAX_COUNT = 1 << 53

#: Samples of a data set: the bitmap of those in use is sent as hexadecimal text in one message.
MAX_SAMPLES = 20_000_000

#: Shards of a job, and stages over all its virtual workers: the number of streams that may follow its decision log.
MAX_SHARDS = 64
MAX_STAGES = 4_096

#: Worker processes that read data for one stage.
MAX_DATA_WORKERS = 256

#: Bytes of the code that is sent along with a job, packed: it is part of the job's submission, wherever that is stored.
MAX_CODE_BYTES = 1 << 20

#: Characters of a name, of a path, and of a sentence. Longer sentences are truncated.
MAX_NAME_CHARACTERS = 1_024
MAX_PATH_CHARACTERS = 4_096
MAX_SENTENCE_CHARACTERS = 4_000

#: Entries of a list that is displayed or repeated in a reply: mistakes of a job, jobs of a member.
MAX_LISTED = 1_000

#: A job id: the job's name and a digest.
JOB_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}", re.ASCII)

#: Dimensions of a tensor.
MAX_RANK = 32


def cut(sentence: str) -> str:
    """Truncate a sentence that is too long."""
    return sentence if len(sentence) <= MAX_SENTENCE_CHARACTERS else f"{sentence[: MAX_SENTENCE_CHARACTERS - 1]}…"


#: Constraints of an `Annotated` count, and of a clock, where the clock before the first is -1.
COUNT = Field(ge=0, lt=MAX_COUNT)
CLOCK = Field(ge=-1, lt=MAX_COUNT)

Count = Annotated[int, COUNT]
Seconds = Annotated[float, Field(ge=0.0, lt=MAX_COUNT)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
Sentence = Annotated[str, AfterValidator(cut)]
