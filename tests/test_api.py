"""The public surface: what is listed, and that documented parameters are the real ones."""

import dataclasses
import importlib
import inspect
import re
import types
import typing
from pathlib import Path

import pytest
from walked import each

import numkv

CONTRACT = {
    "AppendArgs", "AppendDescriptor", "AppendPlan", "Batch", "CacheConfig", "CacheFull",
    "CausalCache", "CompressorConfig", "ContiguousLayer", "DimensionMismatch",
    "EncoderCache", "HeadCompressor", "KVCache", "MultiHeadCompressor", "NonFiniteInput",
    "NotSupported", "NumkvError", "PagedLayer", "PagedPool",
    "UnsupportedDType", "WrapperCache", "append", "rope_shift", "decode_attention", "kind", "merge_states",
    "paged_append", "paged_decode_attention", "paged_prefill_attention", "paged_write",
    "prefill_attention",
}  # fmt: skip


def test_the_contract_is_there():
    assert set(numkv.__all__) >= CONTRACT


def test_the_list_is_sorted_and_complete():
    assert numkv.__all__ == sorted(set(numkv.__all__))
    public = {
        name
        for name, value in vars(numkv).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - {"annotations"} == {n for n in numkv.__all__ if not n.startswith("_")} - {
        n for n in numkv.__all__ if isinstance(getattr(numkv, n), types.ModuleType)
    }


# Packages with public names; whatever else can be imported is internal.
PACKAGES = {
    "attention": [
        "AttentionOptions", "attention_weights", "cascade_attention", "decode_attention", "merge_states",
        "paged_decode_attention", "paged_prefill_attention", "prefill_attention", "tree_mask",
    ],
    "blocks": [
        "BlockPool", "BlocksRemoved", "BlocksStored", "MissReason", "PoolStats", "block_digests",
        "block_table_to_csr", "csr_to_block_table", "root_digest", "slot_mapping", "token_ids",
    ],
    "caches": [
        "Batch", "BoundAttention", "BoundLayer", "BoundStep", "CacheConfig", "CausalCache",
        "ContiguousLayer", "EncoderCache", "FullPrecision", "KVCache", "LayerSpec", "PagedKVCache", "PagedLayer",
        "PagedPool", "PagedStats", "Profile", "StateSlots", "Step", "StepBuffers", "SwappedSequence",
        "WrapperCache",
    ],
    "cli": ["main"],
    "compaction": [
        "AttentionTally", "first_and_recent", "heavy_hitters", "max_pool", "seen_by_recent",
    ],
    "demo": ["BUNDLED_MODEL"],
    "files": ["load", "load_sequences", "save", "save_sequences"],
    "planning": ["ConfigError", "LayerNeeds", "ModelNeeds", "Rows", "State", "needs_of"],
    "ray": [
        "Attending", "Delivery", "Limits", "LocalShards", "RayShards", "ShardDown", "ShardLost", "ShardedKVCache",
        "ShardedStats", "ShardedStep", "Transport",
    ],
    "sparse": [
        "BlockChoice", "KeyBounds", "choose_blocks", "sparse_decode_attention", "token_decode_attention",
    ],
    "storage": ["Pool", "Rotation"],
    "store": [
        "BlockStore", "BlocksDropped", "BlocksWritten", "ByteStats", "PrefixFound", "PrefixStore", "StoreAnswers",
        "StoreSilent", "StoreStats",
    ],
    "targets": ["Array", "CpuTarget", "Target", "get", "of"],
}  # fmt: skip
EXTRAS = {  # that may be missing
    "torch": None,
    "transformers": [
        "BatchEvent", "BatchRequest", "BatchStats", "ContinuousBatch", "NumkvCache", "mark_of", "restore",
        "use",
    ],
}  # fmt: skip


def test_packages_have_the_public_names_that_are_listed():
    folders = sorted(p.parent.name for p in Path(numkv.__file__).parent.glob("*/__init__.py"))
    found = {}
    for folder in folders:
        if folder in EXTRAS:
            continue  # see below
        package = importlib.import_module(f"numkv.{folder}")
        if hasattr(package, "__all__"):
            found[folder] = list(package.__all__)
            assert all(hasattr(package, name) for name in package.__all__), folder
    assert found == PACKAGES


@pytest.mark.parametrize("folder", EXTRAS)
def test_packages_of_extras_have_the_public_names_that_are_listed(folder):
    pytest.importorskip("torch")
    pytest.importorskip(folder)
    package = importlib.import_module(f"numkv.{folder}")
    assert all(hasattr(package, name) for name in package.__all__)
    if EXTRAS[folder] is None:  # the names of numkv itself
        assert set(package.__all__) <= set(numkv.__all__)
    else:
        assert list(package.__all__) == EXTRAS[folder]


def test_a_package_gives_the_objects_that_the_top_level_gives():
    for folder, names in PACKAGES.items():
        package = importlib.import_module(f"numkv.{folder}")
        for name in set(names) & set(numkv.__all__):
            assert getattr(package, name) is getattr(numkv, name)


def test_the_version_is_a_version():
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?(\.?(dev|a|b|rc)\d+)?", numkv.__version__)


# ---------------------------------------------------------------- docstrings


def documented(docstring: str, section: str = "Parameters") -> list[str]:
    """Names in a section of a NumPy-style docstring."""
    lines, names, inside = inspect.cleandoc(docstring).splitlines(), [], False
    for i, line in enumerate(lines):
        underlined = i + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[i + 1])
        if underlined:
            inside = line.strip() == section
        elif inside and line and not line[0].isspace() and not line.startswith("---"):
            names += [n.strip().lstrip("*") for n in line.split(" :")[0].split(",")]
    return names


def parameters(function) -> list[str]:
    return [n for n in inspect.signature(function).parameters if n != "self"]


def members(cls) -> dict[str, object]:
    """What a class has, from numkv's own bases too."""
    bases = [b for b in reversed(cls.__mro__) if b.__module__.partition(".")[0] == "numkv"]
    return {name: member for base in bases for name, member in vars(base).items()}


def public_callables():
    """Every public function, class and method: name, object that is called, its docstring."""
    for name in numkv.__all__:
        value = getattr(numkv, name)
        if inspect.isfunction(value):
            yield name, value, value.__doc__
        elif inspect.isclass(value) and not issubclass(value, (Exception, int)):
            yield name, value, value.__doc__
            for method, member in members(value).items():
                if method.startswith("_") or isinstance(member, property):
                    continue
                function = inspect.unwrap(getattr(value, method))
                if callable(function):
                    yield f"{name}.{method}", function, function.__doc__


def test_documented_parameters_are_the_real_ones():
    """The fields of a dataclass are its parameters; `select` and the like make other objects."""
    for name, function, doc in public_callables():
        assert doc, f"{name} is public, but without a docstring"
        names = documented(doc)
        if typing.is_typeddict(function):
            assert documented(doc, "Attributes") == list(function.__annotations__)
            continue
        if dataclasses.is_dataclass(function):
            names = documented(doc, "Attributes")
        elif not names and any(isinstance(x, classmethod) for x in vars(function).values()):
            continue
        assert sorted(names) == sorted(parameters(function)), name


def test_properties_and_errors_are_documented():
    for name in numkv.__all__:
        value = getattr(numkv, name)
        if inspect.isclass(value):
            assert value.__doc__, name
            for member, item in members(value).items():
                if isinstance(item, property) and not member.startswith("_"):
                    assert item.__doc__, f"{name}.{member}"


def test_the_reader_of_docstrings_reads():
    doc = """Do it.

    Parameters
    ----------
    a, b : int
        Both.
    *rest
        More.

    Returns
    -------
    c : int
    """
    assert documented(doc) == ["a", "b", "rest"]


SIGNATURES = {  # as the contract writes them
    "KVCache": [
        "num_layers", "num_kv_heads", "head_dim", "max_seq_len", "kind", "target", "head_dim_v",
    ],
    "ContiguousLayer": ["capacity", "num_kv_heads", "head_dim", "kind", "target"],
    "PagedLayer": [
        "max_blocks_per_seq", "block_size", "num_kv_heads", "head_dim", "kind", "target", "pool",
    ],
    "PagedPool": ["num_blocks", "block_size", "num_kv_heads", "head_dim", "kind", "target"],
    "paged_append": ["k", "v", "k_pool", "v_pool", "slot_mapping", "k_scale", "v_scale"],
    "AppendDescriptor": [
        "batch_size", "num_heads", "new_len", "max_cache_len", "d_k", "d_v", "dtype",
    ],
    "AppendArgs": ["k_new", "v_new", "k_cache", "v_cache", "cache_offsets"],
    "AppendPlan.select": ["descriptor", "target"],
    "AppendPlan.run": ["args", "stream", "workspace"],
    "AppendPlan.can_implement": ["args"],
    "append": ["k_new", "v_new", "k_cache", "v_cache", "cache_offsets"],
    "KVCache.append": ["layer", "k", "v"],
    "KVCache.advance": ["n"],
    "KVCache.truncate": ["length"],
    "ContiguousLayer.append": ["k", "v"],
    "ContiguousLayer.truncate": ["length"],
    "ContiguousLayer.write": [
        "qkv", "num_q_heads", "cos", "sin", "qk_mode", "q_norm_weight", "k_norm_weight", "eps",
        "pos_offset", "q_out",
    ],
    "merge_states": ["o_a", "lse_a", "o_b", "lse_b"],
}  # fmt: skip
OPTIONS = set(numkv.AttentionOptions.__annotations__)


@each("name", SIGNATURES)
def test_names_and_order_of_the_contract(name):
    function = numkv
    for part in name.split("."):
        function = getattr(function, part)
    found = parameters(function)
    assert [n for n in found if n in SIGNATURES[name]] == SIGNATURES[name]
    extra = [inspect.signature(function).parameters[n] for n in found if n not in SIGNATURES[name]]
    assert all(p.default is not p.empty and p.kind is p.KEYWORD_ONLY for p in extra)


@each(
    "name, leading",
    [
        ("decode_attention", ["q", "k", "v", "seq_lens"]),
        ("prefill_attention", ["q", "k", "v", "seq_lens", "cu_seqlens_q"]),
        ("paged_decode_attention", ["q", "k_pool", "v_pool", "block_table", "seq_lens"]),
        (
            "paged_prefill_attention",
            ["q", "k_pool", "v_pool", "block_table", "seq_lens", "cu_seqlens_q"],
        ),
        ("KVCache.decode_attention", ["layer", "q"]),
        ("ContiguousLayer.decode_attention", ["q"]),
        ("PagedLayer.decode_attention", ["q"]),
    ],
)
def test_attention_options_are_the_same_everywhere(name, leading):
    function = numkv
    for part in name.split("."):
        function = getattr(function, part)
    signature = inspect.signature(function).parameters
    assert parameters(function)[: len(leading)] == leading
    for option, default in (("return_lse", False), ("out", None)):
        assert signature[option].kind is inspect.Parameter.KEYWORD_ONLY
        assert signature[option].default == default
    assert signature["options"].annotation == "Unpack[AttentionOptions]"
    assert {"sm_scale", "logits_soft_cap", "window_left", "sinks"} < OPTIONS
