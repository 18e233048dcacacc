"""One call: what is passed, what may come of it, and what must not.

Every object has a twin, made by the same calls. A call is made on the object with arguments of every sort. If it is
refused, nothing may have changed, and the error has to say which argument is wrong. If it is accepted, the same call is
made on the twin with plain arguments, the same numbers as contiguous arrays: results and everything that the two hold
must be the same, bit by bit.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fuzz.hostile import OMIT, REFUSED, SAME, VARIANTS, CallersOwn, Hostile, plain_array
from fuzz.state import digest, same
from fuzz.surface import options_of
from numkv.errors import NumkvError

__all__ = ["Arg", "Defect", "Draw", "Outcome", "Pair", "Row", "Scene", "play"]


class Pair(NamedTuple):
    """A value that differs between an object and its twin: something that each of them made."""

    a: Any
    b: Any


class Arg(NamedTuple):
    """An argument: its family, and how a valid one is made.

    Attributes
    ----------
    family : str
        A key of `VARIANTS`.
    make : function
        ``make(draw)`` gives a value, or a `Pair`, or `OMIT`.
    always : bool
        Whether it is passed in every call, though it has a default.
    """

    family: str
    make: Callable[[Draw], Any]
    always: bool = False


class Row(NamedTuple):
    """A callable of the table.

    Attributes
    ----------
    name : str
        As a user writes it, without ``numkv.``.
    args : dict of str to Arg
        Every argument of its signature.
    on : str
        What it is called on: a key of the scene's objects, or "" for a function or a class.
    after : function, optional
        ``after(scene, draw, result, twin's result)`` when it was accepted.
    weight : float
        How often it is called, in relation to others.
    """

    name: str
    args: dict[str, Arg]
    on: str = ""
    after: Callable[..., None] | None = None
    weight: float = 1.0
    call: Callable[..., Any] | None = None


class Scene:
    """Objects and their twins, and the sizes that valid arguments have.

    Attributes
    ----------
    objects : dict of str to Pair
        What rows are called on.
    finite : bool
        Whether all that was put in was finite and of moderate size.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.objects: dict[str, Pair] = {}
        self.finite = True

    def own_arrays(self) -> list[np.ndarray]:
        """Buffers of the object, to be passed to it as arguments."""
        return []

    def held(self, side: int) -> list[Any]:
        """All that may not change when a call is refused."""
        return [pair[side] for pair in self.objects.values()]

    def check(self, side: int) -> None:
        """Have the objects prove their books."""
        for pair in self.objects.values():
            prove = getattr(pair[side], "check", None)
            if prove is not None:
                prove()


_BANK = np.random.default_rng(15).standard_normal(1 << 14).astype(np.float32)


class Draw:
    """Random values for the arguments of one call.

    Attributes
    ----------
    scene : Scene
        Whose call it is.
    given : dict
        Valid arguments so far, by name.
    """

    def __init__(self, scene: Any, rng: random.Random) -> None:
        self.scene, self.rng = scene, rng
        self.choice, self.randrange, self.random = rng.choice, rng.randrange, rng.random
        self.given: dict[str, Any] = {}
        self.has_default = False
        self.n = 0

    def floats(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Normal numbers."""
        size = 1
        for n in shape:
            size *= n
        at = self.rng.randrange(max(1, len(_BANK) - size))
        return np.resize(_BANK[at : at + size], shape).astype(dtype)

    def arrays(self) -> list[np.ndarray]:
        """Arrays among the other arguments."""
        return [x for x in self.given.values() if type(x) is np.ndarray]

    def replace(self, old: np.ndarray, new: np.ndarray) -> bool:
        """Pass another array, of the same content, as another argument."""
        for name, x in self.given.items():
            if x is old:
                self.given[name] = new
                return True
        return False

    def own_arrays(self) -> list[np.ndarray]:
        """Buffers of the object itself."""
        return self.scene.own_arrays()


class Defect(NamedTuple):
    """A call that did what it must not."""

    kind: str
    name: str
    detail: str


class Outcome(NamedTuple):
    """What came of a call."""

    accepted: bool
    error: str
    defect: Defect | None


class Signatures:
    """Defaults and names of arguments, looked up once."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, bool]] = {}

    def defaults(self, row: Row, function: Any) -> dict[str, bool]:
        """Which arguments have a default."""
        known = self._known.get(row.name)
        if known is None:
            try:
                parameters = inspect.signature(function).parameters
            except (TypeError, ValueError):
                parameters = {}
            known = {n: p.default is not p.empty for n, p in parameters.items()}
            if "options" in known:
                known |= dict.fromkeys(options_of(function), True)
            self._known[row.name] = known
        return known


SIGNATURES = Signatures()
_QUOTED = re.compile(r"`([^`]+)`")
#: How often an argument that has a default is left out.
LEFT_OUT = 0.6


def arguments(
    row: Row, scene: Any, rng: random.Random, function: Any, hostile: dict[str, int | None]
) -> tuple[dict[str, Any], dict[str, Any], list[str], bool, bool, Draw]:
    """Draw the arguments of a call, some of them hostile.

    Parameters
    ----------
    hostile : dict
        Arguments to be hostile, with the number of the variant, or None for any of the family.

    Returns
    -------
    tuple
        Arguments, the twin's, what is hostile in words, whether the call must be refused, whether results are finite,
        and the draw.
    """
    d = Draw(scene, rng)
    defaults = SIGNATURES.defaults(row, function)
    order = list(row.args)
    for name in order:
        arg = row.args[name]
        if (
            defaults.get(name)
            and not arg.always
            and name not in hostile
            and rng.random() < LEFT_OUT
        ):
            continue
        value = arg.make(d)
        if value is not OMIT:
            d.given[name] = value
    chosen: dict[str, Hostile] = {}
    words = []
    for name, number in hostile.items():
        family = row.args[name].family
        variants = VARIANTS[family]
        if not variants:
            continue
        variant = variants[rng.randrange(len(variants)) if number is None else number]
        valid = d.given.get(name)
        if isinstance(valid, Pair):
            valid = valid.a
        if valid is None and family in ("floats", "output", "integers", "scale"):
            if variant.__name__ not in ("none", "_no_array", "_liar", "_no_number"):
                continue
        if not isinstance(valid, np.ndarray) and family in (
            "floats",
            "output",
            "integers",
            "scale",
        ):
            if valid is not None:
                valid = np.asarray(valid)
        d.has_default = defaults.get(name, False)
        made = variant(valid, d)
        if made is not None:
            chosen[name] = made
            words.append(f"{name}:{variant.__name__.strip('_')}={_brief(made.value)}")
    ours = {n: v.a if isinstance(v, Pair) else v for n, v in d.given.items()}
    theirs: dict[str, Any] = {}
    for name, value in d.given.items():
        value = value.b if isinstance(value, Pair) else value
        theirs[name] = plain_array(value) if isinstance(value, np.ndarray) else value
    must_refuse, finite = False, True
    for name, made in chosen.items():
        ours[name] = made.value
        finite &= made.finite
        if made.plain is REFUSED:
            # With another mode of rotation, tables may have no say.
            must_refuse |= name == "qk_mode" or "qk_mode" not in chosen
        elif made.plain is OMIT:
            theirs.pop(name, None)
        elif made.plain is SAME:
            value = made.value
            theirs[name] = plain_array(value) if type(value) is np.ndarray else value
        else:
            theirs[name] = made.plain
    return ours, theirs, words, must_refuse, finite, d


def _brief(x: Any) -> str:
    """A value in few words."""
    try:
        if isinstance(x, np.ndarray):
            return f"{type(x).__name__} {x.dtype}{list(x.shape)} strides {list(x.strides)}"
        text = repr(x)
    except Exception as error:
        text = type(error).__name__
    return text if len(text) < 60 else text[:57] + "..."


def refusal_is_named(error: BaseException, row: Row, hostile: bool) -> bool:
    """Whether an error is one that a user can do something about."""
    if isinstance(error, (NumkvError, IndexError, CallersOwn)):
        return True
    if isinstance(error, (ValueError, TypeError)):
        names = {*row.args, row.name.rpartition(".")[2]}  # a property that is set is named itself
        return any(re.split(r"[.\[( ]", name)[0] in names for name in _QUOTED.findall(str(error)))
    # Where there is no memory for a size that somebody asked for, that is what Python says.
    return isinstance(error, MemoryError) and hostile


def all_finite(x: Any) -> bool:
    """Whether no number among results is NaN."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "fV" or not np.isnan(x.astype(np.float32)).any()
    if isinstance(x, (tuple, list)):
        return all(map(all_finite, x))
    if isinstance(x, dict):
        return all(map(all_finite, x.values()))
    return True


def play(
    row: Row,
    scene: Any,
    function: Callable[[int], Any],
    rng: random.Random,
    hostile: dict[str, int | None],
) -> tuple[Outcome, list[str]]:
    """Make a call, and its twin's.

    Parameters
    ----------
    function : function
        ``function(side)`` is what is called: for the object with 0, for its twin with 1.
    """
    target = function(0)
    tell(row.name, ["its arguments are drawn"])
    ours, theirs, words, must_refuse, finite, d = arguments(row, scene, rng, target, hostile)
    tell(row.name, words)
    arrays = [x for x in ours.values() if isinstance(x, np.ndarray)]
    arrays += [x.base for x in arrays if isinstance(x.base, np.ndarray)]
    held = scene.held(0)
    before = digest(held, arrays)
    words = words or ["valid"]
    try:
        result = row.call(target, ours) if row.call else target(**ours)
    except BaseException as error:
        return refused(row, error, before, held, arrays, words, bool(hostile)), words
    if must_refuse:
        return _defect("accepted what nobody may accept", row, words, ""), words
    scene.finite &= finite
    other = function(1)
    try:
        twin = row.call(other, theirs) if row.call else other(**theirs)
    except BaseException as error:
        return _defect("accepted, but not as plain arguments", row, words, _say(error)), words
    if not same(result, twin):
        return _defect("wrong result", row, words, _difference(result, twin)), words
    for name, arg in row.args.items():
        x, y = ours.get(name), theirs.get(name)
        if arg.family == "output" and isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            if not same(np.ascontiguousarray(x), y):
                return _defect("wrong output", row, words, name), words
    if scene.finite and finite and not all_finite(result):
        return _defect("NaN", row, words, ""), words
    if row.after is not None:
        row.after(scene, d, result, twin)
    if digest(scene.held(0)) != digest(scene.held(1)):
        return _defect("object and twin differ", row, words, ""), words
    try:
        scene.check(0)
    except BaseException as error:
        # Who has NaN stored unchecked has scales that are none.
        if scene.finite or "finite" not in str(error):
            return _defect("check fails", row, words, _say(error)), words
    return Outcome(True, "", None), words


def refused(
    row: Row,
    error: BaseException,
    before: int,
    held: list[Any],
    arrays: list[Any],
    words: list[str],
    hostile: bool,
) -> Outcome:
    """Judge a call that was refused."""
    if digest(held, arrays) != before:
        return _defect("state change after an error", row, words, _say(error))
    if not refusal_is_named(error, row, hostile):
        return _defect("unnamed exception", row, words, _say(error))
    return Outcome(False, type(error).__name__, None)


def _defect(kind: str, row: Row, words: list[str], detail: str) -> Outcome:
    return Outcome(False, "", Defect(kind, row.name, f"{'; '.join(words)} -> {detail}"[:400]))


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200].replace("\n", " ")


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype}{a.shape} for {b.dtype}{b.shape}"
        return f"{np.ravel(a)[:3]} for {np.ravel(b)[:3]}"
    return f"{_brief(a)} for {_brief(b)}"


#: LateReports of every call before it is made: a process that dies has said what it died of.
tell: Callable[[str, list[str]], None] = lambda name, words: None  # noqa: E731


def on_call(function: Callable[[str, list[str]], None]) -> None:
    """Have every call told to a function before it is made."""
    global tell
    tell = function
