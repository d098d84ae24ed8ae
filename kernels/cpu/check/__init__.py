"""The core's own checks: `check.cpp`, free of Python, prints digests of what kernels make of fixed numbers.

targets.py      compiles it for this machine, for aarch64 and for WebAssembly, and runs it
"""
