"""Builds the stub of CUDA for the torch of this interpreter: `python bench/cuda_stub/build.py FOLDER`.

FOLDER gets libcuda.so.1, which is preloaded (`run.sh`) and so replaces the functions of all CUDA libraries that torch
links. Needs gcc and nm.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda_stub.c")
LIBRARIES = ("libtorch_cuda.so", "libtorch_cpu.so", "libtorch_python.so", "libc10_cuda.so")
OF_CUDA = re.compile(r"(__)?(cuda|cublas|cudnn|cusparse|cusolver|cufft|cufile|cupti|nccl|nvrtc|cuFile)[A-Z]\w*$")
# cuSPARSELt is initialized at import and is not used here.
NOT_REPLACED = ("cusparseLt",)
# Of the driver, which torch and triton look up by name.
OF_DRIVER = (
    *("cuInit", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
    *("cuCtxSetLimit", "cuModuleUnload", "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuKernelGetAttribute"),
    *("cuDeviceGetUuid", "cuDeviceGetUuid_v2", "cuMemsetD32Async", "cuStreamWriteValue32", "cuTensorMapEncodeIm2col"),
    *("cuLinkCreate_v2", "cuLinkAddData_v2", "cuLinkComplete", "cuLinkDestroy"),
    *("cuLogsRegisterCallback", "cuLogsUnregisterCallback"),
    *("cuMemMap", "cuMemUnmap", "cuMemSetAccess", "nvmlInit_v2", "nvmlDeviceGetNvLinkRemoteDeviceType"),
    *("nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetComputeRunningProcesses"),
    *("nvmlSystemGetCudaDriverVersion_v2",),
)

# Of the compiler's package, which torch does not bring along: the qualifiers that the runtime's headers use.
HOST_DEFINES = """
#define __host__
#define __device__
#define __device_builtin__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDART_CB
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
"""


def undefined_symbols(library: Path) -> set[str]:
    """Without the version of the symbol, as in cudaMalloc@libcudart.so.13."""
    printed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in printed.stdout.splitlines()}


def stub_functions(torch: Path) -> str:
    """A function that returns 0 for each that torch links and the source does not define."""
    linked = set().union(*(undefined_symbols(torch / "lib" / name) for name in LIBRARIES))
    needed = {name for name in linked if OF_CUDA.match(name) and not name.startswith(NOT_REPLACED)}
    defined = set(re.findall(r"^EXPORT [^(]*?(\w+)\(", SOURCE.read_text(), re.MULTILINE))
    missing = sorted((needed | set(OF_DRIVER)) - defined)
    return "".join(f"EXPORT int {name}(void) {{ return 0; }}\n" for name in missing)


def headers_beside(torch: Path) -> Path:
    """Of the CUDA runtime that torch is built with: the sizes of structures differ between versions."""
    found = sorted(torch.parent.glob("nvidia/*/include/driver_types.h"))
    if not found:
        raise SystemExit(f"no headers of the CUDA runtime are installed beside {torch}")
    return found[0].parent


def build(folder: Path) -> Path:
    """The library in `folder`."""
    import torch

    if torch.version.cuda is None:
        raise SystemExit("the torch that is installed is built without CUDA, so that there is nothing to replace")
    major, minor = torch.version.cuda.split(".")[:2]
    library = folder / "libcuda.so.1"
    folder.mkdir(parents=True, exist_ok=True)
    installed = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as generated:
        Path(generated, "stub_functions.h").write_text(stub_functions(installed))
        Path(generated, "crt").mkdir()
        Path(generated, "crt", "host_defines.h").write_text(HOST_DEFINES)
        headers = headers_beside(installed)
        versions = [f"-DCUDA_VERSION={int(major) * 1000 + int(minor) * 10}", f"-DCUDNN_VERSION={cudnn_version()}"]
        options = ["-O1", "-w", "-shared", "-fPIC", "-fvisibility=hidden", *versions, f"-I{headers}", f"-I{generated}"]
        subprocess.run(
            ["gcc", *options, SOURCE, "-o", library, "-ldl", "-lpthread", "-Wl,-soname,libcuda.so.1"], check=True
        )
    management = folder / "libnvidia-ml.so.1"  # torch opens it by name for expandable segments
    management.unlink(missing_ok=True)
    management.symlink_to(library.name)
    return library


def cudnn_version() -> int:
    """The version that torch was built with, which it compares with that of the library: 92600 is 9.26.0."""
    import torch

    major, minor, patch = torch._C._cudnn.getCompileVersion()
    return int(major * 10000 + minor * 100 + patch)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
