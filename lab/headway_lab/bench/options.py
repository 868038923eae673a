"""The flags of ``headway bench``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headway_lab.workload.options import LoadOptions
from headway_process.addresses import HTTP_URL_FORM, is_http_url
from headway_proto.wording import shown

DEFAULT_ADDRESS = "127.0.0.1:50051"


class BenchOptions(LoadOptions, frozen=True, kw_only=True):
    """The options of ``bench`` and ``bench capacity``."""

    address: Annotated[str, Meta(description="a Headway gateway, HOST:PORT")] = DEFAULT_ADDRESS
    url: Annotated[
        str, Meta(description="an OpenAI-compatible server instead, as http://127.0.0.1:8000/v1; needs the extra bench")
    ] = ""
    endpoint: Annotated[
        Literal["completions", "chat"], Meta(description="for --url: /completions, or /chat/completions")
    ] = "completions"
    model: Annotated[str, Meta(description="for --url: the model; empty: the first that the server lists")] = ""
    body: Annotated[
        dict[str, str], Meta(description="for --url: add a field with a JSON value to each request, as min_tokens=8")
    ] = msgspec.field(default_factory=dict)
    token_file: Annotated[str, Meta(description="file with the bearer token")] = ""
    root_certificates: Annotated[str, Meta(description="use TLS and trust these certificates (PEM)")] = ""
    client_certificate: Annotated[str, Meta(description="certificate to show to the server (PEM)")] = ""
    client_key: Annotated[str, Meta(description="private key of --client-certificate (PEM)")] = ""
    connections: Annotated[int, Meta(ge=1, le=1024, description="gRPC connections of each client process")] = 4
    temperature: Annotated[float, Meta(ge=0, le=100, description="sampling temperature; 0: greedy")] = 0.0
    ignore_eos: Annotated[
        bool,
        Meta(
            description="answers have the requested length, without an earlier end (--url: a field that many servers know)"
        ),
    ] = True
    timeout_s: Annotated[float, Meta(gt=0, le=1e6, description="end a request after this time, in seconds")] = 600.0
    processes: Annotated[int, Meta(ge=1, le=256, description="client processes that share the load")] = 1
    max_late_ms: Annotated[
        float,
        Meta(
            gt=0, le=1e6, description="warn if the client was later than this at p99, because then the figures mislead"
        ),
    ] = 10.0
    require_rate: Annotated[
        float,
        Meta(ge=0, le=1, description="exit with 1 unless this share of the asked rate was reached; 0: only report it"),
    ] = 0.0
    json: Annotated[str, Meta(description="write the result to this file, with every request")] = ""
    csv: Annotated[str, Meta(description="write a line per request to this file")] = ""
    png: Annotated[str, Meta(description="draw the result to this file; needs the extra bench")] = ""
    attainment: Annotated[
        float, Meta(gt=0, lt=1, description="capacity: share of requests that must keep their objectives")
    ] = 0.95
    most_rate: Annotated[
        float, Meta(gt=0, le=1e6, description="capacity: highest rate to try, in requests per second")
    ] = 1e4
    tolerance: Annotated[
        float,
        Meta(
            gt=0, le=1, description="capacity: stop when the highest good and the lowest bad rate differ by this share"
        ),
    ] = 0.05
    probe_requests: Annotated[
        int, Meta(ge=20, le=1 << 20, description="capacity: fewest requests of a first run at a rate")
    ] = 150
    probe_s: Annotated[float, Meta(ge=0, le=1e6, description="capacity: fewest seconds of a first run at a rate")] = (
        10.0
    )

    def validate(self) -> None:
        """See ``LoadOptions.validate``."""
        super().validate()
        if self.url and not is_http_url(self.url):
            raise ValueError(f"url: {shown(self.url)} is not allowed; allowed: {HTTP_URL_FORM}")
        if bool(self.client_certificate) != bool(self.client_key):
            raise ValueError("client_certificate: is not allowed alone; allowed: with --client-key")
        for field, value in self.body.items():
            try:
                msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise ValueError(f"body: {shown(f'{field}={value}')} is not allowed: {error}") from None
        if self.arrivals == "closed" and not self.trace and self.require_rate:
            raise ValueError(
                f"require_rate: {self.require_rate:g} is not allowed with closed arrivals, which ask for no rate; "
                "allowed: --arrivals poisson or gamma, or --trace"
            )
        if self.arrivals == "closed" and not self.trace and self.processes > self.users:
            raise ValueError(f"processes: {self.processes} is not allowed; allowed: at most users, {self.users}")
