"""A child process that plays episodes: it may die of them, or hang, and its parent can tell of what."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import struct
import sys
import traceback

__all__ = ["PROGRESS", "main", "read_progress"]

#: Bytes of the file in which a worker says what it is doing: the number of the call, and what it is.
PROGRESS = 1 << 12


def read_progress(path: str) -> tuple[int, str]:
    """Number and text of the call that a worker has begun last."""
    with open(path, "rb") as stream:
        data = stream.read()
    number, length = struct.unpack_from("qq", data)
    return number, data[16 : 16 + length].decode(errors="replace")


def main(path: str, only: str) -> None:
    """Play episodes as they are asked for, a line on the standard input each: seed, first episode, how many.

    A line in JSON comes back for each line.
    """
    faulthandler.enable()
    from fuzz import episodes, memory, play, table

    memory.install()
    if only:
        wanted = only.split(",")
        table.SCENES[:] = [scene for scene in table.SCENES if scene[1].__name__ in wanted]
    with open(path, "r+b") as stream:
        progress = mmap.mmap(stream.fileno(), PROGRESS)

    def tell(name: str, words: list[str]) -> None:
        text = f"{name}: {'; '.join(words) or 'valid'}".encode()[: PROGRESS - 16]
        struct.pack_into("q", progress, 8, len(text))
        progress[16 : 16 + len(text)] = text

    play.on_call(tell)
    print("ready", flush=True)
    for line in sys.stdin:
        seed, first, many = map(int, line.split())
        count = episodes.Count()
        for number in range(first, first + many):
            try:
                for call in episodes.episode(seed, number, count, number * episodes.CALLS):
                    struct.pack_into("q", progress, 0, call)
            except Exception:  # of the fuzzer itself
                call, text = read_progress(path)
                detail = f"{text} -> {traceback.format_exc()[-1500:]}"
                count.defects.append(
                    (call, play.Defect("error of the fuzzer", text.split(":")[0], detail))
                )
        told = {
            "accepted": count.accepted,
            "refused": dict(count.refused),
            "defects": [(call, *defect) for call, defect in count.defects],
        }
        print(json.dumps(told), flush=True)
    # NumPy's arrays must not outlive the allocator, which Python would clear away first.
    os._exit(0)
