"""Memory for KV blocks, on the device and beside it, and moves between the two."""
