"""`ContinuousBatch`: each request gets the tokens that it would get alone, whatever runs and fails beside it."""

import asyncio
import random
import string
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.19")

import naive_sparse  # noqa: E402
import numpy as np  # noqa: E402
from decoder_models import FAMILIES, VOCABULARY, make  # noqa: E402

import numkv  # noqa: E402
import numkv.torch  # noqa: E402
from numkv.demo import BUNDLED_MODEL  # noqa: E402
from numkv.demo.evaluate import held_out  # noqa: E402
from numkv.demo.recall import haystacks  # noqa: E402
from numkv.demo.tokenizer import ByteTokenizer  # noqa: E402
from numkv.errors import CacheFull, DimensionMismatch, NonFiniteInput, NotSupported, NumkvError  # noqa: E402
from numkv.store import PrefixStore  # noqa: E402
from numkv.transformers import ContinuousBatch, forward_pass, use  # noqa: E402

NEW = 10
BLOCK = 16
#: Of the tiny models in fp32: four layers of K and V, two heads of 16.
BLOCK_NBYTES = 4 * 2 * 2 * 16 * BLOCK * 4
#: Bytes of a row of them.
ROW = {"fp32": 64, "bf16": 32, "int8": 20}
BY_DAY = ["llama", "qwen2", "qwen3", "gemma3", "mixtral", "gpt_oss"]
REFUSED = {
    "stablelm": "hand keyword arguments on", "bart": "position_ids", "gemma4": "rows of others", "lfm2": "'conv'",
    "deepseek_v3": "latent attention", "falcon_h1": "'hybrid'",
}  # fmt: skip


def texts(count, seed=0, longest=130):
    """Prompts of lengths around those of blocks; a third of them begin alike."""
    rng = random.Random(seed)
    lengths = [1, 15, 16, 17, 40, 63, 64, 65, longest]
    made = [
        [rng.randrange(2, VOCABULARY) for _ in range(rng.choice(lengths))] for _ in range(count)
    ]
    begin = [rng.randrange(2, VOCABULARY) for _ in range(70)]
    return [begin + x if i % 3 == 0 else x for i, x in enumerate(made)]


def generated(model, ids, **options):
    """What transformers makes of a text alone."""
    options = {"do_sample": False, "max_new_tokens": NEW} | options
    return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


def batch_of(model, kind="fp32", blocks=64, **options):
    options = {
        "block_size": BLOCK,
        "tokens_per_pass": 48,
        "max_nbytes": blocks * BLOCK_NBYTES,
    } | options
    return ContinuousBatch(model, kind, **options)


def at_random_times(batch, prompts, seed=0, **options):
    """Submit texts between passes, until all have ended."""
    rng, waiting, requests = random.Random(seed), list(prompts), []
    while waiting or unfinished(batch):
        while waiting and rng.random() < 0.5:
            requests.append(batch.submit(waiting.pop(0), NEW, **options))
        batch.step()
    return requests


def unfinished(batch):
    """How many requests have not ended."""
    return batch.stats().waiting + batch.stats().running


def nothing_is_left(batch):
    batch.cache.check()
    assert len(batch.cache) == 0
    assert batch.cache.num_free == batch.cache.num_blocks
    stats = batch.stats()
    assert (stats.waiting, stats.running) == (0, 0)


# -- the tokens that each gets alone


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(x, marks=() if x in BY_DAY else pytest.mark.nightly)
        for x in FAMILIES
        if x not in REFUSED
    ],
)
def test_each_gets_what_it_gets_alone(family):
    model, prompts = make(family), texts(8)
    try:
        batch = batch_of(model, blocks=100)
    except NotSupported:
        assert family not in BY_DAY
        pytest.skip("refused by name")
    expected = [generated(model, x) for x in prompts]
    with batch:
        requests = at_random_times(batch, prompts)
        assert [x.result() for x in requests] == expected
        nothing_is_left(batch)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=() if x == "llama" else pytest.mark.nightly) for x in BY_DAY]
)
def test_forty_requests_in_a_pool_too_small_for_all(family, kind):
    model, prompts = make(family), texts(40)
    if kind == "fp32":
        expected = [generated(model, x) for x in prompts]
    else:
        with batch_of(model, kind) as batch:
            expected = [batch.submit(x, NEW).result() for x in prompts]  # one after another
    with batch_of(model, kind, max_nbytes=14 * BLOCK_NBYTES * ROW[kind] // ROW["fp32"]) as batch:
        requests = at_random_times(batch, prompts)
        assert [x.result() for x in requests] == expected
        assert batch.stats().preemptions > 0
        nothing_is_left(batch)


def own_rows(module, query, key, value, *_, **__):
    """In place of attention: each token sees itself alone, so a model is its linear layers, row by row."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


def difference_of_linear_layers(model, rows):
    """How far logits of the same rows are apart at most where these go through linear layers alone and together."""
    transformers.AttentionInterface.register("own_rows", own_rows)
    before = model.config._attn_implementation
    model.set_attn_implementation("own_rows")
    try:
        with torch.no_grad():
            together = model(rows[None]).logits[0].float()
            alone = torch.cat([model(row[None, None]).logits[0].float() for row in rows])
    finally:
        model.set_attn_implementation(before)
    return float((together - alone).abs().max())


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=pytest.mark.nightly), "int8"])
def test_forty_requests_with_16_bit_weights(kind):
    """The same tokens up to one whose two best logits are closer than what linear layers differ by."""
    model, prompts = make("llama", torch.bfloat16), texts(40)
    logits: dict[int, list] = {}

    def noting(number, ids, scores):
        logits[number].append(scores[0].clone())
        return scores

    alone = []
    with batch_of(model, kind) as batch:
        for i, ids in enumerate(prompts):
            logits[i] = []
            processors = [lambda x, scores, i=i: noting(i, x, scores)]
            alone.append(batch.submit(ids, NEW, logits_processor=processors).result())
    with batch_of(model, kind, max_nbytes=7 * BLOCK_NBYTES) as batch:
        together = [x.result() for x in at_random_times(batch, prompts)]
    rows = torch.tensor([token for x in prompts for token in x][:48])
    apart = difference_of_linear_layers(model, rows)
    parted = []
    for i, (a, b) in enumerate(zip(alone, together, strict=True)):
        first = next((j for j in range(NEW) if a[j] != b[j]), None)
        if first is not None:
            best = logits[i][first].topk(2).values
            parted.append(float(best[0] - best[1]))
    print(
        f"{kind}: {len(parted)} of 40 part, at gaps up to {max(parted, default=0):.4f}; linear layers: {apart:.4f}"
    )
    assert apart > 0 or not parted
    assert all(gap <= 2 * apart for gap in parted)  # as both logits may move
    assert len(parted) < 20


@pytest.mark.parametrize("kind", ["bf16", "int8", "int8_channel"])
def test_outputs_of_a_replay_are_equal_to_the_bit(kind, monkeypatch):
    """Recorded q, k, v of each request of a batch, in a cache where it is alone."""
    model, passes = make("llama", torch.bfloat16), []
    attend, run = forward_pass.Pass.attend, ContinuousBatch._pass

    def recorded(self, module, query, key, value, *options):
        found = attend(self, module, query, key, value, *options)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        passes[-1][1].append((module.layer_idx, q, k, v, options, found[0]))
        return found

    def noted(self, parts, step, events):
        passes.append((parts, []))
        run(self, parts, step, events)

    monkeypatch.setattr(forward_pass.Pass, "attend", recorded)
    monkeypatch.setattr(ContinuousBatch, "_pass", noted)
    prompts = [[i + 2, *x] for i, x in enumerate(texts(12))]  # which share nothing
    size = 64 if kind == "int8_channel" else BLOCK
    room = 14 * BLOCK_NBYTES * ROW.get(kind, 4 * 64) // ROW["fp32"]
    with batch_of(model, kind, block_size=size, max_nbytes=room) as batch:
        passes.clear()
        requests = at_random_times(batch, prompts)
        layers = batch.cache.layers
    compared = 0
    for request in requests:
        alone = numkv.torch.PagedKVCache(layers=layers, num_blocks=16, block_size=size)
        seq = alone.add()
        for parts, calls in passes:
            place = next((i for i, x in enumerate(parts) if x.request is request), None)
            if place is None:
                continue
            part, begin = parts[place], sum(x.tokens for x in parts[:place])
            alone.truncate(seq, part.start)  # what it had lost and is computed again
            rows = slice(begin, begin + part.tokens)
            step = alone.reserve([seq], [part.tokens])
            for layer, q, k, v, (scale, cap, sinks), expected in calls:
                step.append(layer, k[rows], v[rows])
                found = step.attention(
                    layer, q[rows], sm_scale=scale, logits_soft_cap=cap, sinks=sinks
                )
                assert torch.equal(found, expected[rows])
                compared += 1
            alone.commit(step)
    assert compared > 400


@pytest.mark.parametrize("kind", ["int4", "int8_channel", "int4_channel"])
def test_other_kinds(kind):
    model, prompts = make("qwen3"), texts(6)
    with batch_of(model, kind, block_size=64) as batch:
        alone = [batch.submit(x, NEW).result() for x in prompts]
    with batch_of(model, kind, block_size=64, tokens_per_pass=1000) as batch:
        together = [batch.submit(x, NEW) for x in prompts]
        batch.run()
        assert [x.result() for x in together] == alone
        nothing_is_left(batch)


def test_kinds_of_a_profile(tmp_path):
    model, prompts = make("llama"), texts(3)
    layers = [numkv.LayerSpec(2, 16, kind=kind) for kind in ("int8", "fp32", "bf16", "int8")]
    numkv.Profile(layers, "llama").save(tmp_path / "profile")
    with batch_of(model, None, profile=tmp_path / "profile") as batch:
        assert [str(x.kind) for x in batch.cache.layers] == ["int8", "fp32", "bf16", "int8"]
        assert all(len(batch.submit(x, NEW).result()) == NEW for x in prompts)
    with pytest.raises(DimensionMismatch, match="3"):
        batch_of(model, None, profile=numkv.Profile(layers[:3], "llama"))
    with pytest.raises(TypeError, match="None with kind"):
        batch_of(model, "int8", profile=numkv.Profile(layers, "llama"))
    assert model.config._attn_implementation == "sdpa"


def test_16_bit_weights():
    """Rows are stored as the model computes them, or widened."""
    model = make("llama", torch.bfloat16)
    for kind in (None, "fp16", "int8", "fp32"):
        with batch_of(model, kind) as batch:
            assert str(batch.cache.layers[0].kind) == (kind or "bf16")
            assert len(batch.submit([3, 4, 5], 4).result()) == 4


def test_a_common_beginning_is_computed_once():
    model = make("llama")
    begin = list(range(2, 62)) * 2
    with batch_of(model, blocks=100) as batch:
        requests = [batch.submit([*begin, 3 + i, 9], NEW) for i in range(6)]  # all at once
        batch.run()
        assert [x.result() for x in requests] == [
            generated(model, [*begin, 3 + i, 9]) for i in range(6)
        ]
        stats = batch.stats()
        assert stats.prompt_tokens <= 120 + 6 * (BLOCK + 2)
        assert stats.found_tokens >= 5 * 112
        assert [x.cached_len > 0 for x in requests] == [False] + [True] * 5


def test_a_store_outlives_the_batch(tmp_path):
    model, prompts = make("llama"), texts(4, longest=120)
    expected = [generated(model, x) for x in prompts]
    found = []
    for _ in range(2):
        with (
            PrefixStore(tmp_path, mark="tiny llama") as store,
            batch_of(model, store=store) as batch,
        ):
            assert [batch.submit(x, NEW).result() for x in prompts] == expected
            found.append(batch.stats().found_tokens)
            store.flush()
    assert found[1] > found[0]


# -- sparse reading


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_as_many_blocks_as_there_are(family):
    """Windows, which are never read sparsely, beside layers that see all; sinks."""
    model, prompts = make(family), texts(8)
    expected = [generated(model, x) for x in prompts]
    with batch_of(model, blocks=100, most_blocks=14) as batch:  # 210 tokens
        requests = at_random_times(batch, prompts)
        assert [x.result() for x in requests] == expected
        nothing_is_left(batch)


@pytest.mark.parametrize(
    ("kind", "blocks", "options"),
    [
        ("fp32", 20, {}), ("int8_channel", 24, {}),
        pytest.param("int8", 44, {"full_precision": numkv.FullPrecision(20, 4)}, marks=pytest.mark.nightly),
        pytest.param("int4", 20, {"rotate": True}, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_each_chooses_as_it_does_alone(kind, blocks, options):
    """Whatever runs beside it, how its prompt is divided, what it finds, and how often it is preempted."""
    size, longest = (64, 330) if kind == "int8_channel" else (BLOCK, 130)
    model, prompts, new = make("llama"), texts(12, longest=longest), 32
    options = options | {"most_blocks": 2 if size == 64 else 3, "block_size": size}
    with batch_of(model, kind, **options) as batch:
        alone = [batch.submit(x, new).result() for x in prompts]
        of_block = batch.cache.nbytes // batch.cache.num_blocks
    for count, tokens in ((blocks, 48), (500, 1000)):
        given = options | {"max_nbytes": count * of_block, "tokens_per_pass": tokens}
        with batch_of(model, kind, **given) as batch:
            requests = [batch.submit(x, new) for x in prompts]
            batch.run()
            assert [x.result() for x in requests] == alone
            assert (batch.stats().preemptions > 0) == (tokens == 48)
            nothing_is_left(batch)
    with batch_of(model, kind, **options | {"most_blocks": 20}) as batch:
        assert [batch.submit(x, new).result() for x in prompts] != alone


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_outputs_over_chosen_blocks(family, monkeypatch):
    """Recorded q, k, v of a batch, by the beginning of the text that they are of: prompts read all, new tokens few."""
    model, most, rows, calls = make(family), 3, {}, []
    attend, run = forward_pass.Pass.attend, ContinuousBatch._pass

    def noted(self, parts, steps, events):
        ids = [(x, x.request.ids()[: x.start + i + 1]) for x in parts for i in range(x.tokens)]
        noted.tokens = [(tuple(ids), len(ids) <= x.request.prompt_len) for x, ids in ids]
        run(self, parts, steps, events)

    def recorded(self, module, query, key, value, scale, cap, sinks):
        found = attend(self, module, query, key, value, scale, cap, sinks)
        layer = module.layer_idx
        q, k, v = (x[0].transpose(0, 1).numpy() for x in (query, key, value))
        for i, (ids, of_prompt) in enumerate(noted.tokens):
            rows[layer, ids] = k[i], v[i]
            if batch.cache.layers[layer].window_left < 0:
                calls.append(
                    (layer, ids, of_prompt, q[i], (scale, cap, sinks), found[0, i].numpy())
                )
        return found

    monkeypatch.setattr(forward_pass.Pass, "attend", recorded)
    monkeypatch.setattr(ContinuousBatch, "_pass", noted)
    with batch_of(model, blocks=20 if family == "llama" else 10, most_blocks=most) as batch:
        requests = [batch.submit(x, 30) for x in texts(12)]
        batch.run()
        assert batch.stats().preemptions > 0
        assert any(x.cached_len for x in requests)
    sparse, rng = 0, random.Random(1)
    for layer, ids, of_prompt, q, (scale, cap, sinks), got in rng.sample(calls, 500):
        k, v = (
            np.stack(x)
            for x in zip(*(rows[layer, ids[: n + 1]] for n in range(len(ids))), strict=True)
        )
        expected, _ = naive_sparse.attention(
            q, k, v, BLOCK, 1000 if of_prompt else most, sm_scale=scale, logits_soft_cap=cap or 0.0,
            sinks=None if sinks is None else sinks.detach().double().numpy(),
        )  # fmt: skip
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        sparse += not of_prompt and len(ids) > most * BLOCK
    assert sparse > 20


def test_names_that_are_found_in_a_few_blocks():
    """The bundled model copies them, over a third of what it has read, as it does over all; over the ends it cannot."""
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype="auto").eval()
    documents = held_out().documents
    if not documents:
        pytest.skip("the held-out text is in the source tree alone")
    (text,) = haystacks(
        ByteTokenizer(0), documents, context=1000, num_texts=1, num_needles=4, defined=True
    )
    ids, found = text.tokens.tolist(), {}
    names = [ids[x.begin : x.end] for x in text.needles]
    for most in (None, 20, 2):
        with batch_of(model, max_nbytes="32MiB", most_blocks=most, tokens_per_pass=512) as batch:
            found[most] = [batch.submit(ids[: x.begin], 8).result() for x in text.needles]
    copied = {
        most: sum(x == y for x, y in zip(got, names, strict=True)) for most, got in found.items()
    }
    assert copied == {None: 3, 20: 3, 2: 0}


def test_bounds_are_counted_and_a_store_keeps_no_choice(tmp_path):
    """Prompts read all, so their blocks are those of a batch that reads all."""
    model, prompts = make("llama"), texts(4, longest=120)
    nbytes, count, found = 64 * BLOCK_NBYTES, {}, []
    with batch_of(model, most_blocks=3) as batch:
        expected = [batch.submit(x, NEW).result() for x in prompts]
        assert batch.cache.nbytes <= nbytes < batch.cache.nbytes * 1.04
        count[3] = batch.cache.num_blocks
    for most in (None, 3):
        with (
            PrefixStore(tmp_path, mark="tiny llama") as store,
            batch_of(model, store=store, most_blocks=most) as batch,
        ):
            made = [batch.submit(x, NEW).result() for x in prompts]
            assert (made == expected) == (most == 3)
            count[most] = batch.cache.num_blocks
            found.append(batch.stats().found_tokens)
            store.flush()
    assert (count[None], count[3]) == (64, 60)  # two rows of float32 for each 16
    assert found[1] > found[0]


def test_a_step_that_cannot_end(monkeypatch):
    """Prompts and new tokens are steps of one pass: what the first has done is noted, the second is done again."""
    model, prompts = make("llama"), texts(4)
    sampled = {"do_sample": True, "seed": 3}
    with batch_of(model, most_blocks=3, blocks=100) as batch:
        expected = [batch.submit(x, NEW, **sampled).result() for x in prompts]
        commit, open_steps = batch.cache.commit, []

        def failing(step, **options):
            open_steps.append(len(batch.cache.open_steps))
            if open_steps[-2:] == [2, 1] and 2 not in open_steps[:-2]:
                raise MemoryError
            commit(step, **options)

        monkeypatch.setattr(batch.cache, "commit", failing)
        requests = [batch.submit(prompts[0], NEW, **sampled)]
        batch.step()
        assert requests[0].tokens
        requests += [batch.submit(x, NEW, **sampled) for x in prompts[1:]]
        with pytest.raises(MemoryError):
            batch.run()
        batch.run()
        assert [x.result() for x in requests] == expected
        nothing_is_left(batch)


def test_numbers_of_blocks_that_are_refused():
    model = make("llama")
    for most, error, words in [
        (0, DimensionMismatch, "at least 1"), (1, DimensionMismatch, "at least 2 blocks"), ("a", TypeError, "str"),
        (2.5, TypeError, "float"), (True, TypeError, "True"), (-1, DimensionMismatch, "at least"),
    ]:  # fmt: skip
        with pytest.raises(error, match=f"`most_blocks`.*({words})"):
            batch_of(model, most_blocks=most)
    in_full = numkv.FullPrecision(4, 40)  # three blocks, and one that is being written
    with pytest.raises(
        DimensionMismatch, match="`most_blocks`: expected at least 4 blocks, 3 first"
    ):
        batch_of(model, "int8", full_precision=in_full, most_blocks=3)
    batch_of(model, "int8", full_precision=in_full, most_blocks=4).close()
    with pytest.raises(NotSupported, match=r"`most_blocks`.*a window or a chunk"):
        batch_of(make("mistral_sliding"), most_blocks=3)
    assert model.config._attn_implementation == "sdpa"


# -- how tokens are chosen, and what ends a text


def test_sampling_depends_on_the_seed_alone():
    model, prompts = make("llama"), texts(6)
    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 20}
    with batch_of(model) as batch:
        alone = [batch.submit(x, NEW, seed=7, **sampled).result() for x in prompts]
        other = [batch.submit(x, NEW, seed=8, **sampled).result() for x in prompts]
        requests = at_random_times(batch, prompts, seed=3, **sampled)
    assert alone != other
    with batch_of(model, blocks=30) as batch:
        together = [batch.submit(x, NEW, seed=7, **sampled) for x in prompts]
        batch.run()
        assert [x.result() for x in together] == alone
    assert all(len(x.tokens) == NEW for x in requests)


def test_options_of_generation():
    model, ids = make("llama"), texts(1)[0]
    config = transformers.GenerationConfig(max_new_tokens=7, repetition_penalty=1.5, pad_token_id=0)
    expected = generated(model, ids, max_new_tokens=7, repetition_penalty=1.5)
    assert expected != generated(model, ids, max_new_tokens=7)
    least = generated(model, ids, max_new_tokens=6, min_new_tokens=6, eos_token_id=expected[2])
    with batch_of(model) as batch:
        request = batch.submit(torch.tensor([ids]), generation_config=config)
        assert (request.result(), request.finish_reason) == (expected, "length")
        request = batch.submit(np.array(ids), 7, repetition_penalty=1.5, eos_token_id=expected[2])
        first = expected.index(expected[2]) + 1
        assert (request.result(), request.finish_reason) == (expected[:first], "stop")
        request = batch.submit(ids, 6, min_new_tokens=6, eos_token_id=expected[2])
        assert request.result() == least
        assert config.max_length is None  # the caller's own stays as it is


def test_stop_strings():
    tokenizers = pytest.importorskip("tokenizers")
    letters = {x: i for i, x in enumerate(string.ascii_letters + string.digits + " _")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    made.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    model = make("llama")
    tokens = generated(model, [3, 4, 5])
    stop = tokenizer.decode(tokens[2:4])
    with batch_of(model) as batch:
        request = batch.submit([3, 4, 5], NEW, stop_strings=[stop], tokenizer=tokenizer)
        assert request.result() == tokens[:4]
        assert request.finish_reason == "stop"
        with pytest.raises(ValueError, match="tokenizer"):
            batch.submit([3], NEW, stop_strings=[stop])


# -- what goes wrong is one request's own


class Failing(transformers.LogitsProcessor):
    """Raises at its `last` call, once."""

    def __init__(self, error, last=3):
        self.error, self.left = error, last

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise self.error
        return scores


def test_a_processor_that_raises():
    model, prompts = make("llama"), texts(4)
    expected = [generated(model, x) for x in prompts]
    with batch_of(model) as batch:
        bad = batch.submit(prompts[0], NEW, logits_processor=[Failing(ValueError("mine"))])
        requests = [batch.submit(x, NEW) for x in prompts]
        ends = [x for x in batch if x.done]
        assert [x.result() for x in requests] == expected
        with pytest.raises(ValueError, match="mine"):
            bad.result()
        assert (bad.finish_reason, bad.tokens) == ("error", expected[0][:2])
        assert len(ends) == 5
        nothing_is_left(batch)


def test_an_interrupt_changes_nothing():
    model, prompts = make("llama"), texts(3)
    sampled = {"do_sample": True, "seed": 3}
    with batch_of(model) as batch:
        expected = [batch.submit(x, NEW, **sampled).result() for x in prompts]
        requests = [batch.submit(x, NEW, **sampled) for x in prompts[:2]]
        requests.append(
            batch.submit(
                prompts[2], NEW, logits_processor=[Failing(KeyboardInterrupt())], **sampled
            )
        )
        with pytest.raises(KeyboardInterrupt):
            batch.run()
        batch.run()
        assert [x.result() for x in requests] == expected
        nothing_is_left(batch)


def test_rows_that_cannot_be_stored():
    model, prompts = make("llama"), texts(5)
    with batch_of(model, "int8") as batch:
        expected = [batch.submit(x, NEW).result() for x in prompts]
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan  # of an id that no other text has
    with batch_of(model, "int8", tokens_per_pass=500) as batch:
        bad = batch.submit([5, 0, 7], NEW)
        requests = [batch.submit(x, NEW) for x in prompts]
        batch.run()
        assert [x.result() for x in requests] == expected
        with pytest.raises(NonFiniteInput):
            bad.result()
        nothing_is_left(batch)


def test_random_cancellations():
    model, prompts = make("llama"), texts(60)
    rng = random.Random(5)
    with batch_of(model, blocks=20) as batch:
        requests, done = [], 0
        for turn in range(200):
            requests.append(batch.submit(prompts[turn % 60], NEW))
            rng.choice(requests).cancel()
            if rng.random() < 0.6:
                batch.step()
        batch.run()
        for request in requests:
            done += request.finish_reason == "length"
            assert len(request.result()) == NEW or request.finish_reason == "cancelled"
        assert 10 < done < 190
        nothing_is_left(batch)


def test_cancelled_ones_give_their_blocks_back_where_nothing_else_runs():
    model = make("llama")
    with batch_of(model) as batch:
        requests = [batch.submit([3, 4, 5], NEW) for _ in range(2)]
        batch.step()
        for request in requests:
            request.cancel()
        assert (unfinished(batch), batch.has_requests) == (0, True)
        model.train()
        with pytest.raises(NotSupported, match="train mode"):
            batch.step()  # gives them back first
        model.eval()
        nothing_is_left(batch)
        request = batch.submit([3, 4, 5], NEW)
        batch.step()
        request.cancel()
        batch.run()
        nothing_is_left(batch)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_text_may_fill_the_models_positions(family):
    """Past them a model with learned positions would fail, and with it all that runs beside."""
    model, ids = make(family), [3] * 509
    assert model.config.max_position_embeddings == 512
    with batch_of(model, blocks=200) as batch:
        assert batch.submit(ids, 4).result() == generated(model, ids, max_new_tokens=4)
        with pytest.raises(
            DimensionMismatch, match=r"512 positions, got a prompt of 509 .* 5 more"
        ):
            batch.submit(ids, 5)
        assert len(batch.submit([3] * 512, 1).result()) == 1


@pytest.mark.parametrize(("blocks", "length"), [(6, 120), (6, 150)])
def test_a_text_alone_is_read_in_smaller_pieces_where_windows_need_it(blocks, length):
    """Layers with windows store all of a piece of a prompt until its pass ends, and little of it then."""
    model = make("gemma3")
    prompt = texts(1, longest=130)[0] + [7] * 100
    with batch_of(model, blocks=blocks, tokens_per_pass=64) as batch:
        assert batch.submit(prompt[:length], NEW).result() == generated(model, prompt[:length])
        nothing_is_left(batch)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_submit_takes_what_fits_and_refuses_what_cannot(family, blocks, monkeypatch):
    """The last token is not stored; windows need blocks, too, more of them where they reach into another block."""
    model, found = make(family), set()
    for length in (15, 16, 17, 32, 47, 48, 49, 64, 65, 80, 97):
        for new in (1, 2):
            with batch_of(model, blocks=blocks) as batch:
                try:
                    request, is_taken = batch.submit([7] * length, new), True
                except CacheFull:
                    monkeypatch.setattr(batch, "_blocks_for", lambda *_, **__: 0)
                    request, is_taken = batch.submit([7] * length, new), False
                if is_taken:
                    assert len(request.result()) == new
                else:
                    with pytest.raises(CacheFull):
                        request.result()
            found.add(is_taken)
    assert found == {True, False}


def test_what_is_refused_at_submit():
    model = make("llama")
    with batch_of(model, blocks=6) as batch:
        running = batch.submit([3, 4, 5], NEW)
        for ids, error, words in [
            ([], DimensionMismatch, "at least one"), ([[1, 2], [3, 4]], DimensionMismatch, "one text"),
            ([1.5], TypeError, "integers"), ([VOCABULARY], ValueError, f"0 to {VOCABULARY - 1}"),
            ([-1], ValueError, "0 to"),
            (list(range(2, 60)) * 9, DimensionMismatch, "512 positions"), ([3] * 200, CacheFull, "max_nbytes"),
            ("text", DimensionMismatch, "one text"),
        ]:  # fmt: skip
            with pytest.raises(error, match=words):
                batch.submit(ids, NEW)
        for options, error, words in [
            ({"num_beams": 2}, NotSupported, "greedy search or sampling"),
            ({"guidance_scale": 2.0}, NotSupported, "twice"),
            ({"do_sample": True, "num_return_sequences": 2}, NotSupported, "one text"),
            ({"mine": 1}, TypeError, "'mine'"), ({"seed": 1}, TypeError, "do_sample"),
            ({"max_new_tokens": 0}, DimensionMismatch, "max_new_tokens"),
        ]:  # fmt: skip
            with pytest.raises(error, match=words):
                batch.submit([3], **{"max_new_tokens": NEW, **options})
        model.train()
        with pytest.raises(NotSupported, match="eval"):
            batch.submit([3], NEW)
        with pytest.raises(NotSupported, match="eval"):
            batch.step()
        model.eval()
        model.set_attn_implementation("sdpa")
        with pytest.raises(NotSupported, match="'sdpa'"):
            batch.step()
        model.set_attn_implementation("numkv")
        assert running.result() == generated(model, [3, 4, 5])
        nothing_is_left(batch)
    for call in (lambda: batch.submit([3], NEW), batch.step):
        with pytest.raises(NumkvError, match="closed"):
            call()
    batch.close()


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_are_refused(family):
    model = make(family)
    before = model.config._attn_implementation
    with pytest.raises(NotSupported, match=REFUSED[family]):
        batch_of(model)
    assert model.config._attn_implementation == before


def test_rope_that_depends_on_the_batch():
    model = make(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.raises(NotSupported, match="longest text"):
        batch_of(model)


# -- who drives it


def test_requests_drive_the_batch():
    model, prompts = make("llama"), texts(3)
    expected = [generated(model, x) for x in prompts]
    with batch_of(model) as batch:
        requests = [batch.submit(x, NEW) for x in prompts]
        assert list(requests[1]) == expected[1]
        found = {x: [] for x in requests}
        for event in batch:
            found[event.request].append(event.token)
            assert event.done == (event.request.finish_reason is not None)
        assert [x.tokens for x in requests] == expected
        assert found[requests[1]] == []


def test_another_thread_may_submit_but_not_drive():
    model, prompts = make("llama"), texts(12)
    expected = [generated(model, x) for x in prompts]
    errors, requests, inside = [], [None] * len(prompts), threading.Event()

    class Driving(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            inside.set()
            with pytest.raises(NumkvError, match="another call"):
                batch.step()
            return scores

    def submit():
        try:
            inside.wait(30)
            for i, ids in enumerate(prompts):
                requests[i] = batch.submit(ids, NEW)
        except Exception as error:
            errors.append(error)

    with batch_of(model) as batch:
        first = batch.submit(prompts[0], 40, logits_processor=[Driving()])
        thread = threading.Thread(target=submit)
        thread.start()
        while thread.is_alive() or unfinished(batch):
            batch.step()
        thread.join()
        assert not errors
        assert first.result()[:NEW] == expected[0]
        assert [x.result() for x in requests] == expected
        nothing_is_left(batch)


def test_a_request_cannot_wait_for_itself():
    model = make("llama")

    class Waiting(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            request.cancel()
            return scores + 0 * len(other.result())

    with batch_of(model) as batch:
        other = batch.submit([3, 4], NEW)
        request = batch.submit([3], NEW, logits_processor=[Waiting()])
        batch.run()
        assert (request.finish_reason, request.tokens) == ("cancelled", [])
        assert other.result() == generated(model, [3, 4])
        nothing_is_left(batch)


def test_two_threads_wait_for_results():
    model, prompts = make("llama"), texts(6)
    expected = [generated(model, x) for x in prompts]
    found = {}
    with batch_of(model) as batch:
        requests = [batch.submit(x, NEW) for x in prompts]

        def wait(numbers):
            for i in numbers:
                found[i] = requests[i].result()

        threads = [threading.Thread(target=wait, args=(range(i, 6, 2),)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [found[i] for i in range(6)] == expected


def test_an_event_loop():
    model, prompts = make("llama"), texts(3)
    expected = [generated(model, x) for x in prompts]

    async def main(batch):
        requests, found = [batch.submit(prompts[0], NEW)], {}
        async for event in batch:
            found.setdefault(event.request.number, []).append(event.token)
            if len(requests) < 3:
                requests.append(batch.submit(prompts[len(requests)], NEW))
        return [found[x.number] for x in requests]

    with batch_of(model) as batch:
        assert asyncio.run(main(batch)) == expected


def in_tasks(batch, requests, wait=0):
    """What tasks of one event loop read of requests."""

    async def read(request):
        found = []
        async for token in request:
            found.append(token)
            await asyncio.sleep(wait)
        return found

    async def main():
        async with batch:
            return await asyncio.gather(*map(read, requests), return_exceptions=True)

    return asyncio.run(main())


@pytest.mark.parametrize("wait", [0, 0.001])
def test_tasks_share_passes(wait):
    model, prompts = make("llama"), texts(8)
    expected = [generated(model, x) for x in prompts]
    batch = batch_of(model, tokens_per_pass=1000)
    requests = [batch.submit(x, NEW) for x in prompts]
    failing = batch.submit(prompts[0], NEW, logits_processor=[Failing(ValueError("mine"))])
    *found, error = in_tasks(batch, [*requests, failing], wait)
    assert found == expected
    assert str(error) == "mine"
    assert batch.stats().passes < 3 * NEW
    nothing_is_left(batch)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(NumkvError, match="closed"):
        batch.submit([3])


def test_a_pass_that_fails_fails_each_task(monkeypatch):
    """They may try again: nothing has changed."""
    model, prompts = make("llama"), texts(4)
    expected = [generated(model, x) for x in prompts]

    async def main():
        async with batch_of(model) as batch:
            requests = [batch.submit(x, NEW) for x in prompts]
            with monkeypatch.context() as patch:
                patch.setattr(type(batch), "_next_parts", lambda *_: 1 / 0)
                tasks = [anext(aiter(x)) for x in requests]
                found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(x) for x in found] == [ZeroDivisionError] * 4
            return [[token async for token in x] for x in requests]

    assert asyncio.run(main()) == expected


def test_tasks_that_are_cancelled():
    """The pass goes on for the others, and is over before the batch is closed."""
    model, prompts = make("llama"), texts(2)
    expected, inside, passed = generated(model, prompts[0]), threading.Event(), threading.Event()

    class Waiting(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            inside.set()
            assert passed.wait(30)
            return scores

    async def main():
        batch = batch_of(model)
        async with batch:
            requests = [batch.submit(x, NEW, logits_processor=[Waiting()]) for x in prompts]
            first, second = (asyncio.create_task(anext(aiter(x))) for x in requests)
            await asyncio.to_thread(inside.wait, 30)
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            assert not second.done()
            passed.set()
            assert await second == generated(model, prompts[1])[0]
            assert [x async for x in requests[0]] == expected  # it was not the request's end
            inside.clear(), passed.clear()
            last = batch.submit(prompts[0], NEW, logits_processor=[Waiting()])
            reader = asyncio.create_task(anext(aiter(last), None))
            await asyncio.to_thread(inside.wait, 30)
            asyncio.get_running_loop().call_later(0.1, passed.set)
        assert last.finish_reason == "cancelled"
        assert await reader is None
        nothing_is_left(batch)

    asyncio.run(main())
    assert model.config._attn_implementation == "sdpa"


def test_one_batch_in_two_event_loops_at_once():
    model, prompts = make("llama"), texts(6)
    expected, found = [generated(model, x) for x in prompts], {}

    def drive(numbers):
        async def read(i):
            found[i] = [token async for token in requests[i]]

        async def main():
            await asyncio.gather(*map(read, numbers))

        asyncio.run(main())

    with batch_of(model) as batch:
        requests = [batch.submit(x, NEW) for x in prompts]
        threads = [threading.Thread(target=drive, args=(range(i, 6, 2),)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [found.get(i) for i in range(6)] == expected
        nothing_is_left(batch)


def test_a_model_in_use_stays_so():
    model = use(make("llama"), "int8")
    expected = generated(model, [3, 4, 5, 6])
    with batch_of(model) as batch:
        request = batch.submit([3, 4, 5, 6], NEW)
        batch.step()
        assert generated(model, [3, 4, 5, 6]) == expected  # meanwhile
        assert len(request.result()) == NEW
    assert generated(model, [3, 4, 5, 6]) == expected
    assert model.config._attn_implementation == "numkv"


def test_the_end_of_a_block_while_another_thread_drives():
    """It cancels the rest and waits for the pass, so an error of the block is the one that is seen."""
    batch = batch_of(make("llama"))

    def drive():
        for _ in request:
            began.set()

    began, thread = threading.Event(), threading.Thread(target=drive)
    with pytest.raises(ZeroDivisionError), batch:
        request = batch.submit(texts(1)[0], 300)
        thread.start()
        assert began.wait(60)
        raise ZeroDivisionError
    thread.join(60)
    assert request.finish_reason == "cancelled"
    assert not thread.is_alive()
    assert len(batch.cache) == 0


def test_closing_cancels():
    model = make("llama")
    with batch_of(model) as batch:
        requests = [batch.submit(x, NEW) for x in texts(3)]
        batch.step()
    assert [x.finish_reason for x in requests] == ["cancelled"] * 3
    assert all(len(x.result()) < NEW for x in requests)
    assert len(batch.cache) == 0
    assert model.config._attn_implementation == "sdpa"
    assert "cancelled" in repr(requests[0])
