"""What equal replicas of a pipeline do together under `sync: allreduce`: add gradients, and begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Replicas(Protocol):
    """The same stage of all replicas. All of them make the same calls in the same order."""

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the replicas; shapes and dtypes are the same everywhere.

        Raises:
            DeadlineExceeded: another replica did not come in time.
        """
        ...

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by replica 0's.

        Raises:
            DeadlineExceeded: another replica did not come in time.
        """
        ...
