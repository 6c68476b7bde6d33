"""POST /v1/audio/transcriptions and /translations: an uploaded recording as text."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from zoo.serve.errors import ApiError
from zoo.serve.fields import Fields
from zoo.serve.models import Served
from zoo.serve.streams import EventStream, while_connected
from zoo.serve.worker import PAUSE_S

if TYPE_CHECKING:
    from zoo.whisper.transcript import Segment, Transcript
    from zoo.whisper.whisper import Whisper

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_GRANULARITIES = "timestamp_granularities[]"
_KNOWN = ("file", "model", "language", "prompt", "response_format", "temperature", "stream",
          _GRANULARITIES)  # fmt: skip
_QUALITY = {"beam_size": 5, "best_of": 5}  # as the command has it
_MEDIA = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}


class Stopped(Exception):
    """Nobody waits for the transcript any more."""


async def transcriptions(request: Request) -> Response:
    """The endpoint for text in the language that is spoken."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response:
    """The endpoint for text in English."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(415, "the body must be multipart/form-data, with the recording as 'file'")
    async with request.form(max_files=1, max_fields=16, max_part_size=1 << 16) as form:
        fields, granularities = _fields(form)
        model = request.app.state.models.find("speech", fields)
        options = _options(fields, granularities, task)
        form_of = fields.choice("response_format", "json", FORMATS)
        stream = fields.flag("stream")
        sound = await _sound(form)
    if granularities and form_of != "verbose_json":
        problem = "'timestamp_granularities' need 'response_format' verbose_json"
        raise ApiError(400, problem, "timestamp_granularities")
    if stream and form_of not in ("json", "verbose_json"):
        raise ApiError(400, "a stream has 'response_format' json or verbose_json", "stream")
    if stream:
        events = _events(model, sound, options, form_of)
        return await EventStream(events).start(request.receive)
    transcript = await while_connected(request.receive, _transcript(model, sound, options))
    return _response(transcript, form_of, granularities, task)


def _fields(form: FormData) -> tuple[Fields, list[str]]:
    """The form's text fields, and the granularities, which may come several times."""
    values = {name: value for name, value in form.items() if isinstance(value, str)}
    # Some clients write the list without brackets.
    plain = _GRANULARITIES.removesuffix("[]")
    granularities = [*form.getlist(_GRANULARITIES), *form.getlist(plain)]
    values.pop(plain, None)
    for each in granularities:
        if each not in ("word", "segment"):
            raise ApiError(400, f"'{plain}' are word and segment", plain)
    return Fields(values, _KNOWN, as_text=True), granularities


async def _sound(form: FormData) -> io.BytesIO:
    """The upload, in memory: its name is never used as a path, and its temporary file is gone."""
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise ApiError(400, "'file' is missing: the recording, as an uploaded file", "file")
    sound = io.BytesIO(await upload.read())
    sound.name = "the recording"  # how errors call it
    return sound


def _options(fields: Fields, granularities: list[str], task: str) -> dict[str, Any]:
    options: dict[str, Any] = _QUALITY | {"task": task}
    if "language" in fields:
        options["language"] = fields.text("language", longest=32)
    if "prompt" in fields:
        options["initial_prompt"] = fields.text("prompt", longest=10_000)
    temperature = fields.number("temperature", 0.0, 0, 1)
    if temperature:  # 0 is, as at OpenAI: as high as it needs to be
        options["temperature"] = temperature
    options["word_timestamps"] = "word" in granularities
    return options


async def _transcript(
    model: Served,
    sound: io.BytesIO,
    options: dict[str, Any],
    on_segment: Callable[[Segment], None] | None = None,
) -> Transcript:
    """What is said; ends the work when it is cancelled."""
    stop = threading.Event()

    def progress(done: float, total: float) -> None:
        if stop.is_set():
            raise Stopped
        time.sleep(PAUSE_S)

    def job(whisper: Whisper) -> Transcript:
        return whisper.transcribe(sound, on_segment, progress, **options)

    with model.gate.entered():
        try:
            return await model.run(job)
        finally:
            stop.set()


async def _events(
    model: Served, sound: io.BytesIO, options: dict[str, Any], form_of: str
) -> AsyncIterator[dict[str, Any]]:
    """Text as it is found; with verbose_json each segment with its times."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    def found(segment: Segment) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, segment)

    work = asyncio.ensure_future(_transcript(model, sound, options, found))
    work.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (segment := await queue.get()) is not None:
            if form_of == "verbose_json":
                times = {"id": segment.id, "start": segment.start, "end": segment.end}
                yield {"type": "transcript.text.segment", **times, "text": segment.text}
            else:
                yield {"type": "transcript.text.delta", "delta": segment.text}
        transcript = await work
        done = {"type": "transcript.text.done", "text": transcript.text.strip()}
        yield done | {"usage": _usage(transcript)}
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(transcript.duration, 2)}


def _response(
    transcript: Transcript, form_of: str, granularities: list[str], task: str
) -> Response:
    from zoo.whisper.transcript import FORMATS as WRITERS

    text = transcript.text.strip()
    match form_of:
        case "json":
            return JSONResponse({"text": text, "usage": _usage(transcript)})
        case "verbose_json":
            return JSONResponse(_verbose(transcript, text, granularities, task))
        case "text":
            return PlainTextResponse(f"{text}\n")
    return PlainTextResponse(WRITERS[form_of](transcript), media_type=_MEDIA[form_of])


def _verbose(
    transcript: Transcript, text: str, granularities: list[str], task: str
) -> dict[str, Any]:
    """Segments unless only words were asked for, and words if they were."""
    from dataclasses import asdict

    from zoo.whisper.languages import LANGUAGES

    language = LANGUAGES.get(transcript.language, transcript.language)
    out: dict[str, Any] = {"task": task, "language": language, "duration": transcript.duration}
    out["text"] = text
    if "segment" in granularities or not granularities:
        out["segments"] = [asdict(segment) for segment in transcript.segments]
        for segment in out["segments"]:
            del segment["words"]
    if "word" in granularities:
        words = [word for segment in transcript.segments for word in segment.words or ()]
        out["words"] = [
            {"word": word.word.strip(), "start": word.start, "end": word.end} for word in words
        ]
    return out | {"usage": _usage(transcript)}
