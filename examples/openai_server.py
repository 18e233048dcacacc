"""A server with OpenAI's completions and chat completions, over one `ContinuousBatch`.

Needs ``pip install ".[transformers,server]"``. ``python examples/openai_server.py`` serves the bundled model, whose
tokens are bytes; ``--model DIR`` any decoder that transformers loads from a folder.
"""

import argparse
import asyncio
import contextlib
import json
import threading
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
        self.of_bytes = folder == BUNDLED_MODEL
        self.own = None if self.of_bytes else transformers.AutoTokenizer.from_pretrained(folder)

    def encode(self, text):
        return [0, *text.encode()] if self.of_bytes else self.own.encode(text)

    def decode(self, ids):
        if self.of_bytes:
            return bytes(x for x in ids if x).decode(errors="replace")
        return self.own.decode(ids, skip_special_tokens=True)

    def chat(self, messages):
        if self.of_bytes:
            return self.encode("".join(TEMPLATE.format(**x) for x in messages))
        if not self.own.chat_template:
            raise HTTPException(400, "this model has no chat template; use /v1/completions")
        try:
            return self.own.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates raise what they like
            raise HTTPException(400, f"the chat template refuses this: {error}") from error


class Engine(threading.Thread):
    """The thread that drives the batch, and hands tokens to the event loop."""

    def __init__(self, batch):
        super().__init__(name="batch", daemon=True)
        self.batch, self.loop = batch, asyncio.get_running_loop()
        self.queues, self.lock = {}, threading.Lock()
        self.wake, self.ends = threading.Event(), False

    def run(self):
        while not self.ends:
            try:
                events = self.batch.step()
                with self.lock:
                    for event in events:
                        self.send(self.queues.get(event.request), event)
                        if event.done:  # also where the client left before its stream began
                            self.queues.pop(event.request, None)
            except Exception as error:  # of the model: nobody gets anything
                traceback.print_exc()
                self.drop(HTTPException(500, f"{type(error).__name__}: {error}"))
            if not self.batch.pending:
                self.wake.wait()
                self.wake.clear()

    def send(self, queue, event):
        if queue is not None:
            self.loop.call_soon_threadsafe(queue.put_nowait, event)

    def drop(self, why):
        with self.lock:
            for request, queue in self.queues.items():
                request.cancel()
                self.send(queue, why)

    def end(self):
        self.ends = True
        self.wake.set()
        self.join()
        self.drop(HTTPException(503, "the server ends"))

    def submit(self, *args, **options):
        with self.lock:  # before its first token
            request = self.batch.submit(*args, **options)
            queue = self.queues[request] = asyncio.Queue()
        self.wake.set()
        return request, queue

    async def texts(self, text, stops, request, queue):
        """Pieces of text as they come, without stop strings; the last one has the reason why it ends."""
        given, reason = 0, None
        hold = max(map(len, stops), default=1) - 1
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
                found = text.decode(request.tokens)
                cut = min((x for x in map(found.find, stops) if x >= 0), default=None)
                if cut is not None:
                    found, reason = found[:cut], "stop"
                elif reason is None:  # half a character may come, or the beginning of a stop string
                    found = found.rstrip("\ufffd")
                    found = found[: len(found) - hold] if hold else found
                if found[given:] or reason:
                    yield found[given:], reason
                    given = max(given, len(found))
        finally:
            request.cancel()
            with self.lock:
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
            app.state.engine.start()
            yield
            await asyncio.to_thread(app.state.engine.end)

    app = FastAPI(lifespan=lifespan)

    @app.middleware("http")
    async def limit(http: Request, call):
        if (
            http.method == "POST"
            and int(http.headers.get("content-length", MOST_BYTES + 1)) > MOST_BYTES
        ):
            return JSONResponse({"error": {"message": f"expected at most {MOST_BYTES} bytes"}}, 413)
        return await call(http)

    async def refuse(http: Request, error: Exception):
        status, message = getattr(error, "status_code", 400), getattr(error, "detail", str(error))
        if isinstance(error, RequestValidationError):
            each = (f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in error.errors())
            status, message = 422, "; ".join(each)
        return JSONResponse({"error": {"message": message}}, status)

    kinds_of_errors = (HTTPException, RequestValidationError, NumkvError, ValueError, TypeError)
    for kind_of_error in kinds_of_errors:
        app.add_exception_handler(kind_of_error, refuse)

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
        head = {
            "id": f"cmpl-{request.number}",
            "created": int(time.time()),
            "model": name,
            "object": kind,
        }
        pieces = engine.texts(text, stops, request, queue)
        if body.stream:
            head["object"] += ".chunk" * is_chat
            use = request if body.stream_options.get("include_usage") else None
            return StreamingResponse(
                streamed(pieces, head, is_chat, use), media_type="text/event-stream"
            )

        async def end_if_gone():
            while not await http.is_disconnected():
                await asyncio.sleep(0.1)
            queue.put_nowait(None)

        watch = asyncio.create_task(end_if_gone())
        found = [x async for x in pieces]
        watch.cancel()
        said, reason = "".join(x for x, _ in found), found[-1][1] if found else "cancelled"
        choice = {"message": {"role": "assistant", "content": said}} if is_chat else {"text": said}
        choice |= {"index": 0, "finish_reason": reason}
        return head | {"choices": [choice], "usage": used(request)}

    def used(request):
        made = len(request.tokens)
        used = {"prompt_tokens": request.prompt_len, "completion_tokens": made}
        return used | {"total_tokens": request.prompt_len + made}

    async def streamed(pieces, head, is_chat, use):
        try:
            async with contextlib.aclosing(pieces):
                async for said, reason in pieces:
                    delta = {"role": "assistant", "content": said}
                    choice = {"delta": delta} if is_chat else {"text": said}
                    choice |= {"index": 0, "finish_reason": reason}
                    yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
            if use is not None:
                yield f"data: {json.dumps(head | {'choices': [], 'usage': used(use)})}\n\n"
        except HTTPException as error:
            yield f"data: {json.dumps({'error': {'message': error.detail}})}\n\n"
        yield "data: [DONE]\n\n"

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.get("/metrics")
    async def metrics():
        cache = app.state.batch.cache
        found = app.state.batch.stats()._asdict() | {
            "blocks": cache.num_blocks,
            "blocks_free": cache.num_free,
        }
        types = dict.fromkeys(("waiting", "running", "blocks", "blocks_free"), "gauge")
        lines = (
            f"# TYPE numkv_{x} {types.get(x, 'counter')}\nnumkv_{x} {y}\n" for x, y in found.items()
        )
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
