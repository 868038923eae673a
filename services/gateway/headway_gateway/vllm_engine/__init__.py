"""The service ``vllm.grpc.engine.VllmEngine``, by which the field's gateway ``smg`` drives engines of many makes.

Owns: the translation between that service and ``headway.v1.Generation``, and the facts that only that service asks for.
Must not know: ZeroMQ, how requests are checked, run or ended (the affair of what it is translated to).

Nothing here is imported unless the service is offered: its stubs come with the extra ``smg``.
"""
