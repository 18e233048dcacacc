"""A server with OpenAI's completions and chat completions, over one `ContinuousBatch`.

Needs ``pip install ".[transformers,server]"``. ``python examples/openai_server.py`` serves the bundled model, whose
tokens are bytes; ``--model DIR`` any decoder that transformers loads from a folder.
"""

import argparse
import asyncio
import contextlib
import json
import time
import traceback
from pathlib import Path
from typing import Annotated

import transformers
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field, model_validator
from starlette.datastructures import Headers

from numkv.demo import BUNDLED_MODEL
from numkv.errors import NumkvError
from numkv.transformers import ContinuousBatch

MOST_BYTES, MOST_WAITING = 1 << 20, 256
TEMPLATE = "# {role}: {content}\n"  # of the bundled model, which has read code


class Options(BaseModel, extra="forbid"):  # rather than do something else than what was asked
    model: str | None = None
    user: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=1)
    seed: int | None = Field(None, ge=0)
    stop: str | Annotated[list[str], Field(max_length=4)] = []
    stream: bool = False
    stream_options: dict[str, bool] = {}

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given):
        """OpenAI's null is the same as nothing."""
        is_dict = isinstance(given, dict)
        return {key: x for key, x in given.items() if x is not None} if is_dict else given


class Completion(Options):
    prompt: str | list[int]


class Message(BaseModel):
    role: str
    content: str


class Chat(Options):
    messages: list[Message] = Field(min_length=1)


class Text:
    """A folder's tokenizer, or bytes."""

    def __init__(self, folder):
        self.own = None
        if folder != BUNDLED_MODEL:
            self.own = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(self, text):
        return [0, *text.encode()] if self.own is None else self.own.encode(text)

    def decode(self, ids):
        if self.own is None:
            return bytes(x for x in ids if x).decode(errors="replace")
        return self.own.decode(ids, skip_special_tokens=True)

    def chat(self, messages):
        if self.own is None:
            return self.encode("".join(TEMPLATE.format(**x) for x in messages))
        if not self.own.chat_template:
            raise HTTPException(400, "this model has no chat template; use /v1/completions")
        try:
            options = {"add_generation_prompt": True, "return_dict": False}
            return self.own.apply_chat_template(messages, **options)
        except Exception as error:  # templates raise what they like
            raise HTTPException(400, f"the chat template refuses this: {error}") from error


class Limit:
    """Refuses large bodies. It hands on `receive` itself, by which clients that hang up are noticed."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        answer = self.app
        if scope["type"] == "http" and scope["method"] == "POST":
            size = int(Headers(scope=scope).get("content-length", MOST_BYTES + 1))
            if size > MOST_BYTES:
                said = {"message": f"expected at most {MOST_BYTES} bytes"}
                answer = JSONResponse({"error": said}, 413)
        await answer(scope, receive, send)


class Engine:
    """Drives the batch in a thread, one pass after another, and hands tokens to those who wait."""

    def __init__(self, batch):
        self.batch, self.queues, self.ends = batch, {}, False
        self.wake = asyncio.Event()
        self.task = asyncio.create_task(self.run())

    async def run(self):
        while not self.ends:
            try:
                for event in await asyncio.to_thread(self.batch.step):
                    take = self.queues.pop if event.done else self.queues.get
                    if (queue := take(event.request, None)) is not None:
                        queue.put_nowait(event)
            except Exception as error:  # of the model: nobody gets anything
                traceback.print_exc()
                self.drop(HTTPException(500, f"{type(error).__name__}: {error}"))
            if not self.batch.has_requests:
                await self.wake.wait()
                self.wake.clear()

    def drop(self, why):
        for request, queue in self.queues.items():
            request.cancel()
            queue.put_nowait(why)

    async def end(self):
        self.ends = True
        self.wake.set()
        await self.task
        self.drop(HTTPException(503, "the server ends"))

    def submit(self, *args, **options):
        request = self.batch.submit(*args, **options)
        queue = self.queues[request] = asyncio.Queue()
        self.wake.set()
        return request, queue

    async def texts(self, text, stops, request, queue):
        """Pieces of text as they come, without stop strings; the last one has the reason why it ends."""
        ids, begin, read, held, reason = [], 0, 0, "", None
        try:
            while reason is None:
                event = await queue.get()
                if event is None:  # the client is gone
                    return
                if isinstance(event, HTTPException):
                    raise event
                if request.error is not None:
                    raise HTTPException(500, str(request.error)) from request.error
                reason = request.finish_reason if event.done else None
                ids += [] if event.token is None else [event.token]
                found = text.decode(ids[begin:])  # of the newest tokens and those before them
                if reason or not found.endswith("\ufffd"):  # which is half a character
                    held += found[len(text.decode(ids[begin:read])) :]
                    begin, read = read, len(ids)
                cut = min((x for x in map(held.find, stops) if x >= 0), default=len(held))
                reason = "stop" if cut < len(held) else reason
                if reason is None:  # the beginning of a stop string may be there
                    cut = max(0, cut - max(map(len, stops), default=1) + 1)
                if cut or reason:
                    yield held[:cut], reason
                    held = held[cut:]
        finally:
            request.cancel()
            self.queues.pop(request, None)
            self.wake.set()


def make(folder=BUNDLED_MODEL, kind=None, max_nbytes="1GiB", **options):
    """The application."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    text, name = Text(folder), Path(folder).name

    @contextlib.asynccontextmanager
    async def lifespan(app):
        with ContinuousBatch(model, kind, max_nbytes=max_nbytes, **options) as batch:
            app.state.batch, app.state.engine = batch, Engine(batch)
            yield
            await app.state.engine.end()

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(Limit)

    async def refuse(http: Request, error: Exception):
        status, message = getattr(error, "status_code", 400), getattr(error, "detail", str(error))
        if isinstance(error, RequestValidationError):
            each = (f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in error.errors())
            status, message = 422, "; ".join(each)
        return JSONResponse({"error": {"message": message}}, status)

    for kind_of in (HTTPException, RequestValidationError, NumkvError, ValueError, TypeError):
        app.add_exception_handler(kind_of, refuse)

    @app.post("/v1/completions")
    async def completions(body: Completion, http: Request):
        ids = text.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        return await complete(ids, body, http, False)

    @app.post("/v1/chat/completions")
    async def chat(body: Chat, http: Request):
        return await complete(text.chat([x.model_dump() for x in body.messages]), body, http, True)

    async def complete(ids, body, http, is_chat):
        batch, engine = app.state.batch, app.state.engine
        if body.model not in (None, name):
            raise HTTPException(404, f"this server has the model {name!r}")
        if batch.stats().waiting >= MOST_WAITING:
            raise HTTPException(429, "too many requests wait; try again later")
        stops = [x for x in ([body.stop] if isinstance(body.stop, str) else body.stop) if x]
        given = {"do_sample": body.temperature > 0}
        if body.temperature > 0:
            given |= {"temperature": body.temperature, "top_p": body.top_p, "seed": body.seed}
        usual = max(1, min(128, model.config.get_text_config().max_position_embeddings - len(ids)))
        most = body.max_completion_tokens or body.max_tokens or usual
        request, queue = engine.submit(ids, most, **given)
        kind = "chat.completion" if is_chat else "text_completion"
        head = {"id": f"cmpl-{request.number}", "created": int(time.time()), "model": name}
        head["object"] = kind + ".chunk" * (is_chat and body.stream)
        pieces = engine.texts(text, stops, request, queue)
        if body.stream:
            use = request if body.stream_options.get("include_usage") else None
            found = streamed(pieces, head, is_chat, use)
            return StreamingResponse(found, media_type="text/event-stream")

        async def end_if_gone():
            while not await http.is_disconnected():
                await asyncio.sleep(0.1)
            queue.put_nowait(None)

        watch = asyncio.create_task(end_if_gone())
        found = [x async for x in pieces]
        watch.cancel()
        reason = found[-1][1] if found else "cancelled"
        choice = choices("".join(x for x, _ in found), reason, "message" if is_chat else None)
        return head | {"choices": choice, "usage": used(request)}

    def choices(said, reason, name):
        found = {"text": said} if name is None else {name: {"role": "assistant", "content": said}}
        return [found | {"index": 0, "finish_reason": reason}]

    def used(request):
        asked, made = request.prompt_len, len(request.tokens)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}

    async def streamed(pieces, head, is_chat, use):
        name = "delta" if is_chat else None
        try:
            async with contextlib.aclosing(pieces):
                async for said, reason in pieces:
                    yield line(head | {"choices": choices(said, reason, name)})
            if use is not None:
                yield line(head | {"choices": [], "usage": used(use)})
        except HTTPException as error:
            yield line({"error": {"message": error.detail}})
        yield "data: [DONE]\n\n"

    def line(x):
        return f"data: {json.dumps(x)}\n\n"

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.get("/metrics")
    async def metrics():
        batch = app.state.batch
        gauges = {"blocks": batch.cache.num_blocks, "blocks_free": batch.cache.num_free}
        lines = []
        for x, y in (batch.stats()._asdict() | gauges).items():
            type_of = "gauge" if x in ("waiting", "running", *gauges) else "counter"
            lines.append(f"# TYPE numkv_{x} {type_of}\nnumkv_{x} {y}\n")
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--kind", help="storage kind of K and V, such as int8_channel")
    parser.add_argument("--max-nbytes", default="1GiB")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(make(given.model, given.kind, given.max_nbytes), port=given.port)
