"""The report: Markdown tables and a picture."""

import re
import textwrap
from dataclasses import dataclass, field
from statistics import median

from numkv.bench.rounds import MOST
from perf import bars
from perf.fairness import TOLERANCE
from perf.peers import CONTIGUOUS, OURS, PAGED
from perf.shapes import labelled


@dataclass
class Row:
    """One contestant of a line: what it took, or the reason why it does not run."""

    library: str
    form: str
    reason: str = ""
    seconds: float = 0.0
    share: float = 0.0  # of the probed bandwidth
    ratio: float | None = None  # its time / that of numkv, contiguous
    error: float = 0.0  # relative L2, against float64 on the unrounded rows
    bytes: int = 0
    flops: int = 0
    peer: str = ""  # the library's name on the command line

    @property
    def name(self):
        return f"{self.library} {self.form}".strip()


@dataclass
class Line:
    """What ran in one race: a shape's letter and a kind."""

    shape: str
    kind: str
    rows: list[Row]
    probes: list[float] = field(default_factory=list)  # bytes a second
    others: float | None = None  # the share of the cores that other processes used
    left_out: int = 0  # rounds in which that was too much
    noisy: bool = False  # whether such rounds count, as there were hardly others
    #: By bytes of a piece: the time that such pieces take in shuffled order / in order, by probe.
    pieces: dict[int, list[float]] = field(default_factory=dict)

    @property
    def ran(self):
        return [row for row in self.rows if not row.reason]

    @property
    def ours(self):
        """numkv's contiguous row, or None."""
        is_ours = lambda r: (r.library, r.form) == (OURS, CONTIGUOUS)  # noqa: E731
        return next(filter(is_ours, self.ran), None)

    @property
    def paged(self):
        """numkv's paged row, or None."""
        return next((r for r in self.ran if (r.library, r.form) == (OURS, PAGED)), None)

    @property
    def best_of_each(self):
        """The fastest form of each library, by its name."""
        best = {}
        for row in sorted(self.ran, key=lambda r: (r.ratio or 0, r.seconds)):
            best.setdefault(row.library, row)
        return best

    @property
    def best_peer(self):
        """The fastest of the others, or None."""
        peers = (row for name, row in self.best_of_each.items() if name != OURS)
        return next(peers, None)


def table(header, rows, right=()):
    """A Markdown table; the columns with the numbers `right` are aligned there."""
    rule = ["--:" if i in right else "---" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def number(x):
    """Two digits behind the point; small numbers as powers of ten, a dash for none."""
    if x is None:
        return "–"
    return f"{x:.2f}" if x >= 0.01 else f"{x:.1e}"


def _missing(lines, columns, place):
    """Rows for those that do not run, the same reason once: what ``place(line)`` names, contestant, reason."""
    found = {}
    for line in lines:
        for row in line.rows:
            if row.reason:
                found.setdefault((row.name, row.reason), []).append(place(line))
    for (name, reason), places in found.items():
        cells = [", ".join(places), name, f"does not run: {reason}"]
        yield cells + [""] * (columns - len(cells))


def decode_table(lines):
    """All contestants of one kind, by shape."""
    header = ["shape", "contestant", "µs", "MB", "GB/s", "share", "time / numkv", "error"]
    rows = [
        [
            labelled(line.shape),
            row.name,
            f"{row.seconds * 1e6:,.0f}",
            f"{row.bytes / 1e6:.1f}",
            f"{row.bytes / row.seconds / 1e9:.1f}",
            number(row.share),
            number(row.ratio),
            f"{row.error:.1e}",
        ]
        for line in lines
        for row in line.ran
    ]
    rows += _missing(lines, len(header), lambda line: line.shape)
    return table(header, rows, range(2, len(header)))


def prefill_table(lines):
    """All contestants, by kind."""
    header = ["kind", "contestant", "ms", "GFLOP/s", "time / numkv", "error"]
    rows = [
        [
            line.kind,
            row.name,
            f"{row.seconds * 1e3:.1f}",
            f"{row.flops / row.seconds / 1e9:.0f}",
            number(row.ratio),
            f"{row.error:.1e}",
        ]
        for line in lines
        for row in line.ran
    ]
    rows += _missing(lines, len(header), lambda line: line.kind)
    return table(header, rows, range(2, len(header)))


def summary_table(lines):
    """By shape and kind: numkv's share, and its speed-up over the fastest peer."""
    kinds = list(dict.fromkeys(line.kind for line in lines))
    by_place = {(line.shape, line.kind): line for line in lines}
    rows = []
    for shape in dict.fromkeys(line.shape for line in lines):
        cells = [labelled(shape)]
        for kind in kinds:
            line = by_place.get((shape, kind))
            ours, best = (line.ours, line.best_peer) if line else (None, None)
            cells.append(number(ours.share) if ours else "–")
            cells.append(f"{number(best.ratio)} ({best.library})" if ours and best else "–")
        rows.append(cells)
    header = ["shape", *(x for kind in kinds for x in (f"{kind}: share", "× best peer"))]
    return table(header, rows, range(1, len(header)))


def best_forms_table(lines):
    """By library and kind: the form that was the fastest, and on which shapes, with its time / that of numkv."""
    found = {}
    for line in lines:
        for library, row in line.best_of_each.items():
            if library != OURS and (row.form or row.ratio):
                forms = found.setdefault((library, line.kind), {})
                forms.setdefault(row.form or "its only form", []).append(
                    f"{line.shape} {number(row.ratio)}"
                )
    rows = [
        [library, kind, "; ".join(f"{form}: {', '.join(on)}" for form, on in forms.items())]
        for (library, kind), forms in sorted(found.items(), key=lambda x: x[0][0])
    ]
    return table(["library", "kind", "fastest form: shape and time / numkv"], rows)


def fairness_table(compared):
    """The race beside each library alone."""
    header = [
        "shape",
        "kind",
        "contestant",
        "µs in the race",
        "µs alone",
        "race / alone",
        "verdict",
        "cores used by others",
    ]
    rows = []
    for x in compared:
        times = [median(of.values()) if of else None for of in (x.in_race, x.alone)]
        cells = ["–" if t is None else f"{t * 1e6:,.0f}" for t in times]
        others = f"{x.others:.0%}"
        rows.append([labelled(x.shape), x.kind, x.name, *cells, number(x.ratio), x.verdict, others])
    return table(header, rows, (3, 4, 5, 7))


def probe_table(lines):
    """The probes around the rounds: median, lowest and highest. And what others used of the machine."""
    rows = []
    for line in lines:
        if not line.probes:
            continue  # nothing ran
        rates = [x / 1e9 for x in line.probes]
        cells = (median(rates), min(rates), max(rates))
        others = "–" if line.others is None else f"{line.others:.0%}"
        others += ", NOISY" if line.noisy else ""
        rounds = f"{len(rates)}" + (f" ({line.left_out} more left out)" if line.left_out else "")
        rows.append([labelled(line.shape), line.kind, *(f"{x:.1f}" for x in cells), rounds, others])
    header = [
        "shape",
        "kind",
        "GB/s, median",
        "lowest",
        "highest",
        "rounds",
        "cores used by others",
    ]
    return table(header, rows, range(2, 7))


def pieces_table(lines):
    """What shuffled blocks cost memory alone, by line and by what is read of a block at once, and what they cost."""
    rows = [
        [
            labelled(line.shape),
            line.kind,
            f"{what}, {size / 1024:g} KB",
            number(median(costs)),
            number(line.paged.ratio),
        ]
        for line in lines
        if line.ours and line.paged and line.probes
        for what, (size, costs) in zip(("a head", "all heads"), line.pieces.items(), strict=False)
    ]
    header = [
        "shape",
        "kind",
        "piece of a block",
        "memory alone: × in order",
        "paged: × contiguous",
    ]
    return table(header, rows, range(3, 5)) if rows else ""


def bars_table(found):
    """The verdict of each line that has bars; `found` are those of `perf.bars`."""
    header = ["line", "numkv", "share", "× best peer", "bars", "verdict"]
    rows = []
    for verdict in found:
        line, row = verdict.line, verdict.row
        best, speed = line.best_peer, bars.best_peer(line, row)
        cells = [
            number(None if row.reason else row.share),
            f"{number(speed)} ({best.library})" if speed else "–",
            "; ".join(str(bar) for bar, _ in verdict.found) or "–",
        ]
        form = row.form or "contiguous"
        noisy = ", NOISY" if line.noisy else ""
        rows.append([f"{line.shape}/{line.kind}", form, *cells, verdict.words + noisy])
    return table(header, rows, (2, 3))


def document(title, paragraphs, shapes, decode, prefill, compared=(), pictures=()):
    """The whole report; `paragraphs` say on what and how, `shapes` has the shapes by letter."""
    wrap = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False).fill

    def named(lines):
        letters = dict.fromkeys(line.shape for line in lines)
        return ", ".join(f"{labelled(x)} {shapes[x]}" for x in letters)

    parts = [f"# {title}", *map(wrap, paragraphs)]
    found = bars.verdicts([*decode, *prefill])
    if found:
        parts.append(f"**{bars.head_count(found)}** See the table below.")
    if any(not x.fair for x in compared):
        parts.append(
            "**The race was not fair to all, see the last section but one: do not quote it.**"
        )
    noisy = [x.others or 0 for x in (*decode, *prefill) if x.noisy]
    most = max([0, *noisy, *(x.others for x in compared)])
    if noisy or most > MOST:
        parts.append(
            f"**Other processes used up to {most:.0%} of the cores meanwhile: do not quote it.**"
        )
    if decode:
        parts += [
            "## Decode attention",
            wrap(
                f"Shapes are (batch, q heads, kv heads, head dim, context): {named(decode)}. Bytes are those of "
                "K and V in the contestant's own format, scales included; the share is of the read bandwidth probed "
                "before and after each round by passes straight through 256 MB; who asks for memory ahead of time can "
                "be a little faster than that. Shares and ratios are medians over rounds, times medians over calls. "
                "The error is the relative L2 error against float64 on the unrounded rows."
            ),
        ]
        parts += [
            f"![Share of the read bandwidth; speed-up over the best peer]({picture})"
            for picture in pictures
        ]
        parts.append(summary_table(decode))
        for kind in dict.fromkeys(line.kind for line in decode):
            parts += [f"### {kind}", decode_table([x for x in decode if x.kind == kind])]
    if prefill:
        parts += [
            "## Prefill attention",
            wrap(
                f"All tokens of a sequence at once, causal: {named(prefill)}. The products that "
                "causality leaves out do not count as GFLOP."
            ),
            prefill_table(prefill),
        ]
    if found:
        parts += [
            "## What numkv is to reach",
            wrap(
                f"{bars.head_count(found)} A line's share is of the bandwidth probed in the same rounds. With groups, "
                "floats at 0.9 of it and INT8 at 0.75 need not be faster than others; without groups, a line has to be "
                f"as fast only as a peer at {bars.AS_FAST_AS_CAN_BE:g}. The best peer is the fastest form of another "
                "library."
            ),
            "\n".join(f"- {x}" for x in bars.misses(found)) or "None is missed.",
            bars_table(found),
        ]
    pieces = pieces_table(decode)
    if pieces:
        parts += [
            "## What shuffled blocks cost memory alone",
            wrap(
                "Beside each probe of the read bandwidth, pieces as long as a block's K rows of one head, and of all "
                "heads, were read out of 256 MB in order and in shuffled order, 8 KB ahead. The table says how many "
                "times as long the shuffled order took."
            ),
            pieces,
        ]
    parts += ["## The fastest form of each library", best_forms_table(decode + prefill)]
    if compared:
        parts += [
            "## The race beside each library alone",
            wrap(
                "The fastest form of each library in a race as above, and alone in a fresh process while no other of "
                "the race was there, in turns; medians over rounds. It is fair if the two are within "
                f"{TOLERANCE:.0%} of each other."
            ),
            fairness_table(compared),
        ]
    parts += ["## Read bandwidth around the rounds, and other load", probe_table(decode + prefill)]
    return "\n\n".join(parts) + "\n"


def slug(text):
    """A text as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


#: More would not be readable.
SHAPES_IN_A_PICTURE = 7

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")


def draw_all(lines, path):
    """Pictures of at most `SHAPES_IN_A_PICTURE` shapes each, in `path` and beside it; their names."""
    shapes = list(dict.fromkeys(line.shape for line in lines))
    count = -(-len(shapes) // SHAPES_IN_A_PICTURE)
    size = -(-len(shapes) // count)
    names = []
    for n in range(count):
        some = shapes[n * size : (n + 1) * size]
        to = path if n == 0 else path.with_stem(f"{path.stem}-picture-{n + 1}")
        draw([line for line in lines if line.shape in some], to)
        names.append(to.name)
    return names


def draw(lines, path):
    """An SVG of bars by shape and kind: numkv's share of the read bandwidth, its speed-up over the best peer."""
    import matplotlib
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(line.shape for line in lines))
    kinds = list(dict.fromkeys(line.kind for line in lines))
    colours = {kind: _COLOURS[n % len(_COLOURS)] for n, kind in enumerate(kinds)}
    width = 0.8 / len(kinds)
    figure = Figure(figsize=(max(9, 1.7 * len(shapes)), 6), layout="constrained")
    shares, speeds = figure.subplots(2, 1)
    for kind, colour in colours.items():
        shares.bar(0, 0, color=colour, label=kind)
    shares.plot([], [], color="black", label="best peer")
    for line in lines:
        if line.ours is None:
            continue
        x = shapes.index(line.shape) + (kinds.index(line.kind) - (len(kinds) - 1) / 2) * width
        colour = colours[line.kind]
        shares.bar(x, line.ours.share, 0.9 * width, color=colour)
        best = line.best_peer
        if best is not None:
            ends = x - 0.45 * width, x + 0.45 * width
            shares.plot(ends, [best.share] * 2, color="black")
            speeds.bar(x, best.ratio, 0.9 * width, color=colour)
    shares.set_ylim(0, max(1, shares.get_ylim()[1]))
    shares.set_ylabel("share of the read bandwidth")
    speeds.axhline(1, color="black", linewidth=0.8)
    speeds.set_ylabel("times as fast as the best peer")
    speeds.set_xlabel("shape")
    for axes in (shares, speeds):
        axes.set_xticks(range(len(shapes)), [labelled(x).replace(", ", ",\n") for x in shapes])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=len(kinds) + 1, frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "numkv", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
