"""gRPC, and the only package that sees generated types: messages, errors as statuses, channels, servers, calls."""

import os

# Read once, when grpc is imported: without it an idle client gets lines like "Got goaway … connection idle" on its
# standard error from gRPC's own library. Who has set it, knows why.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
