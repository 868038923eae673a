"""The gateway: text and the public gRPC API. Must not know: blocks, tensors, scheduling."""
