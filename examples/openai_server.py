"""A server with OpenAI's completions and chat completions, over one `ContinuousBatch`.

Needs ``pip install ".[transformers,server]"``. Without ``--model DIR`` it serves the bundled model, of bytes.
"""

import argparse
import asyncio
import contextlib
import json
import time
import traceback
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from pydantic import BaseModel, Field, conlist
from starlette.exceptions import HTTPException
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from numkv.demo import BUNDLED_MODEL
from numkv.errors import NumkvError
from numkv.transformers import ContinuousBatch

MOST_BYTES, MOST_WAITING = 1 << 20, 256
TEMPLATE = "{{ bos_token }}{% for x in messages %}# {{ x.role }}: {{ x.content }}\n{% endfor %}"


def tokenizer_of(folder):
    """The folder's own; for the bundled model, which has read code, bytes: 0 begins and ends a text."""
    if folder != BUNDLED_MODEL:
        return AutoTokenizer.from_pretrained(folder)
    vocabulary = {x if byte else "<|endoftext|>": byte for byte, x in bytes_to_unicode().items()}
    return GPT2Tokenizer(vocabulary, [], add_bos_token=True, chat_template=TEMPLATE)


class Options(BaseModel, extra="forbid"):  # rather than do something else than what was asked
    model: str | None = None
    user: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=1)
    seed: int | None = Field(None, ge=0)
    stop: str | conlist(str, max_length=4) | None = None
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None


class Completion(Options):
    prompt: str | list[int]

    def ids(self, tokenizer):
        return tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt

    def answer(self, text, end):
        return {"object": "text_completion", "choices": [{"text": text} | end]}


class Message(BaseModel):
    role: str
    content: str


class Chat(Options):
    messages: list[Message] = Field(min_length=1)

    def ids(self, tokenizer):
        messages = [x.model_dump() for x in self.messages]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    def answer(self, text, end):
        kind, name = (".chunk", "delta") if self.stream else ("", "message")
        choice = {name: {"role": "assistant", "content": text}} | end
        return {"object": "chat.completion" + kind, "choices": [choice]}


async def pieces(request, tokenizer, stop):
    """Text as it comes, without stop strings; the last piece has the reason why it ends."""
    stops = [x for x in ([stop] if isinstance(stop, str) else stop or []) if x]
    stream, held = DecodeStream(skip_special_tokens=True), ""
    most_held = max(map(len, stops), default=1) - 1  # as a stop string may begin there
    try:
        async for token in request:
            held += stream.step(tokenizer.backend_tokenizer, token) or ""
            if found := [x for x in map(held.find, stops) if x >= 0]:
                yield held[: min(found)], "stop"
                return
            if cut := max(0, len(held) - most_held):
                yield held[:cut], None
                held = held[cut:]
        yield held, request.finish_reason
    except Exception as error:  # any other than `HTTPException` would end the connection
        traceback.print_exc()
        raise HTTPException(500, f"{type(error).__name__}: {error}") from error
    finally:
        request.cancel()


async def refuse(http, error):
    status, message = getattr(error, "status_code", 500), f"{type(error).__name__}: {error}"
    if isinstance(error, RequestValidationError):
        each = (f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in error.errors())
        status, message = 422, "; ".join(each)
    message = str(getattr(error, "detail", message)).encode(errors="backslashreplace").decode()
    return JSONResponse({"error": {"message": message}}, status)


class Server(FastAPI):  # which counts bodies, as it refuses an announced length in plain text
    async def __call__(self, scope, *channels):
        headers = [x for x in scope.get("headers", ()) if x[0] != b"content-length"]
        await super().__call__(scope | {"headers": headers}, *channels)


def make(folder=BUNDLED_MODEL, **options):  # those of `ContinuousBatch`
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokenizer, name = tokenizer_of(folder), Path(folder).name
    room = model.config.get_text_config().max_position_embeddings

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async with ContinuousBatch(model, **options) as app.state.batch:
            yield

    handlers = dict.fromkeys((HTTPException, RequestValidationError, Exception), refuse)
    app = Server(lifespan=lifespan, exception_handlers=handlers, max_body_size=MOST_BYTES)

    for path, kind in (("/v1/completions", Completion), ("/v1/chat/completions", Chat)):

        @app.post(path)
        async def answer(body: kind, http: Request):
            return await complete(body, http)

    async def complete(body, http):
        if body.model not in (None, name):
            raise HTTPException(404, f"this server has the model {name!r}")
        if app.state.batch.stats().waiting >= MOST_WAITING:
            raise HTTPException(429, "too many requests wait; try again later")
        given = {"temperature": 1.0, "top_p": 1.0, "seed": None}
        given |= body.model_dump(include=set(given), exclude_none=True)
        given = {"do_sample": True} | given if given["temperature"] > 1e-3 else {"do_sample": False}
        try:
            ids = body.ids(tokenizer)
            new = body.max_completion_tokens or body.max_tokens or max(1, min(128, room - len(ids)))
            request = app.state.batch.submit(ids, new, **given)
        except (NumkvError, TemplateError, TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from error
        head = {"id": f"cmpl-{request.number}", "created": int(time.time()), "model": name}

        def part(text, reason, **more):
            return head | body.answer(text, {"index": 0, "finish_reason": reason}) | more

        def usage():
            asked, made = request.prompt_len, len(request.tokens)
            return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}

        async def events():
            try:
                async for text, reason in found:
                    yield f"data: {json.dumps(part(text, reason))}\n\n"
                if (body.stream_options or {}).get("include_usage"):
                    yield f"data: {json.dumps(part('', None, choices=[], usage=usage()))}\n\n"
            except HTTPException as error:  # the status has been sent
                yield f"data: {(await refuse(http, error)).body.decode()}\n\n"
            yield "data: [DONE]\n\n"

        found = pieces(request, tokenizer, body.stop)
        gone = asyncio.create_task(http.receive())  # after the body only the connection's end comes
        gone.add_done_callback(lambda _: request.cancel())
        if body.stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        texts, reasons = zip(*[x async for x in found], strict=True)
        return part("".join(texts), reasons[-1], usage=usage())

    @app.get("/v1/models")
    async def served():
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.get("/metrics")
    async def metrics():
        cache, counts = app.state.batch.cache, app.state.batch.stats()._asdict()
        gauges = {x: counts.pop(x) for x in ("waiting", "running")}
        gauges |= {"blocks": cache.num_blocks, "blocks_free": cache.num_free}
        lines = [f"# TYPE numkv_{x} gauge\nnumkv_{x} {n}\n" for x, n in gauges.items()]
        lines += [f"# TYPE numkv_{x}_total counter\nnumkv_{x}_total {counts[x]}\n" for x in counts]
        return Response("".join(lines), media_type="text/plain; version=0.0.4")

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--kind", help="storage kind of K and V, such as int8_channel")
    parser.add_argument("--max-nbytes", default="1GiB")
    parser.add_argument("--port", type=int, default=8000)
    given = vars(parser.parse_args())
    uvicorn.run(port=given.pop("port"), app=make(given.pop("model"), **given))
