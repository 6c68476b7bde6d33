"""POST /v1/embeddings: texts as vectors."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from zoo.serve.completions import texts_or_ids
from zoo.serve.errors import ApiError
from zoo.serve.fields import Fields, read_json
from zoo.serve.generation import prepared
from zoo.serve.models import Served
from zoo.serve.scheduler import checked_prompt
from zoo.serve.streams import while_connected

if TYPE_CHECKING:
    from zoo.llama.generate import Llama

MOST_INPUTS = 2048  # OpenAI's
_KNOWN = ("input", "model", "encoding_format", "dimensions")


async def embeddings(request: Request) -> Response:
    """The endpoint."""
    fields = Fields(await read_json(request), _KNOWN)
    model = request.app.state.models.find("chat", fields)
    inputs = texts_or_ids(fields, "input", MOST_INPUTS)
    form = fields.choice("encoding_format", "float", ("float", "base64"))
    size = fields.integer("dimensions", None, 1, 1 << 20)
    vectors, tokens = await while_connected(request.receive, _vectors(model, inputs))
    if size is not None and size > len(vectors[0]):
        raise ApiError(400, f"'dimensions' can be at most {len(vectors[0])}", "dimensions")
    data = [
        {"object": "embedding", "index": n, "embedding": _encoded(_cut(vector, size), form)}
        for n, vector in enumerate(vectors)
    ]
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": used})


async def _vectors(model: Served, inputs: list[str | list[int]]) -> tuple[list[np.ndarray], int]:
    """A vector per input, and how many tokens they had; chats get their steps between inputs."""

    def encoded(llama: Llama) -> list[list[int]]:
        prompts = [llama.prompt_ids(each) if isinstance(each, str) else each for each in inputs]
        for ids in prompts:
            checked_prompt(llama, ids)
        return prompts

    with model.gate.entered():
        _, prompts = await prepared(model, encoded)
        vectors = []
        for ids in prompts:
            vectors.append(await model.run(lambda scheduler, ids=ids: scheduler.embed(ids)))
        return vectors, sum(map(len, prompts))


def _cut(vector: np.ndarray, size: int | None) -> np.ndarray:
    """The first `size` numbers, of length 1 again."""
    if size is None:
        return vector
    length = float(np.linalg.norm(vector[:size]))
    return vector[:size] / np.float32(length or 1)


def _encoded(vector: np.ndarray, form: str) -> list[float] | str:
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
