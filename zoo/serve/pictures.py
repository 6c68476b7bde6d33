"""POST /v1/images/generations: pictures of a prompt, whole or with their making as a stream."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from zoo.serve.errors import ApiError
from zoo.serve.fields import Fields, read_json
from zoo.serve.models import Served
from zoo.serve.streams import EventStream, while_connected
from zoo.serve.worker import PAUSE_S

if TYPE_CHECKING:
    from PIL import Image

    from zoo.stable_diffusion.making import Step
    from zoo.stable_diffusion.pipeline import StableDiffusion

MOST_PICTURES, MOST_PIXELS, MOST_STEPS, MOST_PREVIEWS = 10, 2048 * 2048, 200, 3
LONGEST_PROMPT = 32_000  # characters; OpenAI's
FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}
_OWN = ("negative_prompt", "steps", "seed", "cfg_scale", "sampler", "clip_skip")
_KNOWN = ("prompt", "model", "n", "size", "response_format", "output_format", "quality", "style",
          "background", "moderation", "output_compression", "stream", "partial_images",
          *_OWN)  # fmt: skip


class Stopped(Exception):
    """Nobody waits for the picture any more."""


async def generations(request: Request) -> Response:
    """The endpoint."""
    fields = Fields(await read_json(request), _KNOWN)
    model = request.app.state.models.find("pictures", fields)
    prompt = fields.text("prompt", longest=LONGEST_PROMPT)
    options = _options(fields)
    kind = fields.choice("output_format", "png", FORMATS)
    if fields.get("response_format", "b64_json") != "b64_json":
        problem = "'response_format' can only be b64_json: no picture is kept to be fetched"
        raise ApiError(400, problem, "response_format")
    previews = fields.integer("partial_images", 0, 0, MOST_PREVIEWS)
    if fields.flag("stream"):
        events = _events(model, prompt, options, kind, previews)
        return await EventStream(events).start(request.receive)
    images = await while_connected(request.receive, _pictures(model, prompt, options))
    data = [{"b64_json": await asyncio.to_thread(_encoded, image, kind)} for image in images]
    width, height = images[0].size
    named = {"created": int(time.time()), "data": data, "output_format": kind}
    return JSONResponse(named | {"size": f"{width}x{height}"})


def _options(fields: Fields) -> dict[str, Any]:
    """The fields of `Settings` that a request may choose."""
    options: dict[str, Any] = {"batch": fields.integer("n", 1, 1, MOST_PICTURES)}
    size = fields.text("size", "auto", longest=20)
    if size != "auto":
        across, _, down = size.lower().partition("x")
        is_size = across.isascii() and across.isdigit() and down.isascii() and down.isdigit()
        if not is_size or int(across) * int(down) > MOST_PIXELS:
            expected = f"auto or WIDTHxHEIGHT, in all at most {MOST_PIXELS} pixels"
            raise fields.wrong("size", expected, size)
        options |= {"width": int(across), "height": int(down)}
    if "steps" in fields:
        options["steps"] = fields.integer("steps", None, 1, MOST_STEPS)
    if "seed" in fields:
        options["seed"] = fields.integer("seed", None, 0, (1 << 63) - 1)
    if "cfg_scale" in fields:
        options["cfg_scale"] = fields.number("cfg_scale", None, 0, 1000)
    if "clip_skip" in fields:
        options["clip_skip"] = fields.integer("clip_skip", None, 1, 100)
    for name in ("negative_prompt", "sampler"):
        if name in fields:
            options[name] = fields.text(name, longest=LONGEST_PROMPT)
    return options


async def _pictures(
    model: Served,
    prompt: str,
    options: dict[str, Any],
    on_step: Callable[[StableDiffusion, Step], None] | None = None,
) -> list[Image.Image]:
    """The pictures; ends the work when it is cancelled."""
    stop = threading.Event()

    def job(diffusion: StableDiffusion) -> list[Image.Image]:
        def after(step: Step) -> None:
            if stop.is_set():
                raise Stopped
            if on_step is not None:
                on_step(diffusion, step)
            time.sleep(PAUSE_S)

        return diffusion.txt2img(prompt, after, **options)

    with model.gate.entered():
        try:
            return await model.run(job)
        finally:
            stop.set()


async def _events(
    model: Served, prompt: str, options: dict[str, Any], kind: str, previews: int
) -> AsyncIterator[dict[str, Any]]:
    """How far it is after each step, pictures to come at evenly spread ones, the pictures."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()
    shown = 0

    def on_step(diffusion: StableDiffusion, step: Step) -> None:
        nonlocal shown
        done = {"step": step.done, "steps": step.total, "index": step.index}
        events = [{"type": "image_generation.progress", **done}]
        if shown < previews and step.done * (previews + 1) >= (shown + 1) * step.total:
            image = _encoded(diffusion.preview(step.picture), kind)
            named = {"type": "image_generation.partial_image", "partial_image_index": shown}
            events.append(named | _about(diffusion, kind, options) | {"b64_json": image})
            shown += 1
        for event in events:
            loop.call_soon_threadsafe(queue.put_nowait, event)

    work = asyncio.ensure_future(_pictures(model, prompt, options, on_step))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (event := await queue.get()) is not None:
            yield event
        for image in await work:
            encoded = await asyncio.to_thread(_encoded, image, kind)
            named = {"type": "image_generation.completed", "created_at": int(time.time())}
            size = {"size": f"{image.width}x{image.height}", "output_format": kind}
            yield named | size | {"b64_json": encoded}
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _about(diffusion: StableDiffusion, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    own = diffusion.kind.size
    size = f"{options.get('width', own)}x{options.get('height', own)}"
    return {"created_at": int(time.time()), "output_format": kind, "size": size}


def _encoded(image: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    image.save(file, FORMATS[kind])
    return base64.b64encode(file.getvalue()).decode("ascii")
