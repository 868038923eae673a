"""gRPC server reflection, v1alpha and v1."""

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from headway_gateway.grpc_server.server import GrpcServer

_ALPHA_PACKAGE = "grpc.reflection.v1alpha"
_FILE = "grpc/reflection/v1/reflection.proto"
_PACKAGE = "grpc.reflection.v1"
_SERVICE = f"{_PACKAGE}.ServerReflection"


def add_reflection(server: GrpcServer, service_names: Sequence[str]) -> None:
    """Let ``server`` describe these services."""
    pool = descriptor_pool.Default()
    _add_v1_descriptors(pool)
    servicer = reflection.aio.ReflectionServicer((*service_names, reflection.SERVICE_NAME, _SERVICE), pool=pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers(_SERVICE, {"ServerReflectionInfo": method})


def _add_v1_descriptors(pool: descriptor_pool.DescriptorPool) -> None:
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.name = _FILE
        file.package = _PACKAGE
        for message in file.message_type:
            for field in message.field:
                if not field.HasField("type_name"):
                    continue  # a scalar
                field.type_name = _renamed(field.type_name)
        for service in file.service:
            for method in service.method:
                method.input_type = _renamed(method.input_type)
                method.output_type = _renamed(method.output_type)
        pool.AddSerializedFile(file.SerializeToString())


def _renamed(type_name: str) -> str:
    return type_name.replace(f".{_ALPHA_PACKAGE}.", f".{_PACKAGE}.")
