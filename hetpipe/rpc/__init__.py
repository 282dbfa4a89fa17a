"""gRPC, and the only package that sees generated types: messages, errors as statuses, channels, servers, calls."""
