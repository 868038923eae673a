"""The service ``vllm.grpc.engine.VllmEngine``, for the gateway ``smg``.

Owns: the translation to ``headway.v1.Generation``. Must not know: ZeroMQ, how requests run.

Imported only if served; its stubs come with the extra ``smg``.
"""
