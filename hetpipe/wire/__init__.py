"""gRPC, and the only package that sees generated types: messages, errors as statuses, channels, servers, calls."""

import os

# Read once, when grpc is imported. Without it gRPC's library logs lines like "Got goaway … connection idle" to the
# standard error of an idle client. A value set by the user stays.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
