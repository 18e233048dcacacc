"""The table of everything public: how it is called, and what sort of thing each argument is."""

from __future__ import annotations

from fuzz import rows_functions

__all__ = ["SCENES"]

#: Scenes with their weights; each has rows.
SCENES = [*rows_functions.SCENES]
