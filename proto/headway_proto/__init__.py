"""Everything that crosses a process boundary: the public gRPC API and the two ZeroMQ protocols.

Owns: message shapes, encoding, framing. Must not know: how a process acts on a message.
"""
