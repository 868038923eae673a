"""The service ``vllm.grpc.engine.VllmEngine``, for the gateway ``smg``. It is imported only if served."""
