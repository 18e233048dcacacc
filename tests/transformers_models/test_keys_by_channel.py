"""Keys by channel in a `NumkvCache`, against a plain model of what each sequence of a batch must hold."""

import copy
import pickle
import types

import numpy as np
import pytest

import numkv

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from channel_model import TOKENS, Sequence  # noqa: E402
from decoder_models import make, prompts  # noqa: E402
from transformers import masking_utils as masking  # noqa: E402

from numkv.errors import NotSupported  # noqa: E402
from numkv.transformers import NumkvCache, use  # noqa: E402
from numkv.transformers.attention import attention  # noqa: E402
from numkv.transformers.masks import plan_of_mask  # noqa: E402

HEADS, Q_HEADS, DIM, WINDOW = 2, 4, 32, 100
KINDS = ["int8_channel", "int4_channel_fine", "int4_channel"]
CONFIGS = {
    "full": transformers.LlamaConfig(num_hidden_layers=1),
    "sliding": transformers.MistralConfig(num_hidden_layers=1, sliding_window=WINDOW),
}
MASKS = {
    "full": masking.causal_mask_function,
    "sliding": masking.sliding_window_causal_mask_function(WINDOW),
}


class Kept:
    """A sequence, and from where on its rows are in full."""

    def __init__(self, rows, end=0):
        self.rows, self.end = rows, end

    def extended(self, k, v):
        if not len(k):
            return self
        begin, rows = len(self.rows) // TOKENS * TOKENS, self.rows.extended(k, v)
        last = (-(-len(rows) // TOKENS) - 2) * TOKENS
        return Kept(rows, max(0, min(self.end, begin) if last <= begin else begin, last))

    def cropped(self, length):
        """What is cut out of a group whose rows in full are gone is what its codes say."""
        old, end = self.rows, min(self.end, length)
        k, full_v, kept = (
            old.k[:length].copy(),
            old.full_v[:length].copy(),
            length // TOKENS * TOKENS,
        )
        if kept < end:
            of_k, of_v = old.read()
            k[kept:end], full_v[kept:end] = of_k[kept:end], of_v[kept:end]
        return Kept(Sequence(k, old.v[:length], old.kind, full_v, sinks=old.sinks), end)


class Played:
    """A cache of one layer, and the model of it."""

    def __init__(self, rng, kind, seen, batch=2, dtype=torch.float32, first=0):
        self.rng, self.seen, self.dtype = rng, seen, dtype
        kept = numkv.FullPrecision(64, first) if first else None
        self.cache = NumkvCache(CONFIGS[seen], kind, full_precision=kept)
        self.cache.activate_past_recording()
        self.models = [Kept(Sequence.empty(HEADS, DIM, kind, first))] * batch
        self.mask = np.ones((batch, 0), bool)

    def forward(self, columns, padding=None):
        rng, batch = self.rng, len(self.models)
        shapes = (Q_HEADS, columns, DIM), (HEADS, columns, DIM), (HEADS, columns, DIM)
        q, k, v = (rng.standard_normal((batch, *shape), np.float32) for shape in shapes)
        k[..., 3] += 50
        q[..., 3] /= 50
        pads = np.zeros(batch, int) if padding is None else np.array(padding)
        new = np.arange(columns)[None] >= pads[:, None]
        k[~new.repeat(HEADS, 0).reshape(batch, HEADS, columns)] = 1e4  # never stored
        past, self.mask = self.mask.shape[1], np.concatenate([self.mask, new], 1)
        plan = plan_of_mask(
            batch, columns, past + columns, past, mask_function=MASKS[self.seen],
            attention_mask=torch.from_numpy(self.mask),
        )  # fmt: skip
        q, k, v = (torch.from_numpy(x).to(self.dtype) for x in (q, k, v))
        module = types.SimpleNamespace(training=False, layer_idx=0)
        found, _ = attention(module, q, *self.cache.update(k, v, 0), plan)
        q, k, v = (x.float().numpy().swapaxes(1, 2) for x in (q, k, v))
        for b, model in enumerate(self.models):
            before = len(model.rows)
            self.models[b] = model = model.extended(k[b, new[b]], v[b, new[b]])
            places = range(before, len(model.rows))
            window = WINDOW - 1 if self.seen == "sliding" else -1
            wanted = model.rows.attended(q[b, new[b]], places, window)
            error = np.linalg.norm(found[b].float().numpy()[new[b]] - wanted)
            assert error <= (2e-4 if self.dtype == torch.float32 else 5e-3) * np.linalg.norm(wanted)

    def crop(self, columns):
        self.cache.crop(-columns)
        left = self.mask.shape[1] - columns
        self.mask = self.mask[:, :left]
        self.models = [
            x.cropped(int(n)) for x, n in zip(self.models, self.mask.sum(1), strict=True)
        ]
        self.cache.activate_past_recording()

    def select(self, order):
        self.cache.reorder_cache(torch.tensor(order))
        self.models, self.mask = [self.models[b] for b in order], self.mask[order]

    def copied(self, cache):
        new = copy.copy(self)
        new.cache, new.models = cache, list(self.models)
        return new


@pytest.mark.parametrize("seen", CONFIGS)
@pytest.mark.parametrize(("kind", "first"), [*((kind, 0) for kind in KINDS), ("int4_channel", 4)])
def test_passes_of_a_ragged_batch(rng, kind, first, seen):
    """Padded on the left; over ends of groups, in short passes and long ones."""
    p = Played(rng, kind, seen, first=first)
    p.forward(70, (0, 41))
    for _ in range(3):
        p.forward(1)
    p.forward(33, (2, 0))
    p.forward(64)
    p.forward(65)
    p.forward(200, (199, 0))
    p.forward(1)
    p.cache.reset()
    p.models, p.mask = [Kept(Sequence.empty(HEADS, DIM, kind, first))] * 2, p.mask[:, :0]
    p.forward(63)
    p.forward(1)
    p.forward(1)
    p.forward(63)


@pytest.mark.parametrize("seen", CONFIGS)
@pytest.mark.parametrize(("kind", "first"), [*((kind, 0) for kind in KINDS), ("int8_channel", 70)])
def test_crops_beams_and_copies(rng, kind, first, seen):
    p = Played(rng, kind, seen, first=first)
    p.forward(150, (0, 30))
    p.crop(25)  # the first sequence into a group whose rows are there
    p.forward(1)
    p.crop(90)  # both into groups whose rows are gone
    copies = [copy.deepcopy(p.cache), pickle.loads(pickle.dumps(p.cache))]
    others = [p.copied(cache) for cache in copies]
    p.forward(3)
    p.select([1, 1, 0])
    p.forward(1)
    p.forward(60)
    p.select([2, 0, 0])
    p.forward(1)
    p.crop(50)
    p.forward(100)
    for other in others:
        other.forward(70)
        other.forward(1)
    assert p.cache.get_seq_length() == 150 - 25 + 1 - 90 + 3 + 61 + 1 - 50 + 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_16_bits(rng, dtype):
    p = Played(rng, "int8_channel", "full", dtype=dtype)
    p.forward(90, (0, 20))
    p.forward(1)
    p.crop(40)
    p.forward(60)


@pytest.mark.parametrize("seen", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_short_passes_are_one_compiled_call(rng, kind, dtype, seen, monkeypatch):
    """A layer's, over ends of groups; bit by bit what the ordinary way gives, for two layers of one history."""
    from numkv.transformers import attention as of_module

    config = copy.deepcopy(CONFIGS[seen])
    config.num_hidden_layers = 2
    caches, at_once, taken = [NumkvCache(config, kind) for _ in range(2)], of_module.at_once, []

    def counted(*args):
        found = at_once(*args)
        taken.append(found is not None)
        return found

    module, past = types.SimpleNamespace(training=False, layer_idx=0), 0
    for columns in (100, *[1] * 40, 2, *[1] * 100):
        plans = [
            plan_of_mask(2, columns, past + columns, past, mask_function=MASKS[seen])
            for _ in caches
        ]
        for layer in range(2):
            shapes = (Q_HEADS, columns, DIM), (HEADS, columns, DIM), (HEADS, columns, DIM)
            q, k, v = (
                torch.from_numpy(rng.standard_normal((2, *x), np.float32)).to(dtype) for x in shapes
            )
            found = []
            for cache, plan, way in zip(caches, plans, (counted, lambda *_: None), strict=True):
                monkeypatch.setattr(of_module, "at_once", way)
                found.append(attention(module, q, *cache.update(k, v, layer), plan)[0])
            assert torch.equal(*found)
            if columns == 1 and past != 100:
                assert taken[-1]
        past += columns
        if past == 150:
            for cache in caches:
                cache.reorder_cache(torch.tensor([1, 0]))
        if past == 230 and seen == "full":
            for cache in caches:
                cache.crop(-3)
            past -= 3


def test_random_passes(rng):
    for _ in range(6):
        kind, seen, first = (
            KINDS[rng.integers(2)],
            rng.choice(list(CONFIGS)),
            rng.choice([0, 3, 90]),
        )
        p = Played(rng, kind, seen, 3, first=int(first))
        p.forward(int(rng.integers(1, 150)), rng.integers(0, 2, 3))
        for _ in range(12):
            what, length = rng.integers(6), p.mask.shape[1]
            if what == 0 and length > 1:
                p.crop(int(rng.integers(1, min(length, 80))))
            elif what == 1:
                p.select(rng.integers(0, len(p.models), int(rng.integers(1, 4))).tolist())
            elif what == 2:
                p.forward(int(rng.integers(1, 200)))
            else:
                columns = int(rng.integers(1, 40))
                p.forward(columns, rng.integers(0, columns + 1, len(p.models)))


def test_nothing_changes_by_rows_that_are_not_finite(rng):
    p = Played(rng, "int8_channel", "full", batch=1)
    p.forward(130)
    for columns in (1, 70, 140):
        q, k, v = (torch.zeros(1, n, columns, DIM) for n in (Q_HEADS, HEADS, HEADS))
        k[0, 1, columns - 1, 5] = torch.nan
        length = p.mask.shape[1]
        plan = plan_of_mask(1, columns, length + columns, length, mask_function=MASKS["full"])
        with pytest.raises(numkv.NonFiniteInput):
            attention(types.SimpleNamespace(training=False), q, *p.cache.update(k, v, 0), plan)
        p.forward(1)
    p.crop(20)
    p.forward(2)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_generation(name):
    """Long enough for codes; a model's own results where all tokens are in full."""
    model, given = make(name), prompts([13, 5, 9])
    wanted = model.generate(**given, do_sample=False, max_new_tokens=40)
    use(model, "int8_channel")
    assert torch.equal(model.generate(**given, do_sample=False, max_new_tokens=40), wanted)
    given = prompts([80, 61, 130])
    for more in ({}, {"num_beams": 3}):
        found = model.generate(**given, do_sample=False, max_new_tokens=20, **more)
        assert found.shape[1] > 130


def test_assisted_generation():
    """Drafts are cropped, over ends of groups."""
    model, helper = (use(make("llama"), kind) for kind in ("int8_channel", "int4_channel"))
    ids = prompts([100])["input_ids"]
    for more in ({"assistant_model": helper}, {"prompt_lookup_num_tokens": 4}):
        found = model.generate(ids, do_sample=False, max_new_tokens=70, **more)
        assert found.shape == (1, 170)


def test_a_tolerance():
    """It is asked about whole groups, as the newest rows have no error."""
    model = use(make("llama"), "int4_channel", tolerance=1e-6)
    model.generate(prompts([40])["input_ids"], do_sample=False, max_new_tokens=2)
    with pytest.warns(UserWarning, match="keys in int4_channel/int4 change scores"):
        model.generate(prompts([140])["input_ids"], do_sample=False, max_new_tokens=2)


@pytest.mark.kernels
def test_profiles():
    spec = {"head_dim": 16, "num_kv_heads": 2}
    layers = [numkv.LayerSpec(**spec, kind=k, v_kind="int8") for k in ("int8_channel", "bf16")]
    model = make("qwen2")
    layers = [layers[i % 2] for i in range(model.config.num_hidden_layers)]
    given = prompts([80, 70])
    found = use(model, profile=numkv.Profile(layers)).generate(
        **given, do_sample=False, max_new_tokens=70, return_dict_in_generate=True
    )
    said = [layer.storage for layer in found.past_key_values.layers]
    assert said == [("int8_channel/int8", "bf16/int8")[i % 2] for i in range(len(layers))]
    assert found.sequences.shape[1] == 150


def test_what_is_refused():
    config = CONFIGS["full"]
    small = transformers.MistralConfig(num_hidden_layers=2, sliding_window=64)
    for options, said in (
        ({"v_kind": "int8_channel"}, "`v_kind`: expected a kind"),
        ({"kind": "int8_channel", "rotate": True}, "`rotate`"),
        ({"kind": "int8_channel", "full_precision": numkv.FullPrecision(65)}, "at most 64 tokens"),
    ):
        with pytest.raises(NotSupported, match=said):
            NumkvCache(config, **options)
    with pytest.raises(NotSupported, match=r"windows of more than 64 .* got one of 64 in layer 0"):
        NumkvCache(small, "int4_channel")
    latent = transformers.DeepseekV3Config(num_hidden_layers=1)
    with pytest.raises(NotSupported, match=r"`kind`: .*int8_channel"):
        NumkvCache(latent, "int8_channel")
    assert "int4_channel/int4" in repr(NumkvCache(config, "int4_channel"))
