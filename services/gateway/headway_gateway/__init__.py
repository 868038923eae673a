"""The gateway: text and the public gRPC API. Must not know: blocks, tensors, scheduling.

``server`` puts the services together. A request comes in by ``grpc_server`` or ``openai``, is looked at by ``access`` and
``requests``, becomes token ids in ``text``, and runs as one of ``calls`` over ``link``. Rooms stand on floors, as
``pyproject.toml`` says: each imports only from those below it.
"""
