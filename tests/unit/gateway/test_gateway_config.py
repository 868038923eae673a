"""The gateway's configuration: what is refused, and how it is said."""

import msgspec
import pytest

from headway_gateway.config import GatewayConfig, split_address


def config(**changes: object) -> GatewayConfig:
    return GatewayConfig(**({"model": "m", "ingress_address": "ipc:///run/headway/ingress"} | changes))


def test_defaults_are_valid():
    config().validate()


def test_origins_are_told_apart():
    listed = config(http_address="127.0.0.1:1", allowed_origins="http://localhost:3000, https://a.example,app://[::1]")
    listed.validate()
    assert listed.origins == {"http://localhost:3000", "https://a.example", "app://[::1]"}
    assert config().origins == frozenset()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grpc_address": "localhost"}, "grpc_address: 'localhost' is not allowed; allowed: HOST:PORT"),
        ({"grpc_address": "127.0.0.1:65536"}, "grpc_address: '127.0.0.1:65536' is not allowed"),
        ({"grpc_address": "127.0.0.1:-1"}, "grpc_address: "),
        ({"grpc_address": "0.0.0.0:50051"}, "grpc_address: '0.0.0.0:50051' is not allowed; allowed: a loopback"),
        ({"grpc_address": "[::]:50051"}, "grpc_address: "),
        ({"grpc_address": "example.org:50051"}, "grpc_address: "),
        ({"ingress_address": "http://x"}, "ingress_address: 'http://x' is not allowed; allowed: ipc://PATH or tcp"),
        (
            {"ingress_address": "tcp://10.0.0.1:5"},
            "allowed: ipc://PATH, a loopback tcp:// address, or any tcp:// address together with curve_keys",
        ),
        ({"ingress_address": "tcp://127.0.0.1:0"}, "allowed: ipc://PATH or tcp://HOST:PORT"),
        ({"ingress_address": "ipc://" + "x" * 108}, "allowed: an ipc path of at most 107 bytes, not 108"),
        ({"model": ""}, "model: '' is not allowed"),
        ({"workers": 0}, "workers: 0 is not allowed; allowed: 1 to 64"),
        ({"max_concurrent_streams": 0}, "max_concurrent_streams: "),
        ({"max_message_bytes": 0}, "max_message_bytes: "),
        ({"tokenizer_threads": 0}, "tokenizer_threads: "),
        ({"grace_s": -1.0}, "grace_s: -1.0 is not allowed; allowed: 0 to 86400 seconds"),
        ({"grace_s": float("nan")}, "grace_s: "),
        ({"stall_s": 0.0}, "stall_s: "),
        ({"silence_timeout_s": 0.0}, "silence_timeout_s: "),
        ({"unavailable_grace_s": float("inf")}, "unavailable_grace_s: "),
        ({"tls_cert_file": "c.pem"}, "tls_key_file: '' is not allowed; allowed: a PEM file, because tls_cert_file"),
        ({"tls_key_file": "k.pem"}, "tls_cert_file: "),
        ({"tls_client_ca_file": "ca.pem"}, "tls_cert_file: '' is not allowed; allowed: a PEM file, because tls_client"),
        ({"max_tenant_requests_per_s": -1.0}, "max_tenant_requests_per_s: -1.0 is not allowed"),
        ({"max_tenant_requests_per_s": float("nan")}, "max_tenant_requests_per_s: nan is not allowed"),
        (
            {"allowed_origins": "*"},
            "allowed_origins: '*' is not allowed; allowed: SCHEME://HOST or SCHEME://HOST:PORT as",
        ),
        ({"allowed_origins": "https://a.example, null"}, "allowed_origins: 'null' is not allowed"),
        ({"allowed_origins": "http://a.example/"}, "allowed_origins: 'http://a.example/' is not allowed"),
        ({"allowed_origins": "http://A.example"}, "allowed_origins: 'http://A.example' is not allowed"),
        (
            {"allowed_origins": "http://localhost:3000"},
            "allowed_origins: 'http://localhost:3000' is not allowed; allowed: empty, because http_address is empty",
        ),
        ({"launcher_token_digest": "x"}, "launcher_token_digest: 'x' is not allowed"),
        (
            {"auth_token_file": "/nowhere/token"},
            "auth_token_file: '/nowhere/token' is not allowed; allowed: a file that",
        ),
    ],
)
def test_refusals_are_one_line_and_name_the_field(changes, message):
    with pytest.raises(ValueError) as refusal:
        config(**changes).validate()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_beyond_loopback_takes_tls_and_token_or_a_word(tmp_path):
    for name in ("cert", "key", "token"):
        (tmp_path / name).write_text("x\n")
    everywhere = {"grpc_address": "0.0.0.0:50051"}
    tls = {"tls_cert_file": str(tmp_path / "cert"), "tls_key_file": str(tmp_path / "key")}
    token = {"auth_token_file": str(tmp_path / "token")}
    config(**everywhere, **tls, **token).validate()
    config(**everywhere, allow_insecure_bind=True).validate()
    config(**everywhere, **tls, tls_client_ca_file=str(tmp_path / "cert")).validate()
    for part in (tls, token):
        with pytest.raises(ValueError, match="loopback"):
            config(**everywhere, **part).validate()


def test_an_address_beyond_loopback_takes_keys():
    config(ingress_address="tcp://10.0.0.1:5", curve_keys="/keys").validate()
    config(ingress_address="tcp://[::1]:5").validate()


@pytest.mark.parametrize(
    "content", [b" \n", b"\xff\n", b"two\nlines\n", b"two words\n", b"a root token\n", b"cut-short"]
)
def test_an_unusable_token_file_is_refused(tmp_path, content):
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ValueError, match=r"auth_token_file: .*a readable file with a token"):
        config(auth_token_file=str(tmp_path / "token")).validate()


@pytest.mark.parametrize(("address", "expected"), [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:50051", ("::1", 50051))])
def test_addresses_are_split(address, expected):
    assert split_address(address) == expected


def test_every_field_is_described():
    info = msgspec.inspect.type_info(GatewayConfig)
    for field in info.fields:
        assert isinstance(field.type, msgspec.inspect.Metadata), field.name
        assert field.type.extra_json_schema["description"]
