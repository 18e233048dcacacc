"""``python -m numkv``: see `numkv.cli`."""

from __future__ import annotations

import sys

from numkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
