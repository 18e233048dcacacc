"""Functions that run at once, in threads that take turns often."""

import sys
import threading

from processes import PATIENCE


def in_threads(*functions):
    """Run functions at once; raises the first error of any."""
    errors, ready = [], threading.Barrier(len(functions))

    def run(function):
        try:
            ready.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]
