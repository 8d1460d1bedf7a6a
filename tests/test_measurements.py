"""The table behind `implementation=None` rests on results that are committed beside it."""

import importlib.resources
import json
import logging
import math
import pathlib
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gpuops
from bench import grid, policy, tune
from jax_gpuops import _library, _measurements, _primitive

RESULTS = pathlib.Path(__file__).parents[1] / "bench" / "results"
TEXT = importlib.resources.files("jax_gpuops").joinpath("measurements.json").read_text()
DEVICES = json.loads(TEXT)["devices"]
SWEEPS = {raw.environment["device"]: raw for raw in map(tune.Raw.load, RESULTS.glob("*/tune.json"))}


def test_every_table_is_of_a_committed_sweep():
    assert DEVICES.keys() == SWEEPS.keys()
    for device in DEVICES.values():
        assert device["made"] == "by python -m bench tune"


@pytest.mark.any_version
@pytest.mark.parametrize("kind", DEVICES)
def test_a_table_of_a_sweep_is_what_the_sweep_gives(kind):
    assert DEVICES[kind] == policy.device_table(vars(SWEEPS[kind]))


@pytest.mark.any_version
def test_the_file_is_as_it_would_be_written():
    assert policy.text(DEVICES) == TEXT


@pytest.mark.any_version
@pytest.mark.parametrize("vocabulary", [50257, 50265])
@pytest.mark.parametrize(("tokens", "width"), [(2048, 1024), (8192, 2048)])
def test_heads_of_odd_vocabularies_are_products_of_a_kernel_on_an_h200(tokens, width, vocabulary):
    """In the main table and in calls of models kernels are 2.0 to 2.8 times as fast for these."""
    shape = (tokens, width, vocabulary)
    how = {"result": "bfloat16", "precision": "default"}
    product = grid.Point("gemm", shape, "bfloat16", (1, 0), **how).problem
    classes = DEVICES["NVIDIA H200"]["classes"]
    assert any(_measurements.contains(entry, product) for entry in classes)


ROWS = {"op": "softmax", "function": "softmax", "dtype": "bfloat16", "columns": 2048}


@pytest.mark.parametrize("option", [{}, {"masked": 1}, {"queries": 2048}, {"scaled": 1}])
def test_a_class_is_of_masked_or_scaled_problems_only_if_it_says_so(option):
    problem = {**ROWS, "masked": 0, "queries": 0, "scaled": 0, **option}
    assert _measurements.contains({**ROWS, "ratio": 1.0}, problem) == (option == {})
    assert _measurements.contains({**ROWS, **option, "ratio": 1.0}, problem)


@pytest.mark.any_version
def test_classes_may_name_what_problems_have():
    """Else a class that names a key would hold for no problem, or a check would refuse it."""
    for kernel in {point.kernel: point for point in grid.points(grid.grids())}.values():
        problem = kernel.problem
        keys = problem.keys() | _measurements.traits(problem).keys()
        assert keys - {"op"} <= _measurements.KEYS[problem["op"]]
    kernels = {kernel.name: kernel for kernel in _primitive.KERNELS.values()}
    a = jax.ShapeDtypeStruct((4, 4), "float32")
    options = {"dimension_numbers": (((1,), (0,)), ((), ())), "precision": None}
    options |= {"preferred_element_type": jnp.dtype("float32"), "alpha": 1.0, "beta": 0.0}
    keys = kernels["gpuops_gemm"].problem(a, a, **options).keys()
    assert keys - _primitive.OF_EXECUTION <= _measurements.KEYS["matmul"]
    options = {"precision": None, "preferred_element_type": jnp.dtype("float32")}
    layer = kernels["gpuops_linear"].problem(a, a, activation="relu", **options)
    assert layer.keys() == keys
    added = kernels["gpuops_linear_add"].problem(a, a, a, activation="relu", **options)
    assert added.keys() == keys
    gated = kernels["gpuops_glu"].problem(a, a, a, activation="silu", **options)
    assert gated.keys() == keys
    x, one = jax.ShapeDtypeStruct((4, 4), "int8"), jax.ShapeDtypeStruct((1, 1), "float32")
    scaled = kernels["gpuops_scaled_matmul"].problem(x, x, one, one, transpose_b=True, **options)
    assert scaled.keys() == keys


def test_rows_are_copied_only_where_data_moves():
    """Dims of size 1 do not move any, as the batch of one image."""
    options = {"axes": (0, 2, 3), "dtype": jnp.dtype("float32")}
    for images in (1, 2):
        x = jax.ShapeDtypeStruct((images, 64, 32, 32), "float32")
        problem = _primitive.KERNELS[grid.PRIMITIVES["sum"]].problem(x, **options)
        assert problem["copied"] == int(images > 1)
        assert (problem["outer"], problem["columns"]) == (64, images * 32 * 32)


def test_classes_of_sums_are_of_means_but_not_the_other_way_round():
    x = jax.ShapeDtypeStruct((4, 64), "float32")
    kernels = {name: _primitive.KERNELS[grid.PRIMITIVES[name]] for name in ("sum", "mean")}
    sums, means = (
        {"op": "reduce"} | kernel.problem(x, axes=(1,), dtype=jnp.dtype("float32"))
        for kernel in kernels.values()
    )
    of_sums = {"op": "reduce", "function": "sum", "dtype": "float32", "ratio": 1.1}
    assert all(_measurements.contains(of_sums, problem) for problem in (sums, means))
    assert not _measurements.contains(of_sums | {"mean": 1}, sums)
    assert _measurements.contains(of_sums | {"mean": 1}, means)


def test_a_class_is_of_layers_only_if_it_says_so():
    """A measured product says nothing of one with a bias or an activation."""
    product = {"op": "matmul", "dtype": "bfloat16", "m": [1, 9], "ratio": 1.1}
    layer = product | {"has_bias": 1, "epilogue": "gelu"}
    problem = {"op": "matmul", "dtype": "bfloat16", "m": 4, "has_bias": 0, "epilogue": "none"}
    for has_bias, epilogue in [(0, "none"), (1, "none"), (0, "gelu"), (1, "gelu")]:
        each = problem | {"has_bias": has_bias, "epilogue": epilogue}
        assert _measurements.contains(product, each) == ((has_bias, epilogue) == (0, "none"))
        assert _measurements.contains(layer, each) == ((has_bias, epilogue) == (1, "gelu"))


@pytest.mark.parametrize(
    ("problem", "traits"),
    [
        ({"dtype": "bfloat16", "columns": 1024}, {"aligned": 16}),
        ({"dtype": "bfloat16", "columns": 1500}, {"aligned": 8}),
        ({"dtype": "bfloat16", "columns": 50257, "queries": 0}, {"aligned": 2, "square": 0}),
        ({"dtype": "float32", "columns": 50257, "inner": 4}, {"aligned": 16}),
        ({"dtype": "float32", "columns": 7, "queries": 7}, {"aligned": 4, "square": 1}),
    ],
)
def test_traits_of_rows(problem, traits):
    assert _measurements.traits(problem) == traits


@pytest.mark.parametrize(
    ("sizes", "transposed", "dtypes", "aligned"),
    [
        ((4096, 4096, 4096), "", ("bfloat16", "bfloat16"), 16),
        ((4095, 4096, 4096), "", ("bfloat16", "bfloat16"), 16),
        ((4095, 4096, 4096), "a", ("bfloat16", "bfloat16"), 2),
        ((4096, 4100, 4096), "b", ("bfloat16", "bfloat16"), 8),
        ((4096, 4096, 4098), "", ("bfloat16", "bfloat16"), 4),
        ((4096, 4096, 4098), "a", ("bfloat16", "bfloat16"), 16),
        ((4096, 50257, 2048), "b", ("float8_e4m3fn", "bfloat16"), 2),
        ((4096, 4098, 4096), "", ("int8", "int32"), 2),
    ],
)
def test_traits_of_a_product_are_those_of_the_rows_of_its_matrices(
    sizes, transposed, dtypes, aligned
):
    """m, n and k; a row of a has k elements, or m if a is transposed."""
    problem = dict(zip(("m", "n", "k"), sizes, strict=True))
    problem |= {f"transpose_{name}": int(name in transposed) for name in "ab"}
    problem |= dict(zip(("dtype", "result_dtype"), dtypes, strict=True))
    assert _measurements.traits(problem) == {"aligned": aligned}


@pytest.mark.parametrize(
    ("shape", "permutation", "merged", "sizes", "aligned"),
    [
        ((4, 6), (1, 0), [1, 0], [4, 6], 8),
        ((8, 224, 224, 3), (0, 3, 1, 2), [0, 2, 1], [8, 224 * 224, 3], 4),
        ((8, 1, 6, 4), (0, 2, 1, 3), [0], [8 * 6 * 4], 16),
        ((1, 8, 6, 1, 4), (2, 1, 0, 3, 4), [1, 0, 2], [8, 6, 4], 16),
        ((2, 3, 4, 5), (2, 3, 0, 1), [1, 0], [6, 20], 8),
        ((1, 1), (1, 0), [], [], 16),
    ],
)
def test_traits_of_a_transpose_are_those_of_what_moves(shape, permutation, merged, sizes, aligned):
    problem = {"shape": shape, "permutation": permutation, "element_bytes": 4}
    assert _measurements.traits(problem) == {
        "elements": math.prod(shape),
        "merged_permutation": merged,
        **{f"size{d}": size for d, size in enumerate(sizes)},
        "aligned": aligned,
    }


def test_symbolic_sizes_are_in_no_class_that_names_them():
    (n,) = jax.export.symbolic_shape("n")
    problem = {"op": "softmax", "dtype": "float32", "columns": n, "outer": 4, "inner": 1}
    assert not _measurements.contains({"op": "softmax", "aligned": 16}, problem)
    assert not _measurements.contains({"op": "softmax"}, problem | {"queries": n})
    assert not _measurements.contains({"op": "softmax", "columns": [1, 2**31 - 1]}, problem)
    transposed = {"op": "transpose", "shape": (n, 4), "permutation": (1, 0), "element_bytes": 4}
    assert not _measurements.contains({"op": "transpose", "size0": [1, 9]}, transposed)


# A user's file


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that runs our kernels, of a kind that the package has no measurements of."""
    monkeypatch.setattr(_measurements, "gpu_kind", lambda: "NVIDIA Test GPU")
    monkeypatch.setattr(_library, "gpu_problem", lambda: None)
    monkeypatch.setattr(_library, "planned", lambda *_: {"algorithm": "some", "reason": "a test"})
    monkeypatch.setattr(_measurements, "_loaded", None)
    monkeypatch.delenv(_measurements.SETTING, raising=False)
    return monkeypatch


def file_of(path, kind="NVIDIA Test GPU", **changes):
    entry = {"op": "transpose", "merged_permutation": [1, 0], "ratio": 1.5, **changes}
    devices = {kind: {"classes": [{k: v for k, v in entry.items() if v is not None}]}}
    path.write_text(json.dumps({"schema": _measurements.SCHEMA, "devices": devices}))
    return path


def chosen():
    return jax_gpuops.plan("transpose", (512, 512), "float32", platform="cuda").implementation


def test_nothing_is_known_of_another_kind_of_gpu(gpu):
    """A table serves no other GPU of its name: how far a kernel is ahead depends on the GPU."""
    for kind in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL"):
        gpu.setattr(_measurements, "gpu_kind", lambda kind=kind: kind)
        for entry in DEVICES["NVIDIA H200"]["classes"]:
            chosen, why = _measurements.best(entry)
            assert chosen == "xla"
            assert why == f"nothing was measured on {kind}; `python -m bench tune` measures it"


def test_without_a_gpu_plans_are_those_of_an_h200_and_programs_run_xla(gpu, tmp_path):
    """A program that is exported may run on any GPU."""
    gpu.setattr(_measurements, "gpu_kind", lambda: None)
    jax_gpuops.load_measurements(file_of(tmp_path / "a.json", kind="NVIDIA H200"))
    assert chosen() == "cuda"
    transpose = jax.jit(lambda x: jax_gpuops.transpose(x))
    x = jax.ShapeDtypeStruct((512, 512), "float32")
    (call,) = jax_gpuops.explain(transpose, x, platform="cuda").calls
    assert call.plan.implementation == "cuda"
    assert "jax_gpuops" not in transpose.trace(x).lower(lowering_platforms=("cuda",)).as_text()


def test_a_file_is_loaded_and_taken_back(gpu, tmp_path):
    assert chosen() == "xla"
    jax_gpuops.load_measurements(file_of(tmp_path / "a.json"))
    assert chosen() == "cuda"
    jax_gpuops.load_measurements(file_of(tmp_path / "b.json", merged_permutation=[0, 2, 1]))
    assert chosen() == "xla"  # it replaces the first
    jax_gpuops.load_measurements(str(file_of(tmp_path / "c.json")))
    assert chosen() == "cuda"
    jax_gpuops.load_measurements(None)
    assert chosen() == "xla"


def test_a_file_replaces_the_package_for_its_kinds_alone(gpu, tmp_path):
    package = _measurements.table()["NVIDIA H200"]
    jax_gpuops.load_measurements(file_of(tmp_path / "a.json"))
    assert _measurements.table()["NVIDIA H200"] == package
    jax_gpuops.load_measurements(file_of(tmp_path / "b.json", kind="NVIDIA H200"))
    assert len(_measurements.table()["NVIDIA H200"]) == 1


@pytest.mark.parametrize("op", ["var", "std", "mean_and_var"])
@pytest.mark.parametrize("of_variances", [0, 1])
def test_variances_without_the_mean_have_classes_of_their_own(op, of_variances, gpu, tmp_path):
    """XLA reads short rows once for a variance, and twice for the mean and the variance."""
    named = {"op": "reduce", "function": "mean_and_var", "var": of_variances}
    file = file_of(tmp_path / "a.json", merged_permutation=None, **named)
    jax_gpuops.load_measurements(file)
    plan = jax_gpuops.plan(op, (512, 512), "float32", axis=-1, platform="cuda")
    assert plan.implementation == ("cuda" if of_variances == (op != "mean_and_var") else "xla")


def test_the_environment_variable_names_a_file(gpu, tmp_path):
    gpu.setenv(_measurements.SETTING, str(file_of(tmp_path / "a.json")))
    assert chosen() == "cuda"
    jax_gpuops.load_measurements(None)
    assert chosen() == "xla"


def test_a_file_that_is_loaded_stays_while_another_thread_reads_the_variable(gpu, tmp_path):
    read, reads = _measurements.read, threading.Event()

    def slow(path, why=""):
        content = read(path, why)
        if why:
            reads.set()
            time.sleep(0.2)
        return content

    gpu.setattr(_measurements, "read", slow)
    gpu.setenv(_measurements.SETTING, str(file_of(tmp_path / "a.json", kind="of the variable")))
    reader = threading.Thread(target=_measurements.table)
    reader.start()
    assert reads.wait(60)
    jax_gpuops.load_measurements(file_of(tmp_path / "b.json"))
    reader.join()
    assert _measurements.table().keys() - DEVICES.keys() == {"NVIDIA Test GPU"}


def test_the_status_says_what_was_measured(gpu, tmp_path):
    assert "nothing was measured on NVIDIA Test GPU" in jax_gpuops.status()
    jax_gpuops.load_measurements(file_of(tmp_path / "a.json"))
    assert "transpose   None: a kernel for 1 measured classes" in jax_gpuops.status()
    gpu.setattr(_measurements, "_loaded", None)
    gpu.setenv(_measurements.SETTING, "none.json")
    assert "None: an error: there is no file of measurements none.json" in jax_gpuops.status()


def test_a_variable_that_names_no_file_is_an_error_where_it_is_needed(gpu, tmp_path):
    gpu.setenv(_measurements.SETTING, str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError, match=r"none\.json \(named by JAX_GPUOPS_MEASUREMENTS\)"):
        chosen()


@pytest.mark.parametrize("function", [jax_gpuops.matmul, lambda x, y: jax_gpuops.softmax(x + y)])
def test_without_a_gpu_the_variable_has_no_effect(function, monkeypatch, tmp_path):
    monkeypatch.setattr(_measurements, "_loaded", None)
    monkeypatch.setenv(_measurements.SETTING, str(tmp_path / "none.json"))
    with jax.default_device(jax.devices("cpu")[0]):
        x = jax.numpy.ones((4, 4))
        assert function(x, x).shape == (4, 4)


@pytest.mark.parametrize("text", [None, "not JSON"], ids=["missing", "malformed"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.skipif(_library.missing("cuda") is not None, reason="programs are lowered with it")
def test_a_named_kernel_needs_no_file(text, strict, gpu, tmp_path, caplog):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    gpu.setenv(_measurements.SETTING, str(path))
    x = jax.ShapeDtypeStruct((512, 512), "float32")
    caplog.set_level(logging.INFO, "jax_gpuops")
    with jax_gpuops.use("cuda", strict=strict):
        jax.jit(lambda x: jax_gpuops.softmax(x)).trace(x).lower(lowering_platforms=("cuda",))
        (call,) = jax_gpuops.explain(jax_gpuops.softmax, x, platform="cuda").calls
    assert call.plan.implementation == "cuda"
    second_best = r"xla \(implementation=None raises an error: .*bad\.json.*\)"
    assert re.match(second_best, call.plan.second_best)
    assert call.plan.second_best in caplog.text


@pytest.mark.usefixtures("gpu")
def test_a_bad_file_is_a_line_of_an_explanation_of_none(gpu, tmp_path):
    gpu.setenv(_measurements.SETTING, str(tmp_path / "none.json"))
    (call,) = jax_gpuops.explain(jax_gpuops.softmax, np.ones(8), platform="cuda").calls
    assert call.plan.implementation == "error"
    assert "there is no file of measurements" in call.plan.reason


@pytest.mark.usefixtures("gpu")
def test_compiled_functions_are_compiled_again_after_a_file_is_loaded(tmp_path):
    traces = []

    @jax.jit
    def function(x):
        traces.append(x.shape)
        return jax_gpuops.softmax(x)

    x = np.ones((2, 3), np.float32)
    function(x), function(x)
    assert len(traces) == 1
    jax_gpuops.load_measurements(file_of(tmp_path / "a.json"))
    function(x), function(x)
    assert len(traces) == 2


@pytest.mark.usefixtures("gpu")
def test_lowerings_go_by_the_new_file(tmp_path):
    function = jax.jit(jax_gpuops.transpose)

    def text():
        traced = function.trace(jax.ShapeDtypeStruct((512, 512), "float32"))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "jax_gpuops_transpose" not in text()
    jax_gpuops.load_measurements(file_of(tmp_path / "a.json"))
    assert "jax_gpuops_transpose" in text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("[]", "is not a file of measurements of schema 1; write it with"),
        ('{"schema": 7, "devices": {}}', "of schema 1, but of schema 7"),
        ('{"NVIDIA H200": []}', "is not a file of measurements"),
        ('{"schema": 1, "devices": {"A": []}}', "'A' has no list of \"classes\""),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_a_file_of_something_else_is_refused(text, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        jax_gpuops.load_measurements(path)
    assert "bad.json" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "fft"}, "\"op\" must be one of softmax, reduce, transpose, matmul, got 'fft'"),
        ({"op": None}, "got None"),
        ({"op": ["softmax"]}, "got ['softmax']"),
        ({"colums": [1, 2]}, "transpose has no key 'colums'; its keys are aligned, element_b"),
        ({"ratio": None}, '"ratio" must be a positive number, got None'),
        ({"ratio": "1.2"}, '"ratio" must be a positive number'),
        ({"ratio": float("inf")}, '"ratio" must be a positive number, got inf'),
        ({"ratio": 10**400}, '"ratio" must be a positive number'),
        ({"between": -1}, '"between" must be a positive number'),
        ({"size0": [5, 1]}, '"size0" must be a string, an int, or a range'),
        ({"size0": [1]}, '"size0" must be a string, an int, or a range'),
        ({"size0": 1.5}, '"size0" must be a string, an int, or a range'),
        ({"merged_permutation": 3}, '"merged_permutation" must be a list of ints'),
        ({"shape": [[1, 2, 3, 4]]}, '"shape" must be a list of ints and of ranges'),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_a_class_that_is_not_understood_is_named(changes, message, tmp_path):
    """Ignored, it would hold for more problems than were measured, or for none."""
    path = file_of(tmp_path / "bad.json", **changes)
    before = _measurements.table()
    with pytest.raises(ValueError, match=r"bad\.json: class 1 of 'NVIDIA Test GPU'") as raised:
        jax_gpuops.load_measurements(path)
    assert message in str(raised.value)
    assert _measurements.table() == before
