"""Everything that crosses a process boundary: the public gRPC API and the two ZeroMQ protocols.

Owns: message shapes, their encoding, and the framing around them.
Must not know: how any process acts on a message. Imports nothing else of Headway.
"""
