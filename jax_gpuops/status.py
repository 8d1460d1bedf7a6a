"""`python -m jax_gpuops`: what is built, what JAX sees, what will run, and how to mend the rest."""

from __future__ import annotations

import jax

from jax_gpuops import __version__, _library, _measurements

_INSTALL = {
    "interpret": "pip install --force-reinstall --no-deps .   (in a checkout of jax_gpuops)",
    "cuda": "pip install --force-reinstall --no-deps -C cmake.define.JAX_GPUOPS_CUDA=ON .   "
    "(in a checkout of jax_gpuops)",
}


def status() -> str:
    """Returns a report: versions, compiled modules, devices, and what each op will run.

    Each thing that is missing is followed by the one command that mends it.
    """
    lines = [f"jax_gpuops {__version__}", f"jax        {jax.__version__}", "", "Compiled modules"]
    for implementation in ("cuda", "interpret"):
        why = _library.missing(implementation)
        if why is not None:
            lines += [
                f"  {implementation:<10} missing: {why}",
                f"    fix: {_INSTALL[implementation]}",
            ]
            continue
        info = _library.module(implementation).build_info()
        text = f"FFI API {'.'.join(map(str, info['ffi_api_version']))}"
        if implementation == "cuda":
            text += f", CUDA {'.'.join(map(str, info['cuda_version']))}"
            text += f", architectures {info['cuda_architectures']}"
        lines.append(f"  {implementation:<10} {text}")
    lines += ["", "Devices"]
    for device in jax.devices():
        lines.append(f"  {device.platform}:{device.id}  {device.device_kind}")
    has_gpu = _measurements.gpu_kind() is not None
    lines += ["", "What runs"]
    problem = _library.gpu_problem()
    if has_gpu and problem is None:
        driver = ".".join(map(str, _library.module("cuda").driver_version()))
        lines.append(f"  driver     supports CUDA {driver}")
        lines.append("  None       our kernels where measurements say they are level with XLA")
        lines.append('  "cuda"     our kernels')
    elif has_gpu:
        lines.append(f"  None       XLA: {problem}")
    else:
        lines.append("  None       XLA: JAX sees no GPU")
        lines.append("    fix: pip install 'jax[cuda13]'   (needs an NVIDIA driver >= 580)")
    if _library.missing("interpret") is None:
        lines.append('  "interpret" our kernels, on the host')
    return "\n".join(lines)
