"""Let the CPU build of vLLM take the interpreter of Triton: runs at the start of processes (tests/model_runner.py)."""

from triton.backends import Backend, backends
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaDriver

# vLLM asks for a backend of this name, and then for no more of it: the interpreter compiles nothing.
backends["cpu"] = Backend(CUDABackend, CudaDriver)
