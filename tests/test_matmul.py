"""matmul, dot_general and gemm against float64 and against JAX."""

import functools
import inspect

import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_gpuops
from jax_gpuops import _plan, _primitive

LADDER = [
    a.name
    for a in jax_gpuops.algorithms("matmul")
    if a.name
    not in (
        *("tensor_core", "split_k", "parallel_split_k", "wgmma_batched", "skinny"),
        *("mma_pipelined", "mma_batched"),
        *("bf16_x6", "fp16_x3", "fma_pipelined", "fma_sliced", "fma_batched", "fma_skinny"),
        "cublas",
    )
]
TILED = ["block_tiled", "bank_conflict_free", "double_buffered"]
ATTENTION = (((3,), (3,)), ((0, 2), (0, 2)))


# The kernels


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", helpers.FLOATS)
@pytest.mark.parametrize("algorithm", LADDER)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (3, 5, 7), (1, 130, 9), (130, 1, 9), (33, 31, 65), (64, 64, 64), (129, 132, 20)],
    ids=str,
)
def test_every_algorithm(algorithm, dtype, sizes, implementation):
    m, n, k = sizes
    with helpers.x64(dtype):
        a, b = helpers.normal((m, k), dtype), helpers.normal((k, n), dtype, seed=1)
        y = jax_gpuops.matmul(a, b, implementation=implementation, algorithm=algorithm)
        assert y.dtype == a.dtype
        helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", LADDER)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", [(40, 24, 16), (37, 29, 11)], ids=["aligned", "unaligned"])
def test_gemm_of_every_algorithm(algorithm, transpose_a, transpose_b, sizes, implementation):
    m, n, k = sizes
    a, b = helpers.normal((m, k), "float32"), helpers.normal((k, n), "float32", seed=1)
    c = helpers.normal((m, n), "float32", seed=2)
    y = jax_gpuops.gemm(
        helpers.swap(a) if transpose_a else a,
        helpers.swap(b) if transpose_b else b,
        c,
        alpha=0.5,
        beta=-2.0,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation=implementation,
        algorithm=algorithm,
    )
    a, b, c = map(helpers.exact, (a, b, c))
    exact, magnitude = 0.5 * (a @ b) - 2 * c, 0.5 * (np.abs(a) @ np.abs(b)) + 2 * np.abs(c)
    helpers.assert_product(y, exact, magnitude, k)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", TILED)
@pytest.mark.parametrize("sizes", [(128, 128, 8), (260, 132, 36), (257, 131, 35)], ids=str)
def test_several_tiles(algorithm, sizes, implementation):
    m, n, k = sizes
    a, b = helpers.normal((2, m, k), "float32"), helpers.normal((2, k, n), "float32", seed=1)
    y = jax_gpuops.matmul(a, b, implementation=implementation, algorithm=algorithm)
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
def test_more_tiles_than_a_strip(implementation):
    """Tiles are walked in strips of eight rows; here the last strip is shorter."""
    a, b = helpers.normal((11 * 32, 3), "float32"), helpers.normal((3, 3 * 32), "float32", seed=1)
    y = jax_gpuops.matmul(a, b, implementation=implementation, algorithm="shared")
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", LADDER)
def test_results_in_the_accumulator_dtype(dtype, algorithm, implementation):
    a, b = helpers.normal((20, 33), dtype), helpers.normal((33, 12), dtype, seed=1)
    y = jax_gpuops.matmul(
        a,
        b,
        preferred_element_type=jnp.float32,
        implementation=implementation,
        algorithm=algorithm,
    )
    assert y.dtype == jnp.float32
    helpers.assert_matmul(y, a, b)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gemm_adds_before_it_rounds(dtype, implementation):
    """1 + 1/4096 + 1/4096 ...: every term would be lost if the product or c were rounded alone."""
    a, b = jnp.full((4, 1), 1 / 64, dtype), jnp.full((1, 4), 1 / 64, dtype)
    y = jax_gpuops.gemm(a, b, jnp.ones((4, 4), jnp.float32), beta=1, implementation=implementation)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, np.float32(1 + 1 / 4096))


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", LADDER)
def test_any_order_of_threads(algorithm, implementation):
    """A missing barrier gives other numbers under some order of the threads."""
    if implementation != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    a, b = helpers.normal((70, 50), "float32"), helpers.normal((50, 40), "float32", seed=1)
    helpers.under_each_schedule(
        lambda: jax_gpuops.matmul(a, b, implementation=implementation, algorithm=algorithm),
        [(seed, {}) for seed in range(1, 5)],
    )


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", LADDER)
def test_repeats_are_bit_identical(algorithm, implementation):
    a, b = helpers.normal((40, 300), "float32"), helpers.normal((300, 36), "float32", seed=1)
    runs = [
        np.asarray(jax_gpuops.matmul(a, b, implementation=implementation, algorithm=algorithm))
        for _ in range(3)
    ]
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[1].view(np.int32))
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[2].view(np.int32))


def test_special_values_stay_in_their_row_and_column(implementation):
    """Zeros that fill tiles up must not meet an infinity: 0 * inf is NaN."""
    for algorithm in LADDER:
        a, b = helpers.normal((33, 35), "float32"), helpers.normal((35, 37), "float32", seed=1)
        a[3, 34], b[2, 36], a[7, 0] = np.inf, -np.inf, np.nan
        y = jax_gpuops.matmul(a, b, implementation=implementation, algorithm=algorithm)
        with np.errstate(invalid="ignore"):
            expected = a @ b
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        np.testing.assert_array_equal(np.isposinf(y), np.isposinf(expected))
        np.testing.assert_array_equal(np.isneginf(y), np.isneginf(expected))


# Tensor cores


# For each tile, m, n and k that the plan gives it to: the host simulates 4 multiprocessors.
TENSOR_CORE_TILES = {
    (64, 128): {"interpret": (61, 456, 200), "cuda": (88, 320, 448)},
    (128, 128): {"interpret": (104, 424, 136), "cuda": (1020, 1984, 448)},
    (128, 192): {"interpret": (221, 1144, 136), "cuda": (1500, 2112, 448)},
    (128, 256): {"interpret": (250, 1000, 136), "cuda": (2000, 2000, 136)},
}


@pytest.fixture
def on_tensor_cores(implementation):
    """The options of a product by tensor_core, which not every GPU can run."""
    return helpers.options("matmul", "tensor_core", implementation, [(8, 8), (8, 8)], "bfloat16")


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), helpers.DTYPES_ON_TENSOR_CORES)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("tile", TENSOR_CORE_TILES, ids=str)
def test_tensor_core(tile, transpose_b, transpose_a, dtype, result, on_tensor_cores):
    """Every kernel, with rows, columns or a depth that the tile does not divide."""
    implementation = on_tensor_cores["implementation"]
    m, n, k = TENSOR_CORE_TILES[tile][implementation]
    a, b = helpers.factor((m, k), dtype), helpers.factor((k, n), dtype, seed=1)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, result, **on_tensor_cores)
    assert y.dtype == result
    helpers.assert_matmul(y, a, b)
    turns = dtype == "float32" and not transpose_a and not transpose_b
    assert config["turned"] == turns
    if not (result == "float32" and tile in ((128, 128), (128, 192))):
        wide = turns and tile == (128, 256)
        assert (config["tile_rows"], config["tile_cols"]) == (tile[::-1] if wide else tile)


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(200, 504, 136), (240, 508, 67), (600, 1028, 36)], ids=str)
def test_turned_products_have_the_same_bits(sizes, on_tensor_cores):
    """Of floats, b is read as it is stored; of its transpose, which has k contiguous, too."""
    m, n, k = sizes
    a, b = helpers.normal((3, m, k), "float32"), helpers.normal((3, k, n), "float32", seed=1)
    y, config = helpers.recorded_dot(a, b, False, False, "float32", **on_tensor_cores)
    if on_tensor_cores["implementation"] == "interpret":
        assert config["turned"]
    other, config = helpers.recorded_dot(a, b, False, True, "float32", **on_tensor_cores)
    assert not config["turned"]
    np.testing.assert_array_equal(np.asarray(y).view(np.int32), np.asarray(other).view(np.int32))


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["", "a", "b"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_tensor_core_of_batches(transpose_b, transpose_a, share, on_tensor_cores):
    """More tiles than blocks, so that rings and results go on from one to the next."""
    batch, m, n, k = 5, 136, 264, 72
    a, b = helpers.normal((batch, m, k), "bfloat16"), helpers.normal((batch, k, n), "bfloat16", 1)
    helpers.assert_gemm_of_batch(a, b, share, transpose_a, transpose_b, **on_tensor_cores)


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_tensor_core_of_batches_of_floats(transpose_b, transpose_a, on_tensor_cores):
    a, b = helpers.factor((5, 136, 72), "float32"), helpers.factor((5, 72, 264), "float32", seed=1)
    y, _ = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **on_tensor_cores)
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), helpers.DTYPES_ON_TENSOR_CORES[2:])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "sizes", [(72, 131, 200), (129, 264, 67), (131, 136, 64), (65, 257, 129)], ids=str
)
def test_tensor_core_of_rows_that_tensor_copies_cannot_take(
    sizes, transpose_b, transpose_a, dtype, result, on_tensor_cores
):
    """Factors with such rows are copied first, and such a result is written element by element.

    Floats are also copied where k is not the contiguous dimension.
    """
    m, n, k = sizes
    a, b = helpers.factor((2, m, k), dtype), helpers.factor((2, k, n), dtype, seed=1)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, result, **on_tensor_cores)
    helpers.assert_matmul(y, a, b)
    if dtype == "float32":
        assert config["copies_a"] == (transpose_a or k % 4 != 0)
        assert config["copies_b"] == ((not transpose_b or k % 4 != 0) and not config["turned"])
    else:
        assert config["copies_a"] == ((m if transpose_a else k) % 8 != 0)
        assert config["copies_b"] == ((k if transpose_b else n) % 8 != 0)
    assert config["writes_elements"] == (n % (4 if result == "float32" else 8) != 0)


@pytest.mark.kernel
@pytest.mark.parametrize("tile", TENSOR_CORE_TILES, ids=str)
def test_tensor_core_writes_elements_of_every_tile(tile, on_tensor_cores):
    m, n, k = TENSOR_CORE_TILES[tile][on_tensor_cores["implementation"]]
    a, b = helpers.normal((m, k), "float16"), helpers.normal((k, n - 3), "float16", seed=1)
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = jax.block_until_ready(jax_gpuops.matmul(a, b, **on_tensor_cores))
    helpers.assert_matmul(y, a, b)
    config = executions[0]["config"]
    assert config["writes_elements"]
    assert (config["tile_rows"], config["tile_cols"]) == tile


# Of which each block takes several: batch, m and n.
ELEMENTS_OF_TILES = {
    (128, 128): {"interpret": (4, 200, 125), "cuda": (33, 1000, 125)},
    (128, 256): {"interpret": (4, 200, 501), "cuda": (4, 2000, 1997)},
}


@pytest.mark.kernel
@pytest.mark.parametrize("k", [72, 264, 600, 1100])
@pytest.mark.parametrize("tile", ELEMENTS_OF_TILES, ids=str)
def test_tensor_core_writes_elements_while_it_multiplies(tile, k, on_tensor_cores):
    """In each step of the next tile, the more rows the fewer steps it has."""
    batch, m, n = ELEMENTS_OF_TILES[tile][on_tensor_cores["implementation"]]
    a, b = helpers.normal((batch, m, k), "bfloat16"), helpers.normal((batch, k, n), "bfloat16", 1)
    y, config = helpers.recorded_dot(a, b, False, False, "bfloat16", **on_tensor_cores)
    helpers.assert_matmul(y, a, b)
    assert config["writes_elements"]
    assert (config["tile_rows"], config["tile_cols"]) == tile


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["a", "b"])
def test_tensor_core_copies_a_shared_factor_once(share, on_tensor_cores):
    a, b = helpers.normal((3, 72, 67), "bfloat16"), helpers.normal((3, 67, 131), "bfloat16", seed=1)
    a, b = (a[0], b) if share == "a" else (a, b[0])
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = jax.block_until_ready(jax_gpuops.gemm(a, b, **on_tensor_cores))
    helpers.assert_matmul(y, a, b)
    copies = 72 * 128 * (1 if share == "a" else 3) + 67 * 192 * (1 if share == "b" else 3)
    assert executions[0]["config"]["workspace_bytes"] == 2 * copies


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("sizes", "transpose_b", "transpose_a", "dtype", "result"),
    helpers.with_16_bits_in_turn(
        [
            (1, 8, 72),
            (8, 136, 1032),
            (64, 128, 512),
            (5, 131, 517),
            (24, 72, 904),
            (72, 264, 264),
            (200, 40, 1032),
        ],
        [False, True],
        [False, True],
    ),
    ids=str,
)
def test_split_k(sizes, transpose_b, transpose_a, dtype, result, on_tensor_cores):
    """Each block of a cluster multiplies a part of the depth; few rows or many, of any length."""
    how = {**on_tensor_cores, "algorithm": "split_k"}
    config = helpers.assert_products(2, sizes, transpose_a, transpose_b, dtype, result, **how)
    assert config["splits"] >= 2
    assert config["tile_rows"] == (64 if sizes[0] <= 64 else 128)


@pytest.mark.kernel
@pytest.mark.parametrize("n", [64, 320], ids=["alone", "in pairs"])
@pytest.mark.parametrize("m", [17, 72])
def test_split_k_has_as_many_stages_as_fit(m, n, on_tensor_cores):
    """More where a block has a multiprocessor for itself: the host simulates 4."""
    a = helpers.normal((2, m, 2056), "bfloat16")
    b = helpers.normal((2, 2056, n), "bfloat16", seed=1)
    how = {**on_tensor_cores, "algorithm": "split_k"}
    y, config = helpers.recorded_dot(a, b, False, False, "float32", **how)
    helpers.assert_matmul(y, a, b)
    if on_tensor_cores["implementation"] == "interpret":
        stages = {(64, True): 9, (64, False): 4, (128, True): 7, (128, False): 3}
        assert config["stages"] == stages[config["tile_rows"], n == 64]


@pytest.mark.kernel
@pytest.mark.parametrize("rows", [3, 72])
def test_split_k_in_any_order_of_threads(rows, on_tensor_cores):
    """Sums are added in the order of the blocks, whichever is done first."""
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    a = helpers.normal((rows, 1032), "bfloat16")
    b = helpers.normal((1032, 72), "bfloat16", seed=1)
    y = helpers.under_each_schedule(
        lambda: jax_gpuops.matmul(a, b, implementation="interpret", algorithm="split_k"),
        [(1, {}), (2, {}), *[(2 + block, {"block": block}) for block in (1, 2, 3)]],
    )
    helpers.assert_matmul(y, a, b)


@pytest.mark.parametrize(("dtype", "depth"), [("bfloat16", 64), ("float32", 32)])
def test_split_k_needs_a_depth_to_divide(dtype, depth, on_tensor_cores):
    x = jnp.ones((depth, depth), dtype)
    with pytest.raises(
        ValueError, match=f"algorithm 'split_k' requires a depth k of more than {depth}"
    ):
        jax_gpuops.matmul(x, x, **{**on_tensor_cores, "algorithm": "split_k"})


# float32 by TF32


ROUNDED = np.array(
    # Between 1 and the next number of TF32, 1 + 2**-10; a tie is to either of the two.
    [
        *(1 + i * 2**-13 for i in range(9)),
        *(-(2**20) * (1 + i * 2**-13) for i in range(9)),
        *(0.0, -0.0, 1e-30, -3e38, np.pi, 2.0**-126, 3 * 2.0**-140),
    ],
    "float32",
)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ["tensor_core", "split_k", "mma_pipelined", "mma_batched"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("left", [True, False])
def test_rounding_to_tf32(left, transposed, algorithm, on_tensor_cores):
    """Each factor is rounded to the nearest number of TF32, not cut off, however it is stored."""
    x = np.resize(ROUNDED, (72, 64))
    one = np.eye(64, dtype="float32")
    how = {**on_tensor_cores, "algorithm": algorithm}
    if left:
        y = helpers.dot(helpers.stored(x, transposed), one, transposed, False, "float32", **how)
    else:
        y = helpers.swap(
            np.asarray(
                helpers.dot(
                    one, helpers.stored(helpers.swap(x), transposed), False, transposed, None, **how
                )
            )
        )
    unit = 2.0**-10 * 2.0 ** np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126)))
    assert np.all(np.abs(helpers.exact(y) - helpers.exact(x)) <= unit / 2)


@pytest.mark.kernel
@pytest.mark.parametrize("algorithm", ["tensor_core", "split_k", "mma_pipelined", "mma_batched"])
def test_special_values_by_tf32_stay_in_their_row_and_column(algorithm, on_tensor_cores):
    a, b = helpers.factor((33, 70), "float32"), helpers.factor((70, 37), "float32", seed=1)
    a[3, 69], b[2, 36], a[7, 0] = np.inf, -np.inf, np.nan
    y = jax_gpuops.matmul(a, b, **{**on_tensor_cores, "algorithm": algorithm})
    with np.errstate(invalid="ignore"):
        expected = a @ b
    for which in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(which(y), which(expected))


def plan_of_floats(precision, on_tensor_cores):
    how = {"implementation": on_tensor_cores["implementation"], "precision": precision}
    return jax_gpuops.plan("matmul", [(256, 256)] * 2, "float32", **how).algorithm


@pytest.mark.parametrize("precision", [None, "high", "tensorfloat32", "TF32_TF32_F32"])
def test_precisions_that_tf32_satisfies(precision, on_tensor_cores):
    assert plan_of_floats(precision, on_tensor_cores) == "tensor_core"


@pytest.mark.parametrize("precision", ["highest", "float32", "F32_F32_F32"])
def test_precisions_that_tf32_does_not_satisfy(precision, on_tensor_cores):
    assert plan_of_floats(precision, on_tensor_cores) in [*LADDER, "fma_pipelined", "fma_sliced"]
    with pytest.raises(ValueError, match=r"multiplies float32 in TF32, which .* excludes"):
        jax_gpuops.matmul(*[jnp.ones((8, 8))] * 2, precision=precision, **on_tensor_cores)


@pytest.mark.parametrize("algorithm", LADDER)
def test_kernels_that_refuse_tf32(algorithm, implementation):
    x = jnp.ones((8, 8))
    how = {"implementation": implementation, "algorithm": algorithm}
    with pytest.raises(ValueError, match="precision F32_F32_F32, not TF32_TF32_F32"):
        jax_gpuops.matmul(x, x, precision="TF32_TF32_F32", **how)


@pytest.mark.kernel
def test_gradients_by_tf32(on_tensor_cores):
    a, b = helpers.factor((72, 40), "float32"), helpers.factor((40, 136), "float32", seed=1)
    g = helpers.factor((72, 136), "float32", seed=2)
    _, pull = jax.vjp(lambda a, b: jax_gpuops.matmul(a, b, **on_tensor_cores), a, b)
    a_bar, b_bar = pull(jnp.asarray(g))
    helpers.assert_matmul(a_bar, g, helpers.swap(b))
    helpers.assert_matmul(b_bar, helpers.swap(a), g)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "sizes",
    [(1, 8, 8), (8, 8, 16), (64, 128, 64), (3, 24, 1000), (513, 8, 64), (1, 1, 1), (7, 3, 5)],
    ids=str,
)
def test_tensor_core_of_few_elements(sizes, on_tensor_cores):
    m, n, k = sizes
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    helpers.assert_matmul(jax_gpuops.matmul(a, b, **on_tensor_cores), a, b)


@pytest.mark.kernel
def test_tensor_core_without_depth_is_zero(on_tensor_cores):
    y = jax_gpuops.matmul(
        jnp.ones((8, 0), "bfloat16"), jnp.ones((0, 16), "bfloat16"), **on_tensor_cores
    )
    np.testing.assert_array_equal(y, np.zeros((8, 16)))


@pytest.mark.kernel
@pytest.mark.parametrize("writes", ["copies", "elements"])
@pytest.mark.parametrize("tile", TENSOR_CORE_TILES, ids=str)
def test_tensor_core_in_any_order_of_threads(tile, writes, on_tensor_cores):
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    m, n, k = TENSOR_CORE_TILES[tile]["interpret"]
    if writes == "elements":
        n, k = n - 3, 600  # in several steps of the next tile
    a, b = helpers.normal((2, m, k), "bfloat16"), helpers.normal((2, k, n), "bfloat16", seed=1)
    helpers.under_each_schedule(
        lambda: jax_gpuops.matmul(a, b, **on_tensor_cores),
        [(seed, {}) for seed in range(1, 4)],
    )


@pytest.mark.kernel
def test_tensor_core_inside_jit_twice_over(on_tensor_cores):
    """What CUDA captures into a graph must not hold on to the arrays of one execution."""
    a, b = helpers.normal((136, 72), "bfloat16"), helpers.normal((72, 264), "bfloat16", seed=1)

    @jax.jit
    def function(a, b):
        y = jax_gpuops.matmul(a, b, **on_tensor_cores)
        z = jax_gpuops.matmul(a + 1, b, **on_tensor_cores)
        return y, z, jax_gpuops.matmul(a, b + 1, **on_tensor_cores)

    for seed in range(3):
        a = helpers.normal((136, 72), "bfloat16", seed)
        y, z, w = function(jnp.array(a), jnp.array(b))
        helpers.assert_matmul(y, a, b)
        helpers.assert_matmul(z, np.asarray(jnp.asarray(a) + 1), b)
        helpers.assert_matmul(w, a, np.asarray(jnp.asarray(b) + 1))


@pytest.mark.kernel
def test_gradients_by_tensor_core(on_tensor_cores):
    a, b = helpers.normal((72, 40), "bfloat16"), helpers.normal((40, 136), "bfloat16", seed=1)
    g = helpers.normal((72, 136), "bfloat16", seed=2)
    _, pull = jax.vjp(lambda a, b: jax_gpuops.matmul(a, b, **on_tensor_cores), a, b)
    a_bar, b_bar = pull(jnp.asarray(g))
    helpers.assert_matmul(a_bar, g, helpers.swap(b))
    helpers.assert_matmul(b_bar, helpers.swap(a), g)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda x, **how: jax_gpuops.gemm(x, x, x.astype("float32"), beta=1, **how),
            "supports c only for float16, bfloat16 and float32, with a result of the same dtype",
        ),
        *(
            (
                lambda x, name=name, **how: jax_gpuops.gemm(x, x, x, beta=1, **{name: True}, **how),
                "supports c only for factors that are not transposed",
            )
            for name in ("transpose_a", "transpose_b")
        ),
        (
            lambda x, **how: jax_gpuops.gemm(x[:, :0], x[:0], x, beta=1, **how),
            "supports c only for a depth k of at least 1",
        ),
        (lambda x, **how: jax_gpuops.gemm(x, x, alpha=2, **how), "supports only alpha = 1"),
    ],
)
def test_what_tensor_core_refuses(call, why, on_tensor_cores):
    with pytest.raises(ValueError, match=f"algorithm 'tensor_core' .*{why}"):
        call(jnp.ones((16, 16), "bfloat16"), **on_tensor_cores)


def test_tensor_core_refuses_float64(on_tensor_cores):
    x = np.ones((16, 16))
    with helpers.x64("float64"), pytest.raises(ValueError, match=r"'tensor_core' .*not float64"):
        jax_gpuops.matmul(x, x, **on_tensor_cores)


@pytest.mark.kernel
def test_tensor_core_refuses_addresses_at_run_time(on_tensor_cores):
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    x = jnp.ones((16, 16), "bfloat16")
    with (
        helpers.buffers_at(8),
        pytest.raises(jax.errors.JaxRuntimeError, match="requires arrays aligned to 16 bytes"),
    ):
        jax.block_until_ready(jax_gpuops.matmul(x, x, **on_tensor_cores))


def test_the_plan_prefers_tensor_cores(on_tensor_cores):
    how = {"implementation": on_tensor_cores["implementation"]}
    for m, n, k, dtype, expected in (
        (64, 64, 64, "bfloat16", ["wgmma_batched"]),
        (2048, 2048, 512, "bfloat16", ["tensor_core"]),
        (32, 32, 32, "bfloat16", ["coalesced"]),
        (512, 512, 512, "float32", ["tensor_core"]),
        (40, 128, 4096, "float32", ["parallel_split_k"]),
        (8, 128, 4096, "float32", ["fma_skinny"]),
        (2000, 2001, 513, "float16", ["tensor_core"]),
        (40, 128, 4096, "bfloat16", ["split_k"]),
        (8, 128, 4096, "bfloat16", ["skinny"]),
    ):
        assert jax_gpuops.plan("matmul", [(m, k), (k, n)], dtype, **how).algorithm in expected


# 8 bits


FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
DTYPES_OF_8_BITS = [
    *((dtype, result) for dtype in FLOAT8 for result in ("bfloat16", "float16", "float32")),
    ("int8", "int32"),
]
"""Of factors and of results."""
TILES_OF_8_BITS = {tile: TENSOR_CORE_TILES[tile] for tile in ((64, 128), (128, 256))}
FAST = ["default", "ANY_F8_ANY_F8_F32_FAST_ACCUM"]
PROMOTED = ["high", "highest", "ANY_F8_ANY_F8_F32"]


def assert_product_of_8_bits(actual, a, b, *, promoted):
    """Checks exact integers, and floats that are as exact as their sums.

    Each 32 products are cut off at 2**-13 of the largest one or of the sum so far, which is of the
    order of the sum of absolute values; where sums are promoted, so are 128 products alone, and the
    rest is float32.
    """
    actual = np.asarray(actual)
    if a.dtype == np.int8:
        exact = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
        np.testing.assert_array_equal(actual, exact)
        return
    k = a.shape[-1]
    a, b = helpers.exact(a), helpers.exact(b)
    exact, magnitude = a @ b, np.abs(a) @ np.abs(b)
    assert actual.shape == exact.shape
    steps = -(-k // 32)
    # A step cuts 32 products and the sum, and then the new sum, at 2**-13 of the largest of these.
    bound = 34 * 2.0**-13 * magnitude * (min(steps, 4) if promoted else steps)
    bound += (steps / 4 + 1) * np.finfo(np.float32).eps * magnitude
    if actual.dtype != np.float32:
        bound = bound + np.spacing(np.abs(exact).astype(actual.dtype)).astype(np.float64)
    assert np.all(np.abs(helpers.exact(actual) - exact) <= bound)
    relative = np.linalg.norm((helpers.exact(actual) - exact).astype(np.float64))
    relative /= np.linalg.norm(exact.astype(np.float64))
    typical = 1.4e-4 if promoted else 1.4e-4 + 2e-5 * k**0.5
    assert relative <= 2 * typical + (0 if actual.dtype == np.float32 else 2e-3)


def precisions_of(dtype):
    return ["default"] if dtype == "int8" else ["default", "highest"]


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("dtype", "result", "precision"),
    [(d, r, p) for d, r in DTYPES_OF_8_BITS for p in precisions_of(d)],
)
@pytest.mark.parametrize("tile", TILES_OF_8_BITS, ids=str)
def test_8_bits(tile, dtype, result, precision, on_tensor_cores):
    """Every kernel, with rows, columns and a depth that no tile divides."""
    m, n, k = TILES_OF_8_BITS[tile][on_tensor_cores["implementation"]]
    k += 152  # three stages, the last one not full
    a = helpers.factor_of_8_bits((m, k), dtype)
    b = helpers.factor_of_8_bits((k, n), dtype, seed=1)
    how = on_tensor_cores | {"precision": precision}
    y, config = helpers.recorded_dot(a, b, False, True, result, **how)
    assert y.dtype == result
    assert_product_of_8_bits(y, a, b, promoted=precision == "highest")
    assert (config["tile_rows"], config["tile_cols"]) == tile
    assert config["promotes"] == (precision == "highest")


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), [("float8_e4m3fn", "bfloat16"), ("int8", "int32")])
@pytest.mark.parametrize("share", ["", "a", "b"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "sizes", [(136, 272, 144), (131, 257, 129), (3, 5, 7), (16, 32, 1), (200, 128, 300)], ids=str
)
def test_layouts_of_8_bits(sizes, transpose_b, transpose_a, share, dtype, result, on_tensor_cores):
    """Factors are copied where k is not the contiguous dimension, or rows are no whole 16 bytes."""
    m, n, k = sizes
    a = helpers.factor_of_8_bits((3, m, k), dtype)
    b = helpers.factor_of_8_bits((3, k, n), dtype, seed=1)
    a, b = a[0] if share == "a" else a, b[0] if share == "b" else b
    left, right = helpers.stored(a, transpose_a), helpers.stored(b, transpose_b)
    with helpers.recorded(on_tensor_cores["implementation"]) as executions:
        y = helpers.dot(left, right, transpose_a, transpose_b, result, **on_tensor_cores)
        jax.block_until_ready(y)
    y = np.moveaxis(np.asarray(y), 1, 0) if share == "a" else y
    assert_product_of_8_bits(y, a, b, promoted=False)
    (execution,) = executions
    if share == "" and min(sizes) > 1:
        copied = execution["config"]["copies_a"], execution["config"]["copies_b"]
        assert copied == (transpose_a or k % 16 != 0, not transpose_b or k % 16 != 0)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_sums_of_8_bit_floats_over_a_long_depth(precision, dtype, on_tensor_cores):
    """On normal numbers, relative to the result, in the norm: as exact as XLA's on the same GPU."""
    m, n, k = 64, 48, 4096
    a, b = helpers.normal((m, k), dtype), helpers.normal((k, n), dtype, seed=1)
    how = on_tensor_cores | {"precision": precision, "preferred_element_type": "float32"}
    y = np.asarray(jax_gpuops.matmul(a, b, **how), np.float64)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    typical = 1.33e-3 if precision == "default" else 1.29e-4
    if dtype == "float8_e5m2":  # of whose products fewer bits are cut off
        typical *= 0.64
    assert 0.85 * typical < error < 1.15 * typical


@pytest.mark.kernel
@pytest.mark.parametrize("precision", [*FAST, *PROMOTED])
def test_precisions_of_8_bit_floats(precision, on_tensor_cores):
    """2**-14 is lost beside 1, where the tensor cores add both, and kept where float32 does."""
    a, b = np.zeros((8, 256), helpers.np_dtype("float8_e4m3fn")), np.ones((256, 8))
    a[:, 0], a[:, 200] = 1, 2.0**-7
    b[200] = 2.0**-7
    b = b.astype(a.dtype)
    how = on_tensor_cores | {"precision": precision, "preferred_element_type": "float32"}
    y = jax_gpuops.matmul(a, b, **how)
    np.testing.assert_array_equal(y, 1 + (2.0**-14 if precision in PROMOTED else 0))


def test_precisions_that_name_the_type_of_sums(on_tensor_cores):
    """ANY_F8_ANY_F8_ANY has sums of the result's type, and the kernels have those of float32."""
    x = jnp.ones((16, 16), "float8_e4m3fn")
    for precision in ("ANY_F8_ANY_F8_ANY", "ANY_F8_ANY_F8_ANY_FAST_ACCUM"):
        how = on_tensor_cores | {"precision": precision}
        y = jax_gpuops.matmul(x, x, preferred_element_type="float32", **how)
        np.testing.assert_array_equal(y, np.full((16, 16), 16))
        with pytest.raises(ValueError, match=f"precision ANY_F8_ANY_F8_F32, not {precision}"):
            jax_gpuops.matmul(x, x, preferred_element_type="bfloat16", **how)
    with pytest.raises(ValueError, match="precision BF16_BF16_F32, not ANY_F8_ANY_F8_F32"):
        jax_gpuops.matmul(
            x.astype("bfloat16"),
            x.astype("bfloat16"),
            precision="ANY_F8_ANY_F8_F32",
            **on_tensor_cores,
        )


@pytest.mark.kernel
@pytest.mark.parametrize("k", [256, 131072 + 128])
def test_sums_of_int8_wrap(k, on_tensor_cores):
    """2**31 becomes -2**31, as everywhere in int32."""
    if k > 1000 and on_tensor_cores["implementation"] == "interpret":
        m, n = 1, 8
    else:
        m, n = 40, 24
    a, b = np.full((m, k), -128, np.int8), np.full((n, k), -128, np.int8)
    y = helpers.dot(a, b, False, True, "int32", **on_tensor_cores)
    exact = np.int64(k) * 2**14
    np.testing.assert_array_equal(y, np.full((m, n), exact).astype(np.int32))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_special_values_of_8_bits_stay_in_their_row_and_column(precision, dtype, on_tensor_cores):
    a, b = helpers.normal((33, 130), dtype), helpers.normal((130, 37), dtype, seed=1)
    a[7, 0] = np.nan
    if dtype == "float8_e5m2":  # which has infinities
        a[3, 129], b[2, 36] = np.inf, -np.inf
    how = on_tensor_cores | {"precision": precision, "preferred_element_type": "float32"}
    y = jax_gpuops.matmul(a, b, **how)
    with np.errstate(invalid="ignore"):
        expected = a.astype(np.float32) @ b.astype(np.float32)
    for which in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(which(y), which(expected))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_value_of_8_bits(dtype, on_tensor_cores):
    """Subnormal ones included: each comes back from a product with 1."""
    x = np.arange(256, dtype=np.uint8).view(helpers.np_dtype(dtype)).reshape(16, 16)
    one = np.eye(16).astype(x.dtype)
    x = np.where(np.isfinite(x.astype(np.float32)), x, np.array(0, x.dtype))
    y = jax_gpuops.matmul(x, one, preferred_element_type="float32", **on_tensor_cores)
    np.testing.assert_array_equal(y, x.astype(np.float32))


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), DTYPES_OF_8_BITS)
def test_8_bits_without_depth_are_zero(dtype, result, on_tensor_cores):
    y = jax_gpuops.matmul(
        jnp.ones((8, 0), dtype),
        jnp.ones((0, 16), dtype),
        preferred_element_type=result,
        **on_tensor_cores,
    )
    assert y.dtype == result
    np.testing.assert_array_equal(y, np.zeros((8, 16)))


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), DTYPES_OF_8_BITS)
def test_every_algorithm_but_tensor_core_refuses_8_bits(dtype, result, on_tensor_cores):
    x = jnp.ones((8, 8), dtype)
    how = {"implementation": on_tensor_cores["implementation"], "preferred_element_type": result}
    assert np.all(np.asarray(jax_gpuops.matmul(x, x, **how)) == 8)
    for name in [a.name for a in jax_gpuops.algorithms("matmul") if a.name != "tensor_core"]:
        with pytest.raises(
            ValueError, match=f"algorithm '{name}' (does not support {dtype}|is CUDA only)"
        ):
            jax_gpuops.matmul(x, x, algorithm=name, **how)


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "result"), DTYPES_OF_8_BITS)
@pytest.mark.parametrize("sizes", [(131, 257, 129), (200, 512, 16), (3, 5, 7)], ids=str)
def test_results_of_8_bits_are_written_whole(sizes, dtype, result, on_tensor_cores):
    """Over a donated array, of NaN or of -1."""
    m, n, k = sizes
    a = helpers.factor_of_8_bits((m, k), dtype)
    b = helpers.factor_of_8_bits((k, n), dtype, seed=1)
    how = on_tensor_cores | {"preferred_element_type": result}

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def product(poison, a, b):
        del poison
        return jax_gpuops.matmul(a, b, **how)

    poison = jnp.full((m, n), -1 if result == "int32" else np.nan, result)
    assert_product_of_8_bits(product(poison, a, b), a, b, promoted=False)


@pytest.mark.parametrize("dtype", [*FLOAT8, "int8"])
def test_results_of_8_bits_have_to_be_asked_for(dtype, implementation):
    """JAX's own result would be of 8 bits too, which overflows; XLA computes it."""
    x = jnp.ones((8, 8), dtype)
    with pytest.raises(TypeError, match=f"a result of dtype {dtype} for .*preferred_element_type"):
        jax_gpuops.matmul(x, x, implementation=implementation)
    assert jax_gpuops.matmul(x, x).dtype == jnp.matmul(x, x).dtype == dtype
    with pytest.raises(TypeError, match=f"a result of dtype {dtype} "):
        jax_gpuops.dot_general(x, x, (((1,), (0,)), ((), ())), implementation=implementation)


def test_8_bits_of_two_dtypes_go_to_xla(implementation):
    a, b = jnp.ones((8, 8), "float8_e4m3fn"), jnp.ones((8, 8), "float8_e5m2")
    how = {"preferred_element_type": "float32"}
    np.testing.assert_array_equal(jax_gpuops.matmul(a, b, **how), np.full((8, 8), 8))
    with pytest.raises(TypeError, match="the same dtype, got float8_e4m3fn and float8_e5m2"):
        jax_gpuops.matmul(a, b, **how, implementation=implementation)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
@pytest.mark.parametrize("precision", ["default", "ANY_F8_ANY_F8_F32_FAST_ACCUM"])
def test_gradients_of_8_bit_floats(precision, result, dtype, on_tensor_cores):
    """The cotangent has the result's dtype, the other factor is converted to it, as in JAX."""
    a, b = helpers.normal((72, 40), dtype), helpers.normal((40, 136), dtype, seed=1)
    g = jnp.asarray(helpers.normal((72, 136), "bfloat16", seed=2)).astype(result)
    how = on_tensor_cores | {"precision": precision, "preferred_element_type": result}
    _, pull = jax.vjp(lambda a, b: jax_gpuops.matmul(a, b, **how), a, b)
    for actual, (left, right) in zip(
        pull(g), [(g, helpers.swap(b)), (helpers.swap(a), g)], strict=True
    ):
        assert actual.dtype == dtype
        exact = np.asarray(left).astype(np.float64) @ np.asarray(right).astype(np.float64)
        expected = exact.astype(np.float32).astype(actual.dtype)
        close = helpers.spacing(exact, actual.dtype)
        assert np.all(np.abs(helpers.exact(actual) - helpers.exact(expected)) <= close)


def test_tangents_of_int8(on_tensor_cores):
    """Integers have none; what is differentiated beside them has."""
    a, b = jnp.ones((8, 16), "int8"), jnp.ones((16, 8), "int8")
    how = on_tensor_cores | {"preferred_element_type": "int32"}

    def product(a, b):
        return jax_gpuops.matmul(a, b, **how)

    zeros = np.zeros(a.shape, jax.dtypes.float0), np.zeros(b.shape, jax.dtypes.float0)
    y, tangent = jax.jvp(product, (a, b), zeros)
    np.testing.assert_array_equal(y, np.full((8, 8), 16))
    assert tangent.dtype == jax.dtypes.float0
    gradient = jax.grad(lambda s: (s * product(a, b)).sum())(2.0)
    assert gradient == 16 * 64


@pytest.mark.kernel
@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 0)])
def test_vmap_of_8_bits(axes, on_tensor_cores):
    a, b = (
        np.moveaxis(helpers.factor_of_8_bits((3, 24, 24), "int8", seed), 0, axis)
        if axis is not None
        else helpers.factor_of_8_bits((24, 24), "int8", seed)
        for seed, axis in enumerate(axes)
    )
    how = on_tensor_cores | {"preferred_element_type": "int32"}
    y = jax.vmap(lambda a, b: jax_gpuops.matmul(a, b, **how), axes)(a, b)
    expected = jax.vmap(lambda a, b: jnp.matmul(a, b, preferred_element_type="int32"), axes)(a, b)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("dtype", "result", "precision"),
    [
        ("float8_e4m3fn", "bfloat16", "default"),
        ("float8_e4m3fn", "bfloat16", "highest"),
        ("int8", "int32", "default"),
    ],
)
def test_8_bits_in_any_order_of_threads(dtype, result, precision, on_tensor_cores):
    if on_tensor_cores["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    a = helpers.factor_of_8_bits((2, 200, 272), dtype)
    b = helpers.factor_of_8_bits((2, 272, 320), dtype, seed=1)
    how = on_tensor_cores | {"precision": precision, "preferred_element_type": result}
    helpers.under_each_schedule(
        lambda: jax_gpuops.matmul(a, b, **how), [(seed, {}) for seed in range(1, 4)]
    )


# Few rows or columns


@pytest.fixture
def skinny(implementation):
    """The options of a product by skinny, which not every GPU can run."""
    return helpers.options("matmul", "skinny", implementation, [(8, 8), (8, 8)], "bfloat16")


def skinny_tile(config, m, n):
    """Rows of the large factor and columns of the skinny one, and whether each is read in packs."""
    if m > n:
        return config["tile_rows"], config["tile_cols"], config["pack_a"], config["pack_b"]
    return config["tile_cols"], config["tile_rows"], config["pack_b"], config["pack_a"]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", [False, True], ids=["16 bits", "float32"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(1, 72, 264), (16, 200, 1032), (136, 8, 512), (200, 1, 520), (72, 10, 328), (2, 40, 4360)],
    ids=str,
)
def test_skinny(sizes, transpose_b, transpose_a, wide, dtype, skinny):
    """Whole packs of both factors, as they may be stored, with rows and a depth left over."""
    m, n, k = sizes
    a, b = helpers.normal((m, k), dtype), helpers.normal((k, n), dtype, seed=1)
    y, config = helpers.recorded_dot(
        a, b, transpose_a, transpose_b, "float32" if wide else dtype, **skinny
    )
    assert y.dtype == ("float32" if wide else dtype)
    helpers.assert_matmul(y, a, b)
    _, cols, packs_large, packs_skinny = skinny_tile(config, m, n)
    assert packs_large
    assert packs_skinny
    skinny_is_deep = min(m, n) == 1 or (transpose_b if m > n else not transpose_a)
    assert cols == (8 if skinny_is_deep and min(m, n) <= 8 else 16)


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1),
        (3, 5, 7),
        (1, 131, 517),
        (16, 131, 261),
        (131, 7, 1029),
        (5, 136, 259),
        (7, 72, 64),
    ],
    ids=str,
)
def test_skinny_of_rows_without_whole_packs(sizes, transpose_b, transpose_a, skinny):
    m, n, k = sizes
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "bfloat16", **skinny)
    helpers.assert_matmul(y, a, b)
    large_is_deep = max(m, n) == 1 or (not transpose_a if m > n else transpose_b)
    _, _, packs_large, _ = skinny_tile(config, m, n)
    assert packs_large == ((k if large_is_deep else max(m, n)) % 8 == 0)


@pytest.mark.kernel
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("m", [6, 8, 11])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_skinny_of_every_tile(transpose_a, m, rows, transpose_b, skinny):
    """Larger tiles where there are enough for each multiprocessor: the host simulates 4."""
    n = {"interpret": {16: 40, 32: 104, 64: 776}, "cuda": {16: 2040, 32: 4104, 64: 33000}}
    n, k = n[skinny["implementation"]][rows], 328
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    y, config = helpers.recorded_dot(a, b, transpose_a, transpose_b, "float32", **skinny)
    helpers.assert_matmul(y, a, b)
    if skinny["implementation"] == "interpret":  # GPUs have various numbers of multiprocessors
        assert skinny_tile(config, m, n)[0] == rows


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "sizes", [(72, 40, 264), (40, 104, 200), (24, 200, 1032), (67, 35, 133)], ids=str
)
def test_skinny_of_more_columns_than_a_block_has(sizes, transpose_b, transpose_a, dtype, skinny):
    m, n, k = sizes
    a, b = helpers.normal((m, k), dtype), helpers.normal((k, n), dtype, seed=1)
    y, _ = helpers.recorded_dot(a, b, transpose_a, transpose_b, dtype, **skinny)
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("share", ["", "a", "b"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("sizes", [(4, 72, 104), (67, 3, 101), (9, 72, 264)], ids=str)
def test_skinny_of_batches(sizes, transpose_b, transpose_a, share, skinny):
    m, n, k = sizes
    a, b = helpers.normal((3, m, k), "bfloat16"), helpers.normal((3, k, n), "bfloat16", 1)
    helpers.assert_gemm_of_batch(a, b, share, transpose_a, transpose_b, **skinny)


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(5, 72, 264), (5, 67, 261)], ids=["packs", "elements"])
def test_special_values_stay_in_their_row_and_column_of_skinny(sizes, skinny):
    """Neither what fills tiles up nor another row's element meets an infinity."""
    m, n, k = sizes
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    a[3, k - 1], b[2, n - 1], a[4, 0] = np.inf, -np.inf, np.nan
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            y = helpers.dot(
                helpers.stored(a, transpose_a),
                helpers.stored(b, transpose_b),
                transpose_a,
                transpose_b,
                "float32",
                **skinny,
            )
            with np.errstate(invalid="ignore"):
                expected = a.astype(np.float32) @ b.astype(np.float32)
            for kind in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(kind(y), kind(expected))


@pytest.mark.kernel
def test_skinny_without_depth_is_zero(skinny):
    y = jax_gpuops.matmul(jnp.ones((8, 0), "bfloat16"), jnp.ones((0, 72), "bfloat16"), **skinny)
    np.testing.assert_array_equal(y, np.zeros((8, 72)))


@pytest.mark.kernel
@pytest.mark.parametrize("offset", [2, 8])
def test_skinny_at_any_address(offset, skinny):
    """What begins within a pack is read element by element."""
    if skinny["implementation"] != "interpret":
        pytest.skip("JAX aligns the buffers of a GPU")
    a, b = helpers.normal((8, 264), "bfloat16"), helpers.normal((264, 72), "bfloat16", seed=1)
    with helpers.buffers_at(offset):
        y = np.asarray(jax_gpuops.matmul(a, b, **skinny))
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("sizes", [(3, 72, 1032), (72, 12, 1029), (72, 12, 1032)], ids=str)
def test_skinny_in_any_order_of_threads(sizes, skinny):
    """The warps' sums are added in one order, whichever warp is done first."""
    if skinny["implementation"] != "interpret":
        pytest.skip("the GPU orders its threads itself; compute-sanitizer looks for races there")
    m, n, k = sizes
    a, b = helpers.normal((m, k), "bfloat16"), helpers.normal((k, n), "bfloat16", seed=1)
    y = helpers.under_each_schedule(
        lambda: jax_gpuops.matmul(a, b, **skinny),
        [(1, {}), (2, {}), (3, {"warp": 0}), (4, {"warp": 5})],
    )
    helpers.assert_matmul(y, a, b)


@pytest.mark.kernel
def test_repeats_of_skinny_are_bit_identical(skinny):
    a, b = helpers.normal((9, 4104), "bfloat16"), helpers.normal((4104, 264), "bfloat16", seed=1)
    runs = [
        np.asarray(jax_gpuops.matmul(a, b, preferred_element_type=jnp.float32, **skinny))
        for _ in range(3)
    ]
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[1].view(np.int32))
    np.testing.assert_array_equal(runs[0].view(np.int32), runs[2].view(np.int32))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda x, **how: jax_gpuops.matmul(x.astype("float32"), x, **how), "not float32"),
        (lambda x, **how: jax_gpuops.gemm(x, x, x, beta=1, **how), "does not support c"),
        (lambda x, **how: jax_gpuops.gemm(x, x, alpha=2, **how), "supports only alpha = 1"),
        (lambda x, **how: jax_gpuops.matmul(x, x, **how), "supports at most 1024 rows or columns"),
    ],
)
def test_what_skinny_refuses(call, why, skinny):
    with pytest.raises(ValueError, match=f"algorithm 'skinny' .*{why}"):
        call(jnp.ones((1025, 1025), "bfloat16"), **skinny)


def test_the_plan_prefers_skinny_for_few_rows_or_columns(skinny):
    on_gpu = skinny["implementation"] == "cuda"
    for m, n, k, dtype, expected in (
        (1, 2048, 2048, "bfloat16", ["skinny"]),
        (16, 2048, 2048, "float16", ["skinny"]),
        (2048, 16, 2048, "float16", ["skinny"]),
        (3, 2047, 2047, "float16", ["skinny"]),
        # No depth for eight warps.
        (8, 4096, 128, "bfloat16", ["tensor_core", "split_k", "wgmma_batched"]),
        (33, 2048, 2048, "bfloat16", ["tensor_core", "split_k"]),
        (32, 4096, 2048, "bfloat16", ["tensor_core", "split_k"]),
        (256, 256, 256, "bfloat16", ["skinny" if on_gpu else "tensor_core"]),
        (40, 128, 4096, "bfloat16", ["split_k"]),
        # Small in both m and n: at most one block for each multiprocessor, or two with less depth.
        (32, 64, 2048, "bfloat16", ["skinny"]),
        (48, 64, 1032, "bfloat16", ["skinny"] if on_gpu else ["tensor_core", "split_k"]),
        (999, 32, 1280, "bfloat16", ["skinny"] if on_gpu else ["tensor_core", "parallel_split_k"]),
        (49, 1000, 2048, "bfloat16", ["parallel_split_k" if on_gpu else "split_k"]),
        (32, 60, 300, "bfloat16", ["skinny"]),  # others copy b
        # One block of skinny, but eight of a GPU's for split_k: the host's simulates too few.
        (8, 16, 1 << 20, "bfloat16", ["split_k" if on_gpu else "skinny"]),
        (1, 64, 256, "bfloat16", ["coalesced"]),
        (1, 2048, 2048, "float32", ["fma_skinny"]),
    ):
        plan = jax_gpuops.plan(
            "matmul", [(m, k), (k, n)], dtype, implementation=skinny["implementation"]
        )
        assert plan.algorithm in expected, (m, n, k)


# The functions


@pytest.mark.kernel
@hypothesis.given(
    data=st.data(),
    sizes=st.tuples(*[st.integers(1, 12)] * 3),
    dtype=st.sampled_from(helpers.FLOATS),
    algorithm=st.sampled_from([None, *LADDER]),
)
@hypothesis.settings(max_examples=50, deadline=None)
def test_matmul_of_any_batch(data, sizes, dtype, algorithm, implementation):
    m, n, k = sizes
    batch = data.draw(st.lists(st.integers(1, 3), max_size=3))

    def broadcastable():
        kept = batch[data.draw(st.integers(0, len(batch))) :]
        return [data.draw(st.sampled_from([1, size])) for size in kept]

    vectors = data.draw(st.sampled_from(["", "a", "b", "ab"]))
    a = helpers.normal((k,) if "a" in vectors else (*broadcastable(), m, k), dtype)
    b = helpers.normal((k,) if "b" in vectors else (*broadcastable(), k, n), dtype, seed=1)
    with helpers.x64(dtype):
        y = jax_gpuops.matmul(a, b, implementation=implementation, algorithm=algorithm)
        assert y.dtype == a.dtype
        assert y.shape == jnp.matmul(a, b).shape
        helpers.assert_matmul(y, a, b)


DIMENSION_NUMBERS = {
    "plain": ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "transposed": ((4, 3), (5, 4), (((0,), (1,)), ((), ()))),
    "batch": ((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
    "attention": ((2, 5, 3, 4), (2, 6, 3, 4), ATTENTION),
    "two contracted": ((5, 2, 3), (2, 3, 4), (((1, 2), (0, 1)), ((), ()))),
    "contracted in another order": ((5, 2, 3), (3, 2, 4), (((1, 2), (1, 0)), ((), ()))),
    "contracted apart": ((2, 5, 3), (2, 3, 4), (((0, 2), (0, 1)), ((), ()))),
    "split left": ((2, 4, 3), (4, 5), (((1,), (0,)), ((), ()))),
    "split right": ((3, 4), (2, 4, 5), (((1,), (1,)), ((), ()))),
    "both split": ((2, 4, 3), (6, 4, 5), (((1,), (1,)), ((), ()))),
    "batch inside": ((3, 2, 4), (4, 5, 2), (((2,), (0,)), ((1,), (2,)))),
    "outer product": ((3,), (4,), (((), ()), ((), ()))),
    "inner product": ((4,), (4,), (((0,), (0,)), ((), ()))),
    "scalars": ((), (), (((), ()), ((), ()))),
    "only a batch": ((3,), (3,), (((), ()), ((0,), (0,)))),
}


def test_dot_general_takes_an_int_for_one_dim(implementation):
    """As JAX does, and a precision in an array."""
    a, b = helpers.normal((3, 4), "float32"), helpers.normal((4, 5), "float32", seed=1)
    numbers, precision = ((1, 0), ((), ())), np.array("highest")
    y = jax_gpuops.dot_general(a, b, numbers, precision, implementation=implementation)
    expected = jax.lax.dot_general(a, b, numbers, "highest")
    np.testing.assert_allclose(y, expected, 1e-5, 1e-6)


@pytest.mark.parametrize("name", DIMENSION_NUMBERS)
def test_dot_general_and_its_derivatives(name, implementation):
    a_shape, b_shape, dimension_numbers = DIMENSION_NUMBERS[name]
    a, b = helpers.normal(a_shape, "float32"), helpers.normal(b_shape, "float32", seed=1)
    a, b = jnp.asarray(a), jnp.asarray(b)

    def ours(a, b):
        return jax_gpuops.dot_general(a, b, dimension_numbers, implementation=implementation)

    def stock(a, b):
        return lax.dot_general(a, b, dimension_numbers, precision="highest")

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(function, operands, tangents, cotangent):
        jvp = jax.jvp(function, operands, tangents)
        return jvp, jax.vjp(function, *operands)[1](cotangent)

    y = jax.eval_shape(ours, a, b)
    arguments = (a, b), (a + 1, b - 1), helpers.normal(y.shape, "float32", seed=2)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        derivatives(ours, *arguments),
        derivatives(stock, *arguments),
    )


@pytest.mark.parametrize("name", [n for n in DIMENSION_NUMBERS if n != "scalars"])
@pytest.mark.parametrize("mapped", ["a", "b", "ab"])
def test_vmap_of_dot_general(name, mapped, implementation):
    a_shape, b_shape, dimension_numbers = DIMENSION_NUMBERS[name]
    axes = (-1 if "a" in mapped else None, 0 if "b" in mapped else None)
    a = helpers.normal((*a_shape, 3) if "a" in mapped else a_shape, "float32")
    b = helpers.normal((3, *b_shape) if "b" in mapped else b_shape, "float32", seed=1)

    def ours(a, b):
        return jax_gpuops.dot_general(a, b, dimension_numbers, implementation=implementation)

    def stock(a, b):
        return lax.dot_general(a, b, dimension_numbers, precision="highest")

    np.testing.assert_allclose(
        jax.jit(jax.vmap(ours, axes))(a, b),
        jax.jit(jax.vmap(stock, axes))(a, b),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("axes", [(0, None, None), (None, 1, 0), (0, 0, None), (None, None, 2)])
def test_vmap_of_gemm(axes, implementation):
    shapes = ((3, 4), (4, 5), (3, 5))
    a, b, c = (
        helpers.normal(s if d is None else (*s[:d], 2, *s[d:]), "float32", seed)
        for seed, (s, d) in enumerate(zip(shapes, axes, strict=True))
    )
    y = jax.vmap(
        lambda a, b, c: jax_gpuops.gemm(a, b, c, alpha=2, beta=3, implementation=implementation),
        axes,
    )(a, b, c)
    expected = jax.vmap(lambda a, b, c: 2 * jnp.matmul(a, b, precision="highest") + 3 * c, axes)(
        a, b, c
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.any_version
@pytest.mark.parametrize("algorithm", [None, "shared"])
def test_derivatives_of_any_order(algorithm, implementation):
    a, b = helpers.normal((3, 4), "float32"), helpers.normal((4, 2), "float32", seed=1)
    c = helpers.normal((3, 2), "float32", seed=2)
    check_grads(
        lambda a, b, c: jax_gpuops.gemm(
            a, b, c, alpha=0.5, beta=2, implementation=implementation, algorithm=algorithm
        ),
        (a, b, c),
        order=2,
        modes=["fwd", "rev"],
        atol=1e-2,
        rtol=1e-2,
        eps=1e-2,
    )


def test_the_backward_pass_runs_our_kernels(implementation):
    def loss(a, b):
        return jax_gpuops.matmul(a, b, implementation=implementation, algorithm="shared").sum()

    calls = helpers.custom_calls(jax.grad(loss, (0, 1)), jnp.ones((8, 4)), jnp.ones((4, 6)))
    assert sum(call.startswith("jax_gpuops_gemm_v2") for call in calls) >= 2


@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_gradients_of_16_bit_operands(preferred, implementation):
    a, b = helpers.normal((5, 6), "bfloat16"), helpers.normal((6, 7), "bfloat16", seed=1)

    def gradients(matmul, **kwargs):
        def loss(a, b):
            y = matmul(a, b, preferred_element_type=preferred, **kwargs)
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1))(a, b)

    ours = gradients(jax_gpuops.matmul, implementation=implementation)
    for actual, expected in zip(ours, gradients(jnp.matmul), strict=True):
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=1e-1
        )


@pytest.mark.parametrize(
    "how",
    [{"batch_invariant": True}, {"algorithm": "tensor_core"}, {"algorithm": "skinny"}],
    ids=str,
)
def test_gradients_that_the_algorithm_of_the_call_does_not_support(how, implementation):
    """These multiply the float32 cotangent at the highest precision, the call 16-bit factors."""
    a, b = helpers.normal((8, 64), "bfloat16"), helpers.normal((64, 48), "bfloat16", seed=1)

    def gradients(matmul, **kwargs):
        def loss(a, b):
            y = matmul(a, b, precision="highest", preferred_element_type="float32", **kwargs)
            return (y**2).sum()

        return jax.grad(loss, (0, 1))(a, b)

    ours = gradients(jax_gpuops.matmul, implementation=implementation, **how)
    for actual, expected in zip(ours, gradients(jnp.matmul), strict=True):
        np.testing.assert_allclose(
            actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2
        )


def test_gemm_is_linear_in_c_and_in_each_factor(implementation):
    a, b = jnp.asarray(helpers.normal((3, 4), "float32")), jnp.ones((4, 2))
    transposed = jax.linear_transpose(
        lambda a: jax_gpuops.gemm(a, b, alpha=2, implementation=implementation), a
    )
    np.testing.assert_allclose(transposed(jnp.ones((3, 2)))[0], np.full((3, 4), 4.0))


def test_shared_matrices_are_not_copied(implementation):
    """A left matrix that a batch shares reaches the kernel once, a right one joins the rows."""

    def hlo(a, b):
        function = lambda a, b: jax_gpuops.matmul(a, b, implementation=implementation)  # noqa: E731
        return jax.jit(function).lower(jnp.zeros(a), jnp.zeros(b)).compile().as_text()

    for text in (hlo((16, 8), (5, 8, 12)), hlo((5, 16, 8), (8, 12)), hlo((5, 16, 8), (5, 8, 12))):
        assert "jax_gpuops_gemm_v2" in text
        for move in (" copy(", " transpose(", " broadcast(", " fusion("):
            assert move not in text


def test_transposes_reach_the_kernel_as_flags(implementation):
    def function(a, b):
        return jax_gpuops.dot_general(a, b, (((0,), (1,)), ((), ())), implementation=implementation)

    text = jax.jit(function).lower(jnp.zeros((8, 16)), jnp.zeros((12, 8))).compile().as_text()
    assert "transpose_a = true" in text
    assert "transpose_b = true" in text
    assert " transpose(" not in text
    assert " copy(" not in text


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((8, 4), (4, 6)),
        ((3, 8, 4), (3, 4, 6)),
        ((8, 4), (3, 4, 6)),
        ((3, 8, 4), (4, 6)),
        ((4,), (4,)),
    ],
)
def test_none_is_the_operation_that_jnp_uses(a, b):
    """Also in programs over several devices, where merged dims would not shard."""

    def operations(function):
        text = jax.jit(function).lower(jnp.zeros(a), jnp.zeros(b)).as_text()
        lines = [line.split(" = ", 1)[1] for line in text.splitlines() if "stablehlo." in line]
        return [line.split("%")[0] + line.split(":", 1)[1] for line in lines]

    def ours(a, b):
        return jax_gpuops.matmul(a, b)

    assert operations(ours) == operations(jnp.matmul)


def test_none_keeps_precision_and_result_type():
    def function(a, b):
        return jax_gpuops.dot_general(a, b, (((1,), (0,)), ((), ())), "highest", jnp.float32)

    text = jax.jit(function).lower(*[jnp.zeros((4, 4), jnp.bfloat16)] * 2).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text
    assert "-> tensor<4x4xf32>" in text


def test_none_uses_the_precision_configured_where_it_was_called():
    x = jnp.zeros((4, 4))
    with jax.default_matmul_precision("highest"):
        traced = jax.jit(lambda x: jax_gpuops.matmul(x, x)).trace(x)
    assert "precision = [HIGHEST, HIGHEST]" in traced.lower().as_text()


@pytest.mark.parametrize(
    ("precisions", "name"),
    [
        ((None, "default", lax.Precision.DEFAULT, ["default", "default"]), "DEFAULT"),
        (("highest", "float32", lax.Precision.HIGHEST, ("highest", "highest")), "HIGHEST"),
        (("high", "tensorfloat32"), "HIGH"),
        ((("default", "high"), (lax.Precision.DEFAULT, lax.Precision.HIGH)), "HIGH"),
        (("F32_F32_F32", lax.DotAlgorithmPreset.F32_F32_F32), "F32_F32_F32"),
    ],
)
def test_a_problem_names_its_precision_in_one_way(precisions, name, implementation):
    """However the user said it: as an argument or in the configuration."""
    x = jnp.ones((4, 4))

    def problem(precision):
        jaxpr = jax.make_jaxpr(
            lambda x: jax_gpuops.matmul(x, x, precision=precision, implementation=implementation)
        )(x)
        ((primitive, avals, params),) = _plan._calls(jaxpr.jaxpr)
        params = {k: v for k, v in params.items() if k not in ("implementation", "algorithm")}
        return _primitive.KERNELS[primitive].problem(*avals, **params)

    assert {problem(precision)["precision"] for precision in precisions} == {name}
    if isinstance(precisions[0], str):
        with jax.default_matmul_precision(precisions[0]):
            assert problem(None)["precision"] == name


# Contracts


@pytest.mark.kernel
@pytest.mark.parametrize("alpha", [0, 2])
def test_zero_factors_are_not_read(alpha, implementation):
    a, b = jnp.full((4, 4), np.nan if alpha == 0 else 1.0), jnp.ones((4, 4))
    c = jnp.full((4, 4), np.nan)
    for used in (implementation, "xla"):
        y = jax_gpuops.gemm(a, b, c, alpha=alpha, beta=0, implementation=used)
        np.testing.assert_array_equal(y, np.full((4, 4), 4.0 * alpha))
    y = jax_gpuops.gemm(a, b, b, alpha=alpha, beta=3, implementation=implementation)
    np.testing.assert_array_equal(y, np.full((4, 4), 4.0 * alpha + 3))


@pytest.mark.kernel
@pytest.mark.parametrize("shapes", [((3, 0), (0, 4)), ((0, 3), (3, 4)), ((2, 3, 0), (2, 0, 4))])
def test_empty_arrays_as_in_jax(shapes, implementation):
    a, b = map(jnp.zeros, shapes)
    y = jax_gpuops.matmul(a, b, implementation=implementation)
    np.testing.assert_array_equal(y, jnp.matmul(a, b))
    c = jnp.ones(y.shape)
    y = jax_gpuops.gemm(a, b, c, beta=2, implementation=implementation)
    np.testing.assert_array_equal(y, 2 * c)


@pytest.mark.parametrize("c_shape", [(2, 3, 5), (3, 5), (5,), (2, 1, 1), ()])
@pytest.mark.parametrize("a_shape", [(3, 4), (2, 3, 4)])
def test_c_broadcasts_to_the_result(c_shape, a_shape, implementation):
    a, b = helpers.normal(a_shape, "float32"), helpers.normal((2, 4, 5), "float32", seed=1)
    c = helpers.normal(c_shape, "float32", seed=2)
    y = jax_gpuops.gemm(a, b, c, beta=1.5, implementation=implementation)
    np.testing.assert_allclose(y, a @ b + 1.5 * c, rtol=1e-5, atol=1e-5)


def test_signatures_are_those_of_upstream():
    for ours, stock in (
        (jax_gpuops.matmul, jnp.matmul),
        (jax_gpuops.dot_general, lax.dot_general),
    ):
        mine = list(inspect.signature(ours).parameters.values())
        theirs = list(inspect.signature(stock).parameters.values())
        shape = lambda p: (p.name, p.kind, p.default)  # noqa: E731
        assert list(map(shape, mine[: len(theirs)])) == list(map(shape, theirs))
        added = mine[len(theirs) :]
        assert [p.name for p in added] == ["batch_invariant", "implementation", "algorithm"]
        assert all(p.kind is p.KEYWORD_ONLY for p in added)


def test_what_kernels_do_not_take_goes_to_xla(implementation):
    integers = jnp.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(jax_gpuops.matmul(integers, integers.T), integers @ integers.T)
    with pytest.raises(TypeError, match="got int32 and int32"):
        jax_gpuops.matmul(integers, integers.T, implementation=implementation)
    x = jnp.ones((2, 2))
    y = jax_gpuops.dot_general(x, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float16)
    assert y.dtype == jnp.float16
    with pytest.raises(TypeError, match="a result of dtype float16 for operands of dtype float32"):
        jax_gpuops.matmul(x, x, preferred_element_type=jnp.float16, implementation=implementation)
    with pytest.raises(ValueError, match="multiply float32 with precision F32_F32_F32"):
        jax_gpuops.matmul(
            x,
            x,
            precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
            implementation=implementation,
        )
    for precision in (None, "highest", lax.Precision.HIGH, ("default", "high"), "F32_F32_F32"):
        y = jax_gpuops.matmul(x, x, precision=precision, implementation=implementation)
        np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x, i: jax_gpuops.matmul(x, x, implementation=i), TypeError, "contracting dimens"),
        (lambda x, i: jax_gpuops.matmul(x, 2.0, implementation=i), ValueError, "ndim at least 1"),
        (lambda x, i: jax_gpuops.matmul([1.0], x, implementation=i), TypeError, "a must be an arr"),
        (
            lambda x, i: jax_gpuops.matmul(x, x.T, implementation=i, algorithm="fast"),
            ValueError,
            "'fast' is unknown; known are naive",
        ),
        (
            lambda x, i: jax_gpuops.matmul(x, x.T, implementation="interpret", algorithm="cublas"),
            ValueError,
            "'cublas' is CUDA only",
        ),
        (
            lambda x, i: jax_gpuops.matmul(x, x.T, out_sharding=P(None, None), implementation=i),
            ValueError,
            "shard_map",
        ),
        (lambda x, i: jax_gpuops.gemm(x, x.T, beta=1, implementation=i), ValueError, "needs the"),
        (
            lambda x, i: jax_gpuops.gemm(x, x.T, alpha=x[0, 0], implementation=i),
            TypeError,
            "alpha must be a Python number",
        ),
        (
            lambda x, i: jax_gpuops.gemm(x, x.T, x, beta=1, implementation=i),
            ValueError,
            r"c of shape \(2, 3\) does not broadcast to the result's shape \(2, 2\)",
        ),
        (
            lambda x, i: jax_gpuops.dot_general(x, x, (((1.5,), (1,)), ((), ())), implementation=i),
            TypeError,
            "dimension_numbers must be .* sequence of ints or an int, got",
        ),
        (
            lambda x, i: jax_gpuops.dot_general(x, x, None, implementation=i),
            TypeError,
            "dimension_numbers must be .* got None",
        ),
        (lambda x, i: jax_gpuops.gemm(x[0], x.T, implementation=i), ValueError, "two dimensions"),
        (
            lambda x, i: jax_gpuops.gemm(x, x, transpose_a="no", implementation=i),
            TypeError,
            "transpose_a must be True or False, got 'no'",
        ),
        (
            lambda x, i: jax_gpuops.gemm(x, x, transpose_b=1, implementation=i),
            TypeError,
            "transpose_b must be True or False, got 1",
        ),
        (
            lambda x, i: jax_gpuops.gemm(x, x.T, transpose_b=True, implementation=i),
            TypeError,
            r"gemm takes a of shape \(..., m, k\) and b of shape \(..., n, k\), got \(2, 3\) and",
        ),
        (
            lambda x, i: jax_gpuops.gemm(x, x, transpose_a=True, implementation=i, beta=1, c=1j),
            TypeError,
            "gemm kernels do not support a result of dtype complex64 .* float32, only float32",
        ),
        (
            lambda x, i: jax_gpuops.gemm(x.astype(int), x.T, implementation=i),
            TypeError,
            "a is of dtype int32",
        ),
        (
            lambda x, i: jax_gpuops.gemm(
                jnp.ones((2, 3, 4)), jnp.ones((3, 4, 2)), implementation=i
            ),
            ValueError,
            "do not broadcast",
        ),
    ],
)
def test_bad_input_is_named_at_trace_time(call, error, text, implementation):
    with pytest.raises(error, match=text):
        jax.jit(lambda x: call(x, implementation)).trace(jnp.zeros((2, 3)))


X8, X32 = jnp.ones((8, 8), "float8_e4m3fn"), jnp.ones((8, 8))


@pytest.mark.parametrize("precision", ["best", 1, ("high", "best"), ("high", "high", "high")])
@pytest.mark.parametrize(
    "call",
    [
        functools.partial(jax_gpuops.linear, X32, X32),
        functools.partial(jax_gpuops.glu, X32, X32, X32),
        functools.partial(jax_gpuops.scaled_matmul, X8, X8, 1.0, 1.0),
        functools.partial(jax_gpuops.linear_cross_entropy, X32, X32, np.arange(8)),
        functools.partial(jax_gpuops.matmul, X32, X32, batch_invariant=True),
    ],
    ids=lambda call: call.func.__name__,
)
@pytest.mark.parametrize("named", [True, False])
def test_what_is_no_precision_is_refused(call, precision, named, implementation):
    with (
        jax_gpuops.use(implementation if named else None),
        pytest.raises(ValueError, match=r"precision must be None, a .* or its name, a pair"),
    ):
        jax.eval_shape(lambda: call(precision=precision))


def test_an_algorithm_of_jax_without_a_name_goes_to_xla(implementation):
    algorithm = jax.lax.DotAlgorithm(np.float32, np.float32, np.float32)

    def lowered(matmul, **how):
        traced = jax.jit(lambda x: matmul(x, x, precision=algorithm, **how)).trace(X32)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    (line,) = (each for each in lowered(jnp.matmul).splitlines() if "dot_general" in each)
    assert "algorithm = <lhs_precision_type = f32" in line
    for function in (jax_gpuops.matmul, jax_gpuops.linear):
        assert line.partition("algorithm")[2] in lowered(function)
        with pytest.raises(ValueError, match="no precision without a preset, such as"):
            lowered(function, implementation=implementation)


def test_plan_says_what_runs(implementation):
    plan = jax_gpuops.plan(
        "matmul",
        [(2048, 64), (64, 2048)],
        "float32",
        precision="F32_F32_F32",
        implementation=implementation,
    )
    assert plan.implementation == implementation
    assert plan.algorithm in ("double_buffered", "fma_pipelined", "fma_sliced")
    plan = jax_gpuops.plan("matmul", [(4, 4), (4, 4)], "float32", implementation=implementation)
    assert plan.algorithm == "coalesced"


# Several devices


@pytest.fixture
def mesh():
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    return np.array(jax.devices()[:4]).reshape(2, 2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_arrays(axis_type, mesh, implementation):
    mesh = Mesh(mesh, ("d", "t"), axis_types=(axis_type, axis_type))
    a = jax.device_put(helpers.normal((8, 4), "float32"), NamedSharding(mesh, P("d", None)))
    b = jax.device_put(helpers.normal((4, 6), "float32", 1), NamedSharding(mesh, P(None, "t")))
    with jax.set_mesh(mesh):
        y = jax.jit(jax_gpuops.matmul)(a, b)
        expected = jax.jit(jnp.matmul)(a, b)
        np.testing.assert_allclose(y, expected, rtol=1e-5)
        assert y.sharding.is_equivalent_to(expected.sharding, 2)
        with pytest.raises(ValueError, match="shard_map"):
            jax.jit(lambda a, b: jax_gpuops.matmul(a, b, implementation=implementation))(a, b)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(check_vma, mesh, implementation):
    mesh = Mesh(mesh, ("d", "t"))
    a, b = helpers.normal((8, 4), "float32"), helpers.normal((4, 6), "float32", seed=1)

    def loss(matmul):
        mapped = jax.shard_map(
            matmul,
            mesh=mesh,
            in_specs=(P("d", None), P(None, None)),
            out_specs=P("d", None),
            check_vma=check_vma,
        )
        return lambda a, b: (mapped(a, b) ** 2).sum()

    ours = loss(lambda a, b: jax_gpuops.matmul(a, b, implementation=implementation))
    actual = jax.jit(jax.grad(ours, (0, 1)))(a, b)
    expected = jax.jit(jax.grad(loss(jnp.matmul), (0, 1)))(a, b)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_mixed_dtypes_with_a_preferred_type_as_in_jax(implementation):
    """jnp.matmul does not promote the operands then: 1.5 becomes 1 in int32, as it asks for."""
    a, b = jnp.ones((1, 2), jnp.bfloat16) * 1.5, jnp.ones((2, 1)) * 1.5
    arguments = {"preferred_element_type": "int32"}
    np.testing.assert_array_equal(
        jax_gpuops.matmul(a, b, **arguments), jnp.matmul(a, b, **arguments)
    )
    with pytest.raises(TypeError, match="the same dtype, got bfloat16 and float32"):
        jax_gpuops.matmul(a, b, **arguments, implementation=implementation)


def test_gemm_with_an_addend_of_symbolic_shape():
    m, k, n = jax.export.symbolic_shape("m, k, n")
    shapes = [(m, k), (k, n), (n,)]
    exported = jax.export.export(
        jax.jit(lambda a, b, c: jax_gpuops.gemm(a, b, c, beta=1.0)),
    )(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    a, b, c = helpers.normal((3, 4), "float32"), helpers.normal((4, 5), "float32"), np.ones(5)
    y = exported.call(a, b, c.astype(np.float32))
    np.testing.assert_allclose(y, a @ b + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "bfloat16", "float32"])
def test_export_with_symbolic_shapes(dtype, implementation):
    """Also of what only tensor cores take, which read copies of rows that are no 16 bytes."""
    if why := helpers.refusal("matmul", "tensor_core", [(8, 8)] * 2, "bfloat16"):
        pytest.skip(why)
    m, k, n = jax.export.symbolic_shape("m, k, n")
    result = "int32" if dtype == "int8" else "float32"
    how = {"implementation": implementation, "preferred_element_type": result}
    exported = jax.export.export(
        jax.jit(lambda a, b: jax_gpuops.matmul(a, b, precision="highest", **how)),
        platforms=[{"interpret": "cpu"}.get(implementation, implementation)],
        disabled_checks=jax_gpuops.EXPORT_CHECKS,
    )(*(jax.ShapeDtypeStruct(shape, dtype) for shape in [(m, k), (k, n)]))
    again = jax.export.deserialize(exported.serialize())
    draw = helpers.factor_of_8_bits if jnp.dtype(dtype).itemsize == 1 else helpers.normal
    for m, k, n in ((16, 32, 48), (5, 33, 7), (130, 129, 131)):
        a, b = draw((m, k), dtype), draw((k, n), dtype, seed=1)
        expected = a.astype(np.float32) @ b.astype(np.float32)
        np.testing.assert_allclose(again.call(a, b), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("skinny", "'skinny' supports only float16 and bfloat16"),
        ("bf16_x6", "'bf16_x6' requires .* bytes of workspace"),
    ],
)
def test_an_algorithm_for_no_symbolic_size_is_refused_when_traced(
    algorithm, message, implementation
):
    a = jax.ShapeDtypeStruct(jax.export.symbolic_shape("m, k"), "float32")
    how = {"implementation": implementation, "algorithm": algorithm}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda a: jax_gpuops.matmul(a, a.T, **how), a)


@pytest.mark.parametrize("op", ["matmul", "linear"])
def test_a_precision_without_kernels_is_known_while_sizes_are_symbolic(op, implementation):
    call = functools.partial(getattr(jax_gpuops, op), precision="BF16_BF16_F32_X3")
    a = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("m"), 8), "float32")
    with pytest.raises(ValueError, match="kernels multiply float32 with"):
        jax.eval_shape(functools.partial(call, implementation=implementation), a, X32)
    with jax_gpuops.use(implementation, strict=False):
        (found,) = jax_gpuops.explain(call, a, X32).calls
    assert (found.op, found.plan.implementation) == (op, "xla")
