"""What a model keeps of the tokens that it has seen, read from its ``config.json``; nothing else is needed.

`needs_of` reads it, for every decoder of transformers 5: rows of each layer, windows and chunks, latents, layers that
share another's rows, states, cross attention. What it does not understand, it names.
"""

from numkv.planning.description import LayerNeeds, ModelNeeds, Rows, State
from numkv.planning.keys import ConfigError
from numkv.planning.needs import needs_of

__all__ = ["ConfigError", "LayerNeeds", "ModelNeeds", "Rows", "State", "needs_of"]
