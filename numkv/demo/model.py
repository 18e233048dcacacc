"""A model: what does not change from text to text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from numkv.demo import BUNDLED_MODEL
from numkv.demo.batch import Batch, Session
from numkv.demo.cache import CacheChoice, CacheFactory
from numkv.demo.checkpoint import Progress, Weights, load_weights
from numkv.demo.config import ModelConfig
from numkv.demo.network import Network
from numkv.demo.tokenizer import Tokenizer, load_tokenizer


class Model:
    """A decoder: configuration, weights and tokenizer.

    Parameters
    ----------
    config : ModelConfig
        Sizes and constants.
    weights : Weights
        Everything that was learned.
    tokenizer : Tokenizer
        Text to tokens and back.
    """

    def __init__(self, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> None:
        self.config = config
        self.weights = weights
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path = BUNDLED_MODEL, progress: Progress | None = None) -> Model:
        """Load a checkpoint.

        Parameters
        ----------
        directory : pathlib.Path
            Folder with ``config.json`` and the weights; the bundled model by default.
        progress : callable, optional
            Called with the number of tensors read and their total.

        Returns
        -------
        Model

        Raises
        ------
        FileNotFoundError
            If a file is missing.
        CheckpointError
            If the files do not fit together.
        NotSupported
            If the architecture is not computed here.
        """
        config = ModelConfig.read(directory)
        tokenizer = load_tokenizer(directory, config)
        return cls(config, load_weights(directory, config, progress), tokenizer)

    def batch(
        self, capacities: Sequence[int], cache: CacheFactory | None = None, target: str = "cpu"
    ) -> Batch:
        """Make room for texts.

        Parameters
        ----------
        capacities : sequence of int
            Tokens that each text may have.
        cache : callable, optional
            Makes the cache, such as a `CacheChoice`, which needs a `block_size` for several texts;
            an fp32 cache on `target` by default.
        target : str
            Where the cache lives.

        Returns
        -------
        Batch
        """
        make = cache or CacheChoice("fp32", target=target)
        network = Network(self.config, self.weights, max(capacities), target)
        return Batch(network, make(self.config, capacities))

    def start(
        self, capacity: int | None = None, cache: CacheFactory | None = None, target: str = "cpu"
    ) -> Session:
        """Start a text by itself.

        Parameters
        ----------
        capacity : int, optional
            Tokens the cache has room for; the model's context by default.
        cache : callable, optional
            Makes the cache; an fp32 cache on `target` by default.
        target : str
            Where the cache lives.

        Returns
        -------
        Session
        """
        size = self.config.max_context if capacity is None else capacity
        return self.batch([size], cache, target).start()

    def warm_up(self, cache: CacheFactory | None = None, target: str = "cpu") -> None:
        """Load or compile the kernels that texts in such a cache need.

        Parameters
        ----------
        cache : callable, optional
            Makes the cache; an fp32 cache on `target` by default.
        target : str
            Where the cache lives.
        """
        session = self.start(3, cache, target)
        session.forward([0, 0])
        session.step(0)
