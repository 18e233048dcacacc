"""A machine with a GPU, as far as there is one: processes have the stub driver, or the interpreter of PTX on it.

The interpreter is for those that run kernels alone: it keeps PTX on disk where others keep machine code.
"""

import os
import sys

if os.environ.get("DAY_DRIVER") == "interpreter" and "tools.gpu_day.steps" in sys.orig_argv:
    from tools.cuda import ptx_device

    ptx_device.start()
else:
    from tools.cuda import stub_driver

    stub_driver.load()
