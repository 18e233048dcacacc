"""One text of a `ContinuousBatch`: its tokens, the choice of the next one, and the conditions of its end."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList, StoppingCriteriaList

from numkv.errors import DimensionMismatch, NotSupported
from numkv.numbers import check_size
from numkv.transformers.internals import generation_settings, logits_processors, stopping_criteria

_MODES = {"greedy_search", "sample"}
# Default number of new tokens if neither the call nor the model sets it, as in `generate`.
_NEW_TOKENS = 20


class BatchEvent(NamedTuple):
    """A new token of a request, or its end."""

    request: BatchRequest
    token: int | None
    """The token; None if a request ended without one, by failure or cancellation."""
    done: bool
    """Whether the request has ended."""


class BatchRequest:
    """A text that a `ContinuousBatch` continues; `ContinuousBatch.submit` makes it.

    Attributes
    ----------
    number : int
        Number among its batch's requests, from 0 on.
    prompt_len : int
        Tokens of the prompt.
    cached_len : int
        Tokens of the prompt that were reused when it first began.
    finish_reason : str or None
        ``"stop"`` at an end token, a stop string or a criterion, ``"length"``, ``"cancelled"``, ``"error"``; None
        before it has ended.
    error : Exception or None
        The error of a failed request.
    """

    def __init__(
        self, advance: Callable[[], object], advance_in_loop: Callable[[], Awaitable[object]], number: int,
        model: Any, ids: NDArray[np.int64], config: Any, options: dict[str, Any], more: dict[str, Any],
    ) -> None:  # fmt: skip
        settings, others = generation_settings(model, config, options)
        if others:
            raise TypeError(
                f"submit: expected options of a transformers.GenerationConfig, got {', '.join(map(repr, others))}"
            )
        self.number, self.prompt_len, self.cached_len = number, len(ids), 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self._advance, self._advance_in_loop = advance, advance_in_loop
        self._prompt = ids
        self._ids: list[int] = ids.tolist()
        #: All ids in one tensor, with room for new ones, as long lists take long to convert; None before the first.
        self._row: Any = None
        self._most = _new_tokens(settings, len(ids))
        settings.max_new_tokens, settings.max_length = self._most, len(ids) + self._most
        _refuse_modes(settings)
        row = torch.from_numpy(ids)[None]
        self._processors = logits_processors(
            model, settings, row, more["logits_processor"] or LogitsProcessorList()
        )
        criteria = stopping_criteria(
            model, settings, more["stopping_criteria"] or StoppingCriteriaList(), more["tokenizer"]
        )
        # `ended_by` counts tokens itself, to distinguish the reasons.
        self._criteria = [x for x in criteria if type(x).__name__ != "MaxLengthCriteria"]
        self._generator = None
        if settings.do_sample:
            self._generator = torch.Generator()
            seed = more["seed"]
            if seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(check_size("seed", seed, 0, 2**63 - 1))
        elif more["seed"] is not None:
            raise TypeError(
                "`seed`: expected None without do_sample=True, which chooses the most probable token"
            )

    def __repr__(self) -> str:
        state = self.finish_reason or "unfinished"
        made = len(self._ids) - self.prompt_len
        return (
            f"BatchRequest({self.number}, prompt_len={self.prompt_len}, new_tokens={made}, {state})"
        )

    @property
    def done(self) -> bool:
        """Return whether the request has ended."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        """Return the new token ids so far."""
        return self._ids[self.prompt_len :]

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of the whole text, prompt included."""
        return self.prompt_len + self._most

    def result(self) -> list[int]:
        """Run the batch until this request has ended.

        Returns
        -------
        list of int
            All new token ids, or those before it was cancelled.

        Raises
        ------
        Exception
            The error of a failed request.
        """
        return list(self)

    def __iter__(self) -> Iterator[int]:
        """Yield new token ids as they are made; runs the batch."""
        for place in itertools.count(self.prompt_len):
            # In this order, because another thread adds the last token before the end.
            while not self.done and place == len(self._ids):
                self._advance()
            if place == len(self._ids):
                break
            yield self._ids[place]
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yield new token ids as they are made; passes are shared with other tasks of the event loop."""
        for place in itertools.count(self.prompt_len):
            while not self.done and place == len(self._ids):
                await self._advance_in_loop()
            if place == len(self._ids):
                break
            yield self._ids[place]
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """End the request; any thread may call this. The next pass releases its blocks."""
        if not self.done:
            self.finish_reason = "cancelled"

    # -- for the batch

    def ids(self) -> list[int]:
        """Return the request's own list of all ids: the prompt's and new ones."""
        return self._ids

    def shared_len(self, other: BatchRequest) -> int:
        """Return the length of the common prefix of both prompts."""
        most = min(self.prompt_len, other.prompt_len)
        differ = self._prompt[:most] != other._prompt[:most]
        return int(differ.argmax()) if differ.any() else most

    def choose(self, logits: Any) -> int:
        """Choose the next token from logits ``(vocabulary,)``, as `generate` does."""
        if self._row is None:
            self._row = torch.empty((1, self.most_tokens), dtype=torch.int64)
            self._row[0, : len(self._ids)] = torch.tensor(self._ids)
        row = self._row[:, : len(self._ids)]
        scores = self._processors(row, logits[None].clone())
        if self._generator is None:
            return int(scores[0].argmax())
        probabilities = torch.softmax(scores[0], -1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def ended_by(self, token: int) -> str | None:
        """Return the reason why a next token would be the last one, or None."""
        self._row[0, len(self._ids)] = token
        row = self._row[:, : len(self._ids) + 1]
        if any(bool(x(row, None).all()) for x in self._criteria):
            return "stop"
        return "length" if row.shape[1] >= self.most_tokens else None

    def generator_state(self) -> Any:
        """Return the state of its random generator, for `set_generator_state`."""
        return None if self._generator is None else self._generator.get_state()

    def set_generator_state(self, state: Any) -> None:
        """Restore a state, after a pass failed that had chosen tokens."""
        if self._generator is not None:
            self._generator.set_state(state)


def prompt_of(given: Any, vocabulary: int) -> NDArray[np.int64]:
    """Check a prompt: one row of valid token ids.

    Parameters
    ----------
    given : tensor, array or sequence of int
        The ids.
    vocabulary : int
        Number of ids of the model.
    """
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().numpy()
    ids = np.asarray(given)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise DimensionMismatch(
            f"`input_ids`: expected the token ids of one text, got shape {ids.shape}; submit each text separately",
            actual=ids.shape,
        )
    if not len(ids):
        raise DimensionMismatch("`input_ids`: expected at least one token id, got none")
    if ids.dtype.kind not in "iu":
        raise TypeError(
            f"`input_ids`: expected integers, got {ids.dtype}; pass a tokenizer's input_ids"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(
            f"`input_ids`: expected ids from 0 to {vocabulary - 1}, got {ids.min()} to {ids.max()}; use this model's "
            "tokenizer"
        )
    return ids.astype(np.int64)


def _new_tokens(settings: Any, prompt_len: int) -> int:
    """Return the most new tokens."""
    most = settings.max_new_tokens
    if most is None:
        most = _NEW_TOKENS if settings.max_length is None else settings.max_length - prompt_len
    most = int(most)
    if most < 1:
        raise DimensionMismatch(
            f"`max_new_tokens`: expected at least 1, got {most} after a prompt of {prompt_len} tokens",
            actual=most,
        )
    return most


def _refuse_modes(settings: Any) -> None:
    """Reject modes that need more than one row of logits for each token."""
    mode = getattr(settings.get_generation_mode(), "value", None)
    if mode not in _MODES or (settings.num_return_sequences or 1) > 1:
        raise NotSupported(
            f"submit: expected greedy search or sampling of one text, got {mode} of {settings.num_return_sequences}; "
            "submit several requests, or call model.generate"
        )
    if settings.guidance_scale not in (None, 1):
        raise NotSupported(
            f"submit: expected no guidance_scale, which runs the model twice, got {settings.guidance_scale}"
        )
