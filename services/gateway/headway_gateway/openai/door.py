"""The door for OpenAI's clients: which path leads to which call. Must not know: sockets."""

from collections.abc import Callable

from headway_gateway.access.authentication import Doorkeeper
from headway_gateway.access.credentials import GENERATE
from headway_gateway.access.interceptors import OpenCalls
from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.config import GatewayConfig
from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.openai.application import Application, Bounds, Route
from headway_gateway.openai.chats import Chats
from headway_gateway.openai.completions import Completions
from headway_gateway.openai.other_endpoints import OtherEndpoints
from headway_gateway.openai.pieces import PieceMaker
from headway_gateway.openai.reranking import Reranking
from headway_gateway.openai.responses import Responses
from headway_gateway.openai.web_pages import AsgiApplication, let_in
from headway_gateway.text.tokenization import TextModel


def make_application(
    *,
    generation: GenerationServicer,
    text_model: TextModel,
    problem: Callable[[], str | None],
    doorkeeper: Doorkeeper | None,
    open_calls: OpenCalls,
    statistics: GatewayStatistics,
    config: GatewayConfig,
) -> AsgiApplication:
    """Return the application; ``problem`` returns the reason to send no requests."""
    completions = Completions(generation, text_model)
    piece_maker = PieceMaker(text_model)
    chats = Chats(generation, text_model.bytes_of_token, piece_maker)
    responses = Responses(generation, text_model.bytes_of_token, piece_maker)
    reranking = Reranking(generation, text_model.first_tokens)
    others = OtherEndpoints(generation, problem)
    routes = (
        Route("POST", "/v1/completions", completions.answer, GENERATE),
        Route("POST", "/v1/chat/completions", chats.answer, GENERATE),
        Route("POST", "/v1/responses", responses.answer, GENERATE),
        Route("POST", "/v1/responses/input_tokens", others.input_tokens, GENERATE),
        Route("POST", "/v1/embeddings", others.embeddings, GENERATE),
        *(Route("POST", path, reranking.answer, GENERATE) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        Route("GET", "/v1/models", others.models, GENERATE),
        Route("GET", "/v1/models/", others.model, GENERATE),
        Route("POST", "/tokenize", others.tokenize, GENERATE),
        Route("POST", "/detokenize", others.detokenize, GENERATE),
        Route("GET", "/health", others.health, None, is_open=config.open_health),
    )
    application = Application(
        routes,
        doorkeeper=doorkeeper,
        open_calls=open_calls,
        statistics=statistics,
        bounds=Bounds(config.max_message_bytes, config.slow_client_s),
    )
    return let_in(application, config.origins)
