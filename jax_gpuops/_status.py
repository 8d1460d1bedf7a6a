"""The status report: compiled modules, devices, what ops will run, and how to fix the rest."""

from __future__ import annotations

import jax

from jax_gpuops import __version__, _library, _measurements, _primitive

_REINSTALL = "pip install --force-reinstall --no-deps{} .   (in a checkout of jax_gpuops)"
_FIXES = {
    "interpret": _REINSTALL.format(""),
    "cuda": _REINSTALL.format(" -C cmake.define.JAX_GPUOPS_CUDA=ON"),
    "gpu": "pip install 'jax[cuda13]'   (on a machine with an NVIDIA driver of 580 or newer)",
}


def status() -> str:
    """Returns a report: versions, compiled modules, devices, and what each op will run.

    Each missing component is followed by the command that installs it.
    """
    sections = [_versions(), _modules(), _devices(), _operations()]
    return "\n\n".join("\n".join(section) for section in sections)


def _versions() -> list[str]:
    return [
        f"jax_gpuops  {__version__}",
        f"jax         {jax.__version__}",
        f"jaxlib      {jax.lib.__version__}",
    ]


def _modules() -> list[str]:
    lines = ["Compiled modules"]
    for implementation in ("cuda", "interpret"):
        why = _library.missing(implementation)
        if why is not None:
            lines += [
                f"  {implementation:<10}  missing: {why}",
                f"    fix: {_FIXES[implementation]}",
            ]
            continue
        info = _library.module(implementation).build_info()
        text = f"FFI API {_dotted(info['ffi_api_version'])}"
        if implementation == "cuda":
            text += f", CUDA {_dotted(info['cuda_version'])}"
            text += f", architectures {info['cuda_architectures']}"
        lines.append(f"  {implementation:<10}  {text}")
    return lines


def _devices() -> list[str]:
    lines = ["Devices"]
    lines += [f"  {each.platform}:{each.id}  {each.device_kind}" for each in jax.devices()]
    if _library.missing("cuda") is None:
        driver = _library.module("cuda").driver_version()
        known = any(driver)
        lines.append(
            f"  driver  {'up to CUDA ' + _dotted(driver) if known else 'no NVIDIA driver'}"
        )
    return lines


def _operations() -> list[str]:
    lines = ["What runs"]
    kind = _measurements.gpu_kind()
    objection = "JAX sees no GPU" if kind is None else _library.gpu_problem()
    classes, failure = _classes(kind)
    for op in sorted({kernel.op for kernel in _primitive.KERNELS.values()}):
        count = sum(each["op"] == op for each in classes)
        default = f'a kernel for {count} measured classes of problems (see "plan"), else XLA'
        if objection is not None:
            default = f"XLA: {objection}"
        elif failure is not None:
            default = f"an error: {failure}"
        lines.append(f"  {op:<10}  None: {default}")
    if objection is None:
        lines.append('  "cuda": our kernels')
        if not classes and failure is None:
            lines.append(f"    nothing was measured on {kind}; python -m bench tune measures it")
    elif kind is None:
        lines.append(f"    fix: {_FIXES['gpu']}")
    if _library.missing("interpret") is None:
        lines.append('  "interpret": our kernels, on the host')
    return lines


def _classes(kind: str | None) -> tuple[list[_measurements.Class], str | None]:
    """Returns the measured classes of a kind of GPU, and an error message or None."""
    try:
        return _measurements.table().get(kind or "", []), None
    except (FileNotFoundError, ValueError) as error:  # of the file that the environment names
        return [], str(error)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
