"""Attention's kernels as they are made for a 64-bit ARM: ``python tests/neon.py FOLDER KIND…`` writes their assembly.

In a process of its own, which takes itself for such a machine before numkv looks. Numba still makes code for this one,
which is never run: its LLVM, in which vectors and intrinsics are what numkv asked for, goes through LLVM once more, for
ARM. What Numba's runtime itself brings is left out, as it has been fitted to this machine by then.
"""

import itertools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Query rows that are taken at once: at most as many as a vector has lanes.
ROWS = (1, 2, 4)
#: Every 64-bit ARM since 2018 in servers has what this one has.
CPU = "neoverse-n1"
#: Instructions of ARM by functions that are called in their place while Numba makes code for this machine, too.
STAND_INS = {f"llvm.aarch64.neon.{name}.v16i8": f"stand_in_for_{name}" for name in ("tbl1", "tbl4")}


def start(folder, kinds):
    """Start the process."""
    environment = {
        **os.environ,
        # A CPU that has instructions for half floats: without, what is never run would still need functions for them.
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), *kinds], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def for_arm(text):
    """A module's LLVM without what ties it to this machine."""
    text = re.sub(r"^target (triple|datalayout) = .*$", "", text, flags=re.M)
    text = re.sub(r'"target-(cpu|features)"="[^"]*"', "", text)
    runtime = r"^define [^\n]* @(NRT_incref|NRT_decref)\(.*?^\}"
    text = re.sub(runtime, r"declare void @\1(ptr)", text, flags=re.M | re.S)
    for name, stand_in in STAND_INS.items():
        text = text.replace(f"@{stand_in}(", f"@{name}(")
    # Or nothing would be left that is needed.
    return text.replace("define linkonce_odr ", "define ")


def main(folder, kinds):
    """Write ``KIND.ROWS.ll``, the LLVM of the whole module, and ``KIND.ROWS.s``."""
    platform.machine = lambda: "aarch64"
    import llvmlite.binding as llvm

    from numkv.kernels.cpu.attention import state
    from numkv.kernels.cpu.attention.steps import steps_for
    from numkv.kernels.cpu.vectors import features, stored

    for table in (stored._LOOKUPS, stored._OF_64):
        for key, name in table.items():
            table[key] = STAND_INS[name]
            llvm.add_symbol(STAND_INS[name], id(main))  # some address, as nobody calls it
    assert {"neon"} == features.FEATURES, features.FEATURES
    assert features.LANES == 4
    assert features.HAS_HALF
    assert features.HAS_FMA
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=CPU, opt=3)
    steps = dict(zip(ROWS, (state.OF_1, state.OF_2, state.OF_4), strict=True))
    for kind, rows in itertools.product(kinds, ROWS):
        kernel = steps_for(kind, kind, "float32", 0).kernel(steps[rows])
        (build,) = kernel.overloads.values()
        module = llvm.parse_assembly(for_arm(str(build.library._get_module_for_linking())))
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
        module.verify()
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
        passes.getModulePassManager().run(module, passes)
        (folder / f"{kind}.{rows}.ll").write_text(str(module))
        (folder / f"{kind}.{rows}.s").write_text(machine.emit_assembly(module))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
