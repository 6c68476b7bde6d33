"""The application: which path is answered by what, within the guard's rules."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from zoo.serve import chat, completions, embeddings, pictures, speech
from zoo.serve.errors import ApiError, on_error
from zoo.serve.guard import Guard, Rules
from zoo.serve.metrics import Metrics
from zoo.serve.models import Models, Served

Endpoint = Callable[[Request], Awaitable[Response]]
CLOSING_S = 10.0  # how long a thread may take for what it is at when the server ends
POSTS: dict[str, Endpoint] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/embeddings": embeddings.embeddings,
    "/v1/audio/transcriptions": speech.transcriptions,
    "/v1/audio/translations": speech.translations,
    "/v1/images/generations": pictures.generations,
}
PAGE = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"),
        "/page.js": ("page.js", "text/javascript")}  # fmt: skip
# The page needs its own two files, this server, and pictures that it makes itself.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def application(models: Models, rules: Rules, metrics: Metrics) -> Starlette:
    """The server as ASGI; `rules` without the paths that need no key, which are set here."""
    gets: dict[str, Endpoint] = {
        "/health": health,
        "/metrics": show_metrics,
        "/v1/models": list_models,
        **{path: page_file(*about) for path, about in PAGE.items()},
    }
    routes = [Route(path, answered(each), methods=["POST"]) for path, each in POSTS.items()]
    routes += [Route(path, answered(each), methods=["GET"]) for path, each in gets.items()]
    routes.append(Route("/v1/models/{name:path}", answered(one_model), methods=["GET"]))
    rules = replace(rules, open_paths=("/health", *PAGE))
    middleware = [Middleware(Guard, rules=rules, metrics=metrics, paths=(*POSTS, *gets))]
    if rules.origins:
        middleware.insert(0, _cors(rules.origins))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        models.close(CLOSING_S)

    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: on_error},
        lifespan=lifespan,
    )
    app.state.models, app.state.metrics = models, metrics
    return app


def answered(endpoint: Endpoint) -> Endpoint:
    """The endpoint with its errors as answers."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:  # noqa: BLE001 - told to the client, and logged if it is ours
            return await on_error(request, error)

    return answer


def _cors(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        max_age=600,
    )


async def health(request: Request) -> Response:
    """Whether the server is up, and how far each model is."""
    served = request.app.state.models.served.values()
    return JSONResponse({"status": "ok", "models": {m.name: m.worker.state for m in served}})


async def show_metrics(request: Request) -> Response:
    """Prometheus's page."""
    metrics = request.app.state.metrics
    for each in request.app.state.models.served.values():
        metrics.inside.set(each.gate.inside, each.name)
    return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    data = [_about(each) for each in request.app.state.models.served.values()]
    return JSONResponse({"object": "list", "data": data})


async def one_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    name = request.path_params["name"]
    found = request.app.state.models.served.get(name)
    if found is None:
        message = f"the model {name[:99]!r} is not served here"
        raise ApiError(404, message, "model", "model_not_found")
    return JSONResponse(_about(found))


def _about(model: Served) -> dict[str, object]:
    named = {"id": model.name, "object": "model", "created": model.created}
    return named | {"owned_by": "menagerie", "kind": model.kind}


def page_file(name: str, media_type: str) -> Endpoint:
    """An endpoint for a file of the page, which is read once."""
    content = files("zoo.serve").joinpath("page", name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return send
