"""`examples/openai_server.py` serves the bundled model to OpenAI's own client, and to clients that do wrong."""

import asyncio
import contextlib
import http.client
import json
import runpy
import shutil
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from numkv.demo import BUNDLED_MODEL
from numkv.errors import NumkvError

pytest.importorskip("transformers", minversion="5.19")
openai = pytest.importorskip(
    "openai", reason="the client of OpenAI is no extra: pip install openai"
)
uvicorn = pytest.importorskip("uvicorn", reason="the server is in the extra server")
pytest.importorskip("fastapi", "0.164", reason="the server is in the extra server")
httpx = pytest.importorskip("httpx", reason="what raw requests are made with: pip install httpx")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "openai_server.py"))
PROMPT = "def mean(values):\n"
GREEDY = {"model": "model", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}


@contextlib.contextmanager
def serving(folder=BUNDLED_MODEL, **options):
    """An application on a free port, and its address; it ends cleanly."""
    app = EXAMPLE["make"](folder, max_nbytes="32MiB")
    made = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", **options))
    thread = threading.Thread(target=made.run)
    thread.start()
    while not made.started:
        time.sleep(0.05)
        assert thread.is_alive()
    host, port = made.servers[0].sockets[0].getsockname()[:2]
    try:
        yield app, f"http://{host}:{port}"
    finally:
        made.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(NumkvError, match="closed"):
        app.state.batch.submit([1])
    assert not app.state.batch.has_requests


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server[1] + "/v1", api_key="none", max_retries=0) as made:
        yield made


def nothing_runs(server):
    """Wait until nothing of a request is left."""
    batch, until = server[0].state.batch, time.monotonic() + 20
    while batch.stats()[:2] != (0, 0):
        assert time.monotonic() < until
        time.sleep(0.05)


def text_of(client, **options):
    return client.completions.create(**GREEDY | options).choices[0].text


def test_completions(server, client):
    found = client.completions.create(**GREEDY)
    assert found.choices[0].text.startswith('    """\n    Return')
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 24)
    parts = list(client.completions.create(**GREEDY, stream=True))
    assert "".join(x.choices[0].text for x in parts) == found.choices[0].text
    assert [x.choices[0].finish_reason for x in parts][-1] == "length"
    assert len(parts) > 5
    assert client.models.list().data[0].id == "model"
    nothing_runs(server)


def test_stop_strings_never_show(client):
    whole = text_of(client)
    for stop in ("Return", ["turn t", "xyz"], whole[-3:]):
        first = stop if isinstance(stop, str) else stop[0]
        parts = list(client.completions.create(**GREEDY, stop=stop, stream=True))
        assert "".join(x.choices[0].text for x in parts) == whole[: whole.index(first)]
        assert parts[-1].choices[0].finish_reason == "stop"
        assert text_of(client, stop=stop) == whole[: whole.index(first)]


def test_a_temperature_of_almost_nothing(client):
    """By which logits cannot be divided; it is greedy search, as their limit is."""
    for temperature in (1e-300, 1e-30, 1e-3):
        assert text_of(client, temperature=temperature) == text_of(client)
    assert len(text_of(client, temperature=2e-3, seed=1)) == 24
    assert len(text_of(client, temperature=2, top_p=1e-300, seed=1)) == 24


def test_chat_and_seeds(client):
    asked = {"model": "model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
    first, second, other = (
        client.chat.completions.create(**asked, seed=x).choices[0].message for x in (1, 1, 2)
    )
    assert (first.role, first.content) == ("assistant", second.content)
    assert first.content != other.content
    parts = client.chat.completions.create(**asked, seed=1, stream=True)
    assert "".join(x.choices[0].delta.content for x in parts) == first.content


def test_many_at_once(server, client):
    expected = text_of(client)

    async def main():
        async with openai.AsyncOpenAI(
            base_url=server[1] + "/v1", api_key="none", max_retries=0
        ) as many:
            found = await asyncio.gather(*(many.completions.create(**GREEDY) for _ in range(32)))
            return {x.choices[0].text for x in found}

    assert asyncio.run(main()) == {expected}
    nothing_runs(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up(server, stream):
    body = {"prompt": "a", "max_tokens": 1500, "temperature": 0, "stream": stream}
    if stream:
        with httpx.stream("POST", server[1] + "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server[1] + "/v1/completions", json=body, timeout=0.3)
    nothing_runs(server)


def test_a_client_that_hangs_up_before_the_first_line():
    """While its connection takes no more bytes, as it reads none of earlier answers."""
    app = EXAMPLE["make"](max_nbytes="32MiB")
    body = {"prompt": "a", "max_tokens": 1500, "temperature": 0, "stream": True}
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "",
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip

    async def main():
        whole = [{"type": "http.request", "body": json.dumps(body).encode()}]
        is_full = asyncio.Event()

        async def receive():
            if whole:
                return whole.pop()
            await is_full.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            is_full.set()
            await asyncio.Event().wait()

        async with app.router.lifespan_context(app):
            await app(scope, receive, send)
            for _ in range(9):  # callbacks of the event loop
                await asyncio.sleep(0)
            return app.state.batch.stats()

    stats = asyncio.run(main())
    assert (stats.waiting, stats.running) == (0, 0)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (422, "x"), (422, []), (422, {}), (422, {"prompt": 3}), (422, {"prompt": "a", "max_tokens": 0}),
        (422, {"prompt": "a", "n": 2}), (422, {"prompt": "a", "stream": 3}), (422, {"prompt": "a", "stop": ["b"] * 5}),
        (404, {"prompt": "a", "model": "other"}), (400, {"prompt": [999]}), (400, {"prompt": []}),
        (422, {"prompt": "a", "tools": []}), (422, {"prompt": "a", "logprobs": 3}),
        (400, {"prompt": "a", "max_tokens": 2048}), (400, {"prompt": "a" * 3000}), (422, {"prompt": "a", "top_p": "b"}),
    ],
)  # fmt: skip
def test_wrong_bodies(server, status, body):
    answer = httpx.post(server[1] + "/v1/completions", json=body)
    assert answer.status_code == status
    assert len(answer.json()["error"]["message"]) > 15
    nothing_runs(server)


def test_what_the_framework_refuses(server):
    headers = {"content-type": "application/json"}
    body = b'{"prompt": "\xff"}'
    for answer, status in (
        (httpx.post(server[1] + "/v1/completions", content=body, headers=headers), 400),
        (httpx.get(server[1] + "/nothing"), 404),
    ):
        assert (answer.status_code, len(answer.json()["error"]["message"]) > 5) == (status, True)


def test_bodies_that_are_too_large(server):
    """Said at once or in chunks, which have no length."""
    body = b'{"prompt": "' + b"a" * (1 << 20) + b'"}'
    json = {"content-type": "application/json"}
    for content in (body, (body[i : i + 99999] for i in range(0, len(body), 99999))):
        with contextlib.suppress(httpx.WriteError):  # it may close before all has been sent
            answer = httpx.post(server[1] + "/v1/completions", content=content, headers=json)
            assert answer.status_code == 413
            assert answer.json() == {"error": {"message": "Content Too Large"}}


@pytest.mark.parametrize(
    ("template", "reason"),
    [(None, "chat_template is not set"), ("{{ raise_exception(messages[0].role) }}", "user")],
)
def test_a_folder_with_a_tokenizer(client, tmp_path, template, reason):
    """Its text is that of the bundled model; a chat that its template does not take is refused."""
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    tokenizer = EXAMPLE["tokenizer_of"](BUNDLED_MODEL)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    asked = {"model": "model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    with contextlib.ExitStack() as stack:
        _, address = stack.enter_context(serving(folder))
        other = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
        stack.enter_context(other)
        assert text_of(other) == text_of(client)
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=reason):
                other.chat.completions.create(**asked, stream=stream)
        half = b'{"messages": [{"role": "\\ud800", "content": "hello"}]}'  # of a character
        headers = {"content-type": "application/json"}
        found = httpx.post(address + "/v1/chat/completions", content=half, headers=headers)
        assert found.status_code == 400
        assert len(found.json()["error"]["message"]) > 5


class Made:
    """A request that makes given tokens."""

    def __init__(self, ids):
        self.ids, self.finish_reason, self.cancel = ids, "length", mock.Mock()

    async def __aiter__(self):
        for token in self.ids:
            yield token


def pieces_of(ids, stop=None):
    async def main():
        found = EXAMPLE["pieces"](request, EXAMPLE["tokenizer_of"](BUNDLED_MODEL), stop)
        return [x async for x in found]

    request = Made(ids)
    found = asyncio.run(main())
    request.cancel.assert_called_once_with()
    return found


@pytest.mark.parametrize("text", ["aé", "€ and 𝄞", "\r\n\t ā Ā", "<s> I'm 12"])
def test_bytes_as_tokens(text):
    """Characters come whole, as soon as they can; half of one at the end does not."""
    tokenizer = EXAMPLE["tokenizer_of"](BUNDLED_MODEL)
    ids = tokenizer.encode(text)
    assert ids == [0, *text.encode()]
    whole = [(x, None) for x in text]
    assert pieces_of(ids) == [*whole, ("", "length")]
    assert pieces_of([*ids, *"é".encode()[:1]]) == [*whole, ("", "length")]
    assert pieces_of(ids, text[-1]) == [*whole[:-1], ("", "stop")]
    assert pieces_of(ids, ["", text[-1] + "b"]) == [*whole[:-1], (text[-1], "length")]
    assert pieces_of([200, 97, 0]) == [("\ufffda", None), ("", "length")]  # no text


def test_what_clients_send_that_says_nothing(server, client):
    nulls = dict.fromkeys(("stop", "n", "top_p", "seed", "stream_options", "max_completion_tokens"))
    answer = httpx.post(server[1] + "/v1/completions", json=GREEDY | nulls)
    assert answer.json()["choices"][0]["text"] == text_of(client)
    body = {"prompt": "a" * 2000}
    found = httpx.post(server[1] + "/v1/completions", json=body, timeout=60).json()
    assert found["usage"]["total_tokens"] <= 2048  # fewer than usual, as there is room for


def test_the_client_sees_the_reason(client):
    with pytest.raises(openai.NotFoundError, match="has the model 'model'"):
        text_of(client, model="other")
    with pytest.raises(openai.UnprocessableEntityError, match="max_tokens: Input should be"):
        text_of(client, max_tokens=0)


def test_usage_of_a_stream(client):
    *parts, last = client.completions.create(
        **GREEDY, stream=True, stream_options={"include_usage": True}
    )
    assert (last.choices, last.usage.completion_tokens) == ([], 24)
    assert last.usage.total_tokens == 24 + 1 + len(PROMPT)
    assert all(x.usage is None for x in parts)


def test_metrics(server, client):
    text_of(client)
    lines = httpx.get(server[1] + "/metrics").text.splitlines()
    found = dict(x.split() for x in lines if not x.startswith("#"))
    assert float(found["numkv_new_tokens_total"]) >= 24
    assert float(found["numkv_running"]) == 0
    assert float(found["numkv_blocks"]) > 0
    assert "# TYPE numkv_waiting gauge" in lines
    assert "# TYPE numkv_passes_total counter" in lines


def test_a_model_that_fails(server, client, monkeypatch):
    """Those that wait are told so, and the server goes on."""
    batch = server[0].state.batch
    with monkeypatch.context() as patch:
        patch.setattr(type(batch), "_next_parts", lambda *_: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
            client.completions.create(**GREEDY)
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            list(client.completions.create(**GREEDY, stream=True))
    assert len(text_of(client)) == 24
    nothing_runs(server)


def test_a_failure_does_not_end_the_connection(server, monkeypatch):
    """A client may send its next request at once on the same one."""
    host, port = server[1].removeprefix("http://").split(":")
    monkeypatch.setattr(type(server[0].state.batch), "_next_parts", lambda *_: 1 / 0)
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.connect()
        connection.auto_open = 0
        for _ in range(2):
            head = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(GREEDY), head)
            answer = connection.getresponse()
            assert answer.status == 500
            assert "ZeroDivisionError" in json.loads(answer.read())["error"]["message"]
            time.sleep(0.2)  # in which a server would end it


def test_an_end_in_the_middle_of_an_answer():
    """Those that wait too long are cut off; the pass under way ends before the batch is closed."""
    body = {"prompt": "a", "max_tokens": 1500, "temperature": 0, "stream": True}
    with contextlib.ExitStack() as of_client:
        with serving(timeout_graceful_shutdown=1) as (app, address):
            found = httpx.stream("POST", address + "/v1/completions", json=body)
            next(of_client.enter_context(found).iter_lines())
            until = time.monotonic() + 10  # the first token is sent before its pass has ended
            while app.state.batch.stats().running != 1 and time.monotonic() < until:
                time.sleep(0.01)
            assert app.state.batch.stats().running == 1
        assert not app.state.batch.has_requests
