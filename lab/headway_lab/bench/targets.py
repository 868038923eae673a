"""The target of a bench, made from its options."""

import ssl

import msgspec

from headway.flags.named_files import bytes_of_file, token_of_file
from headway.flags.settings import ConfigurationError
from headway_lab.bench.options import BenchOptions
from headway_lab.bench.target import Target
from headway_process.tls import tls_context
from headway_proto.wording import shown


def make_target(options: BenchOptions) -> Target:
    """Return the server, not yet connected.

    Raises:
        ConfigurationError: a file is unusable.
    """
    return _openai(options) if options.url else _headway(options)


def _headway(options: BenchOptions) -> Target:
    from headway.client import Endpoint
    from headway.running.health import client_certificate, root_certificates
    from headway_lab.bench.headway_target import HeadwayTarget

    certificate = client_certificate(options.client_certificate, options.client_key, "--client-certificate")
    endpoint = Endpoint(
        options.address,
        token=token_of_file(options.token_file, "--token-file") or None,
        root_certificates=root_certificates(options.root_certificates, "--root-certificates"),
        client_certificate=(certificate.certificate, certificate.key) if certificate else None,
    )
    return HeadwayTarget(
        endpoint,
        num_connections=options.connections,
        seed=options.seed,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
    )


def _openai(options: BenchOptions) -> Target:
    from headway_lab.bench.openai_target import OpenAITarget

    fields = {"temperature": options.temperature}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    return OpenAITarget(
        options.url,
        is_chat=options.endpoint == "chat",
        model=options.model,
        token=token_of_file(options.token_file, "--token-file"),
        tls=_tls(options),
        fields={**fields, **{name: msgspec.json.decode(value) for name, value in options.body.items()}},
        seed=options.seed,
    )


def _tls(options: BenchOptions) -> ssl.SSLContext | None:
    """None means the URL's scheme and the system's authorities."""
    trusted = bytes_of_file(options.root_certificates, "--root-certificates")
    if trusted is None and not options.client_certificate:
        return None
    try:
        context = tls_context(cadata=trusted.decode("ascii") if trusted else None)
        if options.client_certificate:
            context.load_cert_chain(options.client_certificate, options.client_key, password="")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--root-certificates: {shown(options.root_certificates)} cannot be used: {error}"
        ) from None
    return context
