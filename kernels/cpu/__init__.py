"""The CPU backend: a C++ core that runs a whole step of a fused program in one call. Needs no torch.

    core/               the core: no Python, no exceptions, no threads, no files of its own
      forms.h           packed weights, quantised activations, pages, and the table of kernels
      program, step     what is run, and running it
      lanes_*, products_*, isa_*   one per instruction set; all give the same bits
    module/             threads, choice of the instruction set, and the thin binding
    check/              the core's checks as a program of its own, for targets that this machine only emulates
    build.py            compiles it on demand

`KVMESH_CPU_ISA` forces an instruction set ("portable", "avx2", "neon").
"""

from kernels.cpu.interface import Core, CoreEngine, View
from kernels.cpu.loading import load, revision

__all__ = ["Core", "CoreEngine", "View", "load", "revision"]
