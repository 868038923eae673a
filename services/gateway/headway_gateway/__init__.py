"""The gateway process: knows text and gRPC; no blocks, no tensors, no scheduling."""
