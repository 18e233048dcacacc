"""Text to tokens and back: bytes for a vocabulary of 256, else the ``tokenizer.json``."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from numkv.demo.checkpoint import CheckpointError, ModelConfig
from numkv.errors import NotSupported


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token.

    Parameters
    ----------
    bos_token : int or None
        First token of every text.
    """

    def __init__(self, bos_token: int | None = None) -> None:
        self._start = [] if bos_token is None else [bos_token]

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text` after the start token.

        Parameters
        ----------
        text : str
            Any text.

        Returns
        -------
        list of int
        """
        return self._start + list(text.encode())

    def stream(self) -> ByteStream:
        """Start to convert bytes to text.

        Returns
        -------
        ByteStream
        """
        return ByteStream()


class ByteStream:
    """Converts bytes to text one by one, and returns only whole characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the text that the byte `token` completes."""
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", final=True)


class JsonTokenizer:
    """The tokenizer of a checkpoint, run by the ``tokenizers`` library.

    Parameters
    ----------
    path : pathlib.Path
        A ``tokenizer.json``.

    Raises
    ------
    NotSupported
        If the ``tokenizers`` library is not installed.
    CheckpointError
        If the file is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise NotSupported(
                f"{path}: this tokenizer needs the 'tokenizers' library: pip install tokenizers"
            ) from None
        try:
            self._backend: Any = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer ({error})") from None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, with the special ones that the tokenizer adds.

        Parameters
        ----------
        text : str
            Any text.

        Returns
        -------
        list of int
        """
        return list(self._backend.encode(text).ids)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, added ones included."""
        return int(self._backend.get_vocab_size())

    def stream(self) -> JsonStream:
        """Start to convert tokens to text.

        Returns
        -------
        JsonStream
        """
        return JsonStream(self._backend)


class JsonStream:
    """Converts tokens of a `JsonTokenizer` to text one by one, and returns only whole characters.

    A token's text may depend on the token before it (a leading space) and end within a character. So a short window of
    tokens is decoded twice, without and with the new ones, and only a whole difference is returned.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._tokens: list[int] = []
        self._num_shown = 0

    def _pending(self) -> str:
        shown: str = self._decode(self._tokens[: self._num_shown])
        return self._decode(self._tokens)[len(shown) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=True)

    def push(self, token: int) -> str:
        """Return the text that `token` completes."""
        self._tokens.append(token)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self._tokens = self._tokens[self._num_shown :]
        self._num_shown = len(self._tokens)
        return text

    def finish(self) -> str:
        """Return the text of an incomplete character, else nothing."""
        text = self._pending()
        self._num_shown = len(self._tokens)
        return text


Tokenizer = ByteTokenizer | JsonTokenizer


def decoded(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Return the text of tokens."""
    stream = tokenizer.stream()
    return "".join(stream.push(int(token)) for token in tokens) + stream.finish()


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Parameters
    ----------
    directory : pathlib.Path
        Folder of the checkpoint.
    config : ModelConfig
        Its configuration.

    Returns
    -------
    Tokenizer
        A `JsonTokenizer` if there is a ``tokenizer.json``, else a `ByteTokenizer` for a vocabulary of 256.

    Raises
    ------
    CheckpointError
        If there is no ``tokenizer.json`` and the vocabulary is not bytes, or if the file has more
        tokens than the model.
    """
    path = directory / "tokenizer.json"
    if path.is_file():
        tokenizer = JsonTokenizer(path)
        if tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"{path}: {tokenizer.vocab_size} tokens, but the model knows {config.vocab_size}"
            )
        return tokenizer
    if config.vocab_size == 256:
        return ByteTokenizer(config.bos_token)
    raise CheckpointError(
        f"{directory}: no tokenizer.json, and a vocabulary of {config.vocab_size} is not bytes"
    )
