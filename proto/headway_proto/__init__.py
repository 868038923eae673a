"""The public gRPC API and two ZeroMQ protocols.

Owns: message shapes, encoding, framing. Must not know: how a process acts on a message.
"""
