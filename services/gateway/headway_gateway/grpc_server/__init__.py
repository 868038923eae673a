"""A gRPC server in the gateway's own event loop.

It serves the handlers that generated code makes. The messages of all streams of a step leave in one write per connection,
without a thread: grpcio's server takes a write, two threads and a completion for each message. Must not know: any
service, tokens of callers, the scheduler.
"""
