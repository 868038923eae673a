"""The service ``vllm.grpc.engine.VllmEngine``, for the gateway ``smg``."""
