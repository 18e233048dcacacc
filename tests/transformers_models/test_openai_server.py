"""`examples/openai_server.py` serves the bundled model to OpenAI's own client, and to clients that do wrong."""

import asyncio
import runpy
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.19")
openai = pytest.importorskip(
    "openai", reason="the client of OpenAI is no extra: pip install openai"
)
uvicorn = pytest.importorskip("uvicorn", reason="the server is in the extra server")
pytest.importorskip("fastapi", reason="the server is in the extra server")
httpx = pytest.importorskip("httpx", reason="what raw requests are made with: pip install httpx")

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def mean(values):\n"
GREEDY = {"model": "model", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def server():
    """A server on a free port, and the name of its application's address."""
    app = runpy.run_path(str(ROOT / "examples" / "openai_server.py"))["make"](max_nbytes="32MiB")
    made = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=made.run)
    thread.start()
    while not made.started:
        time.sleep(0.05)
        assert thread.is_alive()
    host, port = made.servers[0].sockets[0].getsockname()[:2]
    yield app, f"http://{host}:{port}"
    made.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
    assert app.state.engine.task.done()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server[1] + "/v1", api_key="none", max_retries=0) as made:
        yield made


def nothing_runs(server):
    """Wait until nothing of a request is left."""
    batch, until = server[0].state.batch, time.monotonic() + 20
    while batch.pending or batch.stats().running:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not server[0].state.engine.queues


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


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (422, "x"), (422, []), (422, {}), (422, {"prompt": 3}), (422, {"prompt": "a", "max_tokens": 0}),
        (422, {"prompt": "a", "n": 2}), (422, {"prompt": "a", "stream": 3}), (422, {"prompt": "a", "stop": ["b"] * 5}),
        (404, {"prompt": "a", "model": "other"}), (400, {"prompt": [999]}), (400, {"prompt": []}),
        (422, {"prompt": "a", "tools": []}), (422, {"prompt": "a", "logprobs": 3}),
        (400, {"prompt": "a", "max_tokens": 2048}), (400, {"prompt": "a" * 3000}), (413, {"prompt": "a" * (1 << 20)}),
    ],
)  # fmt: skip
def test_wrong_bodies(server, status, body):
    answer = httpx.post(server[1] + "/v1/completions", json=body)
    assert answer.status_code == status
    assert len(answer.json()["error"]["message"]) > 15
    nothing_runs(server)


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
    assert int(found["numkv_new_tokens"]) >= 24
    assert found["numkv_running"] == "0"
    assert "# TYPE numkv_waiting gauge" in lines
    assert "# TYPE numkv_passes counter" in lines


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
