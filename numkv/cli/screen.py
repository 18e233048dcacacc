"""Shows texts while they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numkv.demo.tokenizer import Tokenizer

#: Control characters would move the cursor or worse; the text shows a sign in their place.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127) if code not in (9, 10)}
_MAX_PROMPT_LINES = 20


@dataclass(frozen=True)
class Text:
    """A text to continue.

    Attributes
    ----------
    name : str
        What to call it: the path of its file.
    content : str
        The text.
    """

    name: str
    content: str


def show(text: str) -> None:
    """Print text at once, whatever characters are in it.

    Parameters
    ----------
    text : str
        The text.
    """
    print(text.translate(_CONTROLS), end="", flush=True)


class Screen:
    """Prints texts one below the other, though all of them grow at the same time.

    One text is seen growing, what is new in later ones waits until it has ended. Several texts have
    a line with their names, as in ``head`` and ``tail``.

    Parameters
    ----------
    tokenizer : Tokenizer
        Turns tokens into text.
    texts : sequence of Text
        The texts as they are before they grow.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[Text]) -> None:
        self._texts = texts
        self._streams = [tokenizer.stream() for _ in texts]
        self._waiting = ["" for _ in texts]
        self._ended = [False for _ in texts]
        self._current = 0
        self._begin()

    def show(self, text: int, token: int | None) -> None:
        """Show a token, at once or when it is the text's turn.

        Parameters
        ----------
        text : int
            Which text.
        token : int or None
            Its next token; None for its end.
        """
        stream = self._streams[text]
        self._ended[text] = token is None
        self._waiting[text] += stream.finish() + "\n\n" if token is None else stream.push(token)
        while text == self._current < len(self._texts):
            show(self._waiting[text])
            self._waiting[text] = ""
            if not self._ended[text]:
                return
            self._current = text = text + 1
            self._begin()

    def _begin(self) -> None:
        """Show the prompt of the current text, or its end if it is long."""
        if self._current == len(self._texts):
            return
        text = self._texts[self._current]
        if len(self._texts) > 1:
            show(f"==> {text.name} <==\n")
        lines = text.content.splitlines(keepends=True)
        hidden = len(lines) - max(_MAX_PROMPT_LINES // len(self._texts), 3)
        if hidden > 0:
            show(f"[… {hidden:,} lines]\n")
        show("".join(lines[max(hidden, 0) :]))
