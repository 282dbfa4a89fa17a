"""The independent history checker (`wsp.md` §7): verifies a run's history, and imports no code that it verifies.

The formulas are duplicated here on purpose; only `hetpipe.errors` is shared. The entry point is `checker`; each file
verifies one concern: `replay` the decision log, `versions` the weights of each minibatch, `lanes` the work of each
stage, `orders` the order of its work, `replicas` the updates that replicas make together, `shards` waves and pulls,
`samples` the ledger, `terms` the terms.
"""

from __future__ import annotations

from hetpipe.checker.checker import check_events, check_run
from hetpipe.checker.reading import history_files
from hetpipe.checker.report import Counts, Kind, Report, Violation

__all__ = ["Counts", "Kind", "Report", "Violation", "check_events", "check_run", "history_files"]
