"""The mask function ``numkv``: instead of a mask, it returns a plan of the forward pass for all layers of a kind.

transformers calls it once for each kind of layer, and passes its result to every attention function. The plan describes
the mask: causal, a window or chunks, and padding. The rest depends on the cache, and is computed for the first layer.
Other masks are stored as transformers would make them, for attention without a cache.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from numkv.errors import NotSupported
from numkv.transformers.internals import causal_mask_function, sdpa_mask, seen_by
from numkv.transformers.metadata import BatchMetadata, Seen, Step


class Plan:
    """The argument of attention functions instead of a mask.

    It has the shape of a mask, and stays unchanged where transformers converts a finished mask.

    Attributes
    ----------
    seen : Seen or None
        Visibility of tokens; None for a mask that numkv's kernels do not support.
    columns, offset : int
        Columns of the pass, and earlier columns.
    whole : Plan
        The plan of all columns: itself, except in models whose last layers share rows and compute only the last
        columns.
    """

    __slots__ = ("_arguments", "_padding", "_steps", "columns", "offset", "seen", "whole")
    ndim = 4

    def __init__(self, seen: Seen | None, columns: int, offset: int, arguments: Any) -> None:
        self.seen = seen
        self.columns = columns
        self.offset = offset
        self.whole = self
        self._arguments = arguments
        self._padding: Any = None
        self._steps: dict[tuple[int, bool], tuple[BatchMetadata, Step]] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the mask."""
        return self._arguments["batch_size"], 1, self.columns, self._arguments["kv_length"]

    def step(self, layer: Any) -> Step:
        """Make room in a layer, and return the step of the pass, which layers of one history share.

        Parameters
        ----------
        layer : NumkvLayer
            The layer, whose buffers and metadata may be replaced.

        Raises
        ------
        NotSupported, DimensionMismatch
            If the mask is of another kind, or does not fit the cache's tokens.
        CacheFull
            If the cache's budget is too small; see `numkv.transformers.layers.Shared.make_room`.
        """
        keep = layer.record_past
        shared = layer.options.shared
        # In the first pass each layer makes its buffers in its turn, also where padding alone needs no blocks: a bound
        # on their bytes asks for each.
        in_turn = not self.offset and shared.max_nbytes is not None
        if in_turn or (id(layer.metadata), keep) not in self._steps:
            seen = self._checked(layer)
            if (config := self._arguments.get("config")) is not None:
                shared.check_model(config)
            shared.make_room(layer, self.offset, self._padding, self.columns)
            of = layer.metadata
            if (id(of), keep) not in self._steps:
                step = of.advance(self._padding, self.columns, seen, keep=keep)
                self._steps[id(of), keep] = of, step
        return self._steps[id(layer.metadata), keep][1]

    def _checked(self, layer: Any) -> Seen:
        """Return the visibility of tokens, after a check that the mask fits the layer, and no layer is ahead of it."""
        if self.seen is None:
            raise NotSupported(
                "NumkvCache: expected a causal mask, with a window, chunks, padding or blocks that see both ways, got "
                "one with a pattern of its own (packed sequences, or functions that a model adds); run this model "
                "or input with another cache and attention implementation"
            )
        most = max(x.get_seq_length() for x in layer.options.shared.layers)
        found = most if most > self.offset + self.columns else layer.get_seq_length()
        if found != self.offset:
            raise NotSupported(
                f"NumkvCache: expected a layer with {self.offset} tokens, as the mask is made for, got one with "
                f"{found}: another thread uses this cache, which only one thread at a time may, or a pass "
                "failed or skipped layers; then call reset() and start again"
            )
        padding = self._arguments["attention_mask"]
        if padding is not None and self._padding is None:
            self._padding = padding.to("cpu", torch.bool).numpy()
        return self.seen

    def tensor(self, *, explicit: bool = False) -> Any:
        """Return the mask for transformers' ``sdpa``; None if it needs none.

        Parameters
        ----------
        explicit : bool
            Whether to make one in any case.
        """
        arguments = self._arguments
        if explicit or self.whole is not self:
            arguments = arguments | {
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        mask = sdpa_mask(**arguments)
        return mask if self.whole is self else mask[:, :, -self.columns :]

    def contiguous(self) -> Plan:
        """Return itself: `generate` calls this for caches of a fixed size."""
        return self

    def __getitem__(self, index: Any) -> Plan:
        """Return the plan of the last columns, the only index that models use: ``[:, :, -n:, :]``."""
        each = slice(None)
        if not (isinstance(index, tuple) and len(index) == 4 and isinstance(index[2], slice)):
            self._refuse()
        *others, rows = (*index[:2], index[3], index[2])
        start = rows.start or 0
        if others != [each] * 3 or rows.stop is not None or rows.step is not None or start > 0:
            self._refuse()
        if start == 0 or -start >= self.columns:
            return self
        part = Plan(self.seen, -start, self.offset, self._arguments)
        part.whole = self.whole
        return part

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotSupported(
            "attention implementation 'numkv': expected a model that passes its mask to the attention function, got "
            "one that computes with it; choose another with model.set_attn_implementation"
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __invert__ = __len__ = __iter__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls._refuse(cls)  # type: ignore[arg-type]


def plan_of_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Any = None,
    local_size: int | None = None,
    **options: Any,
) -> Plan:
    """Make the plan of a forward pass: transformers' interface for masks, see `transformers.AttentionMaskInterface`.

    Parameters
    ----------
    batch_size, q_length, kv_length, q_offset, kv_offset : int
        Sizes, and numbers of earlier columns.
    mask_function : callable
        Returns whether a query sees a key.
    attention_mask : bool tensor (batch_size, columns) or Plan, optional
        Which columns are tokens; or a finished plan, from `generate` for caches of a fixed size, or from PaliGemma.
    local_size : int, optional
        The window or chunk.
    **options
        Options of transformers' own mask function.

    Returns
    -------
    Plan
    """
    if isinstance(attention_mask, Plan):
        return attention_mask
    arguments = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask,
        "local_size": local_size, **options,
    }  # fmt: skip
    return Plan(seen_by(mask_function), q_length, q_offset, arguments)
