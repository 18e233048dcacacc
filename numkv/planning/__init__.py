"""The memory that a model's cache needs, computed from its ``config.json`` alone.

`needs_of` supports every decoder of transformers 5: rows of each layer, windows and chunks, latents, layers that share
another's rows, states, cross attention. Its remarks name entries that it does not know.
"""

from numkv.planning.description import LayerNeeds, ModelNeeds, Rows, State
from numkv.planning.keys import ConfigError
from numkv.planning.needs import needs_of

__all__ = ["ConfigError", "LayerNeeds", "ModelNeeds", "Rows", "State", "needs_of"]
