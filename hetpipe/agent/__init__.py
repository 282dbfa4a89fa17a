"""One process per node: it offers the node's devices, and starts, watches and ends the processes that use them."""
