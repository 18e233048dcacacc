"""A machine with a GPU, as far as there is one: processes have the stub driver, or the interpreter of PTX on it."""

import os

if os.environ.get("DAY_DRIVER") == "interpreter":
    from tools.cuda import ptx_device

    ptx_device.start()
else:
    from tools.cuda import stub_driver

    stub_driver.load()
