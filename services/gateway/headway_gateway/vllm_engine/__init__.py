"""The service ``vllm.grpc.engine.VllmEngine``, for the gateway ``smg``.

Owns: the translation to ``headway.v1.Generation``, and facts that only this service reports. Must not know: ZeroMQ, how requests are run.

Imported only if the service is offered; its stubs come with the extra ``smg``.
"""
