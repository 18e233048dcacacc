"""Names copied from far back: the texts, the sums, and caches that have lost the names."""

import re

import numpy as np
import pytest
from demo_models import reference_logits, write_checkpoint

from numkv.demo.cache import CacheChoice, parse_cache
from numkv.demo.evaluate import Document, held_out
from numkv.demo.model import Model
from numkv.demo.network import blas_threads_for
from numkv.demo.recall import DISTANCES, Haystack, Needle, haystacks, recall
from numkv.demo.tokenizer import ByteTokenizer

LINES = [f"x{i} = {i}\n" for i in range(200)]
DOCUMENTS = [Document("a", "".join(LINES)), Document("b", "".join(reversed(LINES)))]


@pytest.mark.parametrize("defined", [True, False])
def test_haystacks(defined):
    made = haystacks(
        ByteTokenizer(0), DOCUMENTS, context=1000, num_texts=2, num_needles=6, defined=defined
    )
    assert len(made) == 2
    names = set()
    for haystack in made:
        assert len(haystack.needles) == 6
        assert haystack.needles[-1].end == len(haystack.tokens) <= 1000
        text = bytes(haystack.tokens[1:].tolist()).decode()
        for i, needle in enumerate(haystack.needles):
            begin, end = needle.begin - 1, needle.end - 1  # a start token comes first
            name = text[begin - 4 : end]
            assert re.fullmatch("[a-z]{12}", name)
            assert text[: begin - 4].endswith("\n        self.")
            assert (needle.num_bytes, needle.group) == (8, i % len(DISTANCES))
            assert begin > 450
            names.add(name)
            place = text.find(f"    def {name}(self):\n")
            assert (place >= 0) == defined
            assert text.count(name[:6]) == 1 + defined
            if defined:
                assert begin - 4 - 13 - place == needle.distance
                assert abs(needle.distance - 1000 * DISTANCES[needle.group]) < 60
        others = re.sub(r" +def [a-z]{12}\(self\):\n| +self\.[a-z]+\(?\)?\n?", "", text)
        assert set(others.splitlines(keepends=True)) < set(LINES)
    assert len(names) == 12
    again = haystacks(
        ByteTokenizer(0), DOCUMENTS, context=1000, num_texts=2, num_needles=6, defined=defined
    )
    for one, other in zip(made, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert one.needles == other.needles


def test_texts_with_and_without_definitions_are_alike():
    with_names, without = (
        haystacks(ByteTokenizer(), DOCUMENTS, context=600, num_texts=1, defined=x)[0]
        for x in (True, False)
    )
    assert with_names.needles == without.needles
    differ = with_names.tokens != without.tokens
    assert 0 < differ.sum() <= 12 * len(with_names.needles)


def test_haystacks_refuse():
    with pytest.raises(ValueError, match="documents"):
        haystacks(ByteTokenizer(), [Document("a", "no end")], context=600)
    with pytest.raises(ValueError, match="context"):
        haystacks(ByteTokenizer(), DOCUMENTS, context=30)


def test_recall_sums(tmp_path):
    config, weights = write_checkpoint(tmp_path)
    tokens = [0, *b"def abcd\nabcd\nxyz abcd"]
    needles = (Needle(11, 14, 3, 0, 9), Needle(20, 23, 5, 2, 18))
    text = Haystack(np.array(tokens), needles)
    log_p = {}
    for t in (*range(11, 14), *range(20, 23)):
        logits = reference_logits(config, weights, tokens[:t])[-1]
        log_p[t] = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    bits = -sum(p[tokens[t]] for t, p in log_p.items()) / np.log(2)
    model = Model.load(tmp_path)
    done = []
    found = [
        recall(model, [text], {"a": CacheChoice()}, chunk=n, progress=lambda *x: done.append(x))[0]
        for n in (256, 4)
    ]
    for one in found:
        assert (one.label, one.num_needles) == ("a", 2)
        assert one.bits_per_byte == pytest.approx(bits / 8, abs=1e-5)
        assert one.copied == np.mean([p.argmax() == tokens[t] for t, p in log_p.items()])
        assert np.isnan(one.by_distance[1])
        assert np.isnan(one.by_distance[3])
    assert done[-1] == (23, 23)
    # What the model finds most probable is copied, whatever it is.
    wanted = [int(log_p[11].argmax()), *tokens[12:14]]
    likely = Haystack(np.array([*tokens[:11], *wanted]), needles[:1])
    (one,) = recall(model, [likely], {"a": CacheChoice()})
    assert one.copied >= 1 / 3


@pytest.mark.slow
def test_a_cache_that_has_lost_the_names_copies_none():
    """The bundled model copies names over an exact cache and over int8, and guesses over one without them."""
    model, documents = Model.load(), held_out().documents
    documents = documents or DOCUMENTS
    texts, others = (
        haystacks(model.tokenizer, documents, context=1000, num_texts=1, num_needles=4, defined=x)
        for x in (True, False)
    )
    labels = ("fp32", "int8", "last64")  # names are about 100 tokens away, and more
    assert min(needle.distance for needle in texts[0].needles) > 64
    with blas_threads_for(model.weights):
        fp32, int8, lost = recall(model, texts, {x: parse_cache(x) for x in labels})
        (none,) = recall(model, others, {"none": CacheChoice()})
    assert fp32.copied > 0.7
    assert int8.copied > 0.7
    assert max(lost.copied, none.copied) < 0.25
    assert max(fp32.bits_per_byte, int8.bits_per_byte) < 2.5
    assert min(lost.bits_per_byte, none.bits_per_byte) > 5
