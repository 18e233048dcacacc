"""Attention's kernels as they are made for a 64-bit ARM: ``python tests/neon.py FOLDER KIND…`` writes their assembly.

It runs in a process of its own, in which numkv sees an ARM machine. Numba still compiles for this machine; that code is
never run. Its LLVM, with the vectors and intrinsics that numkv chose, is compiled once more, for ARM. Functions of
Numba's runtime are left out, as they are already specific to this machine.
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
#: A CPU whose instructions every 64-bit ARM server since 2018 has.
CPU = "neoverse-n1"
#: ARM's instructions, and the functions called in their place while Numba compiles for this machine.
STAND_INS = {f"llvm.aarch64.neon.{name}.v16i8": f"stand_in_for_{name}" for name in ("tbl1", "tbl4")}


def start(folder, kinds):
    """Start the process."""
    environment = {
        **os.environ,
        # A CPU with instructions for half floats: for others, Numba's code would need functions that are not linked.
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
    # Otherwise LLVM would drop the functions as unused.
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
        kernel = steps_for("fp32", kind, kind, "float32", 0).kernel(steps[rows])
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
