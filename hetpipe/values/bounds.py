"""How large the numbers and texts may be that one process tells another.

They stand in the types of the values (`values.run`, `values.plan`), so that whatever is revived from JSON or a message
has been held to them. A value that is made in the process itself is not checked.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

#: Clocks, counts, bytes and terms stay below this: sums of them then fit into the signed 64 bits in which they travel.
MAX_COUNT = 1 << 53

#: Samples of a data set: which of them are used is a bitmap that travels, as hexadecimal text, in one message.
MAX_SAMPLES = 20_000_000

#: Shards of a job, and stages over all its virtual workers: the streams that may follow its decision log at a time.
MAX_SHARDS = 64
MAX_STAGES = 200

#: Characters of a name, of a path, and of a sentence. A longer sentence is cut, for its end is not missed.
MAX_NAME_CHARACTERS = 1_024
MAX_PATH_CHARACTERS = 4_096
MAX_SENTENCE_CHARACTERS = 4_000

#: Entries of a list that is told to people or repeated in an answer: mistakes of a job, jobs of a member.
MAX_LISTED = 1_000

#: What a job is called: its name, for people, and a digest.
JOB_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}", re.ASCII)

#: Dimensions of a tensor.
MAX_RANK = 32


def cut(sentence: str) -> str:
    """The beginning of a sentence that is too long."""
    return sentence if len(sentence) <= MAX_SENTENCE_CHARACTERS else f"{sentence[: MAX_SENTENCE_CHARACTERS - 1]}…"


#: For an `Annotated` count, and for one of clocks, of which the one before the first is -1.
COUNT = Field(ge=0, lt=MAX_COUNT)
CLOCK = Field(ge=-1, lt=MAX_COUNT)

Count = Annotated[int, COUNT]
Seconds = Annotated[float, Field(ge=0.0, lt=MAX_COUNT)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
Sentence = Annotated[str, AfterValidator(cut)]
