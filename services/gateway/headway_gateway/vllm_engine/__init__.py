"""The service ``vllm.grpc.engine.VllmEngine``, for the gateway ``smg``, on ``headway.v1.Generation``.

Must not know: ZeroMQ, how requests run. It is imported only if served; its stubs come with the extra ``smg``.
"""
