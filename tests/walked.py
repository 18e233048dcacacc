"""Run the rows of a table in one test: for rows so fast that a test for each would cost more."""

import functools
import inspect


def each(names, rows):
    """Act as ``pytest.mark.parametrize``, but in one test: fixtures are made once, and an error names its row."""
    names = [name.strip() for name in names.split(",")]
    rows = [row if len(names) > 1 else (row,) for row in rows]
    assert rows

    def mark(test):
        @functools.wraps(test)
        def walk(**given):
            for row in rows:
                try:
                    test(**given, **dict(zip(names, row, strict=True)))
                except BaseException as error:
                    error.add_note(
                        ", ".join(f"{name} = {x!r}" for name, x in zip(names, row, strict=True))
                    )
                    raise

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in names]
        walk.__signature__ = signature.replace(parameters=left)
        del walk.__wrapped__  # pytest would ask it for its arguments
        return walk

    return mark
