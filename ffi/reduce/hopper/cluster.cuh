// Algorithm `cluster`: a row is split over blocks as in `multiple`, but the blocks are a thread
// block cluster, and send their partials through distributed shared memory, within one launch.
//
//     block 0                block 1                block 2    ...
//     threads -> partial     threads -> partial     threads -> partial
//        |                      |                      |
//     slot 0  <-----------------+----------------------+         in the shared memory of block 0
//
// The plan chooses it for rows so short that a thread's loads are all in flight at once: after the
// start, the time is about the latency of one memory access.
#pragma once

#include "core/ptx/cluster.cuh"
#include "core/shared.h"
#include "reduce/row_packs.cuh"

namespace JAX_GPUOPS_NAMESPACE {
namespace reduce {

template <class Reducer>
struct ClusterStorage {
  typename Reducer::Partial warps[kMaxWarpsPerBlock];
  typename Reducer::Partial slots[kMostReducingBlocks];  // a partial per block
  Mbarrier arrived;                                      // for all slots
};

// Each cluster of `blocks` blocks reduces one row.
template <class Reducer, class Masks>
__global__ void __launch_bounds__(kClusterThreads)
    cluster_kernel(const typename Reducer::Element* __restrict__ x, Target y, ContiguousRows rows,
                   int blocks, Masks masks) {
#if JAX_GPUOPS_HAS_CLUSTERS
  using Partial = typename Reducer::Partial;
  auto& storage = shared<ClusterStorage<Reducer>>();
  const typename Reducer::Combine combine;
  const typename Reducer::Reader read(y);
  const int rank = cluster_rank();
  const std::int64_t row = blockIdx.x / blocks;

  // Blocks may send their partials once block 0 has started and initialised the mbarrier. They wait
  // for that after they have read the row.
  if (threadIdx.x == 0 && rank == 0) initialise(&storage.arrived);
  __syncthreads();
  cluster_arrive();
  const RowPacks<typename Reducer::Element, int> packs(x, rows, row);
  const int thread = rank * blockDim.x + threadIdx.x;
  const int threads = blocks * blockDim.x;
  const auto folded = fold_row<Reducer, kClusterLoads>(packs, masks.of(row), read, thread, threads);
  const Partial partial = block_reduce(folded, Reducer::identity(), combine, storage.warps);
  cluster_wait();
  // Partials may arrive before block 0 announces them: the phase does not complete before it does.
  if (threadIdx.x == 0) {
    if (rank == 0) announce(&storage.arrived, static_cast<unsigned>(blocks * sizeof(Partial)));
    send(partial, storage.slots + rank, &storage.arrived, 0);
  }
  if (rank != 0 || threadIdx.x >= kWarpSize) return;

  wait(&storage.arrived, 0);
  const int lane = threadIdx.x;
  const Partial of_block = lane < blocks ? storage.slots[lane] : Reducer::identity();
  const Partial total = group_reduce<kMostReducingBlocks>(of_block, combine);
  if (lane == 0) Reducer::store(y, row, total);
#else
  __trap();
#endif
}

template <class Instance>
void launch_cluster(const Call& call) {
  const Config& config = call.config;
  using Reducer = typename Instance::OfShortRows;
  launch_kernel<cluster_kernel<Reducer, typename Instance::Masks>>(
      call.queue,
      {grid_extent(call.problem.rows() * config.cluster), static_cast<unsigned>(config.threads),
       sizeof(ClusterStorage<Reducer>), config.cluster},
      Instance::elements(call), call.result(), call.rows(), config.cluster, Instance::masks(call));
}

}  // namespace reduce
}  // namespace JAX_GPUOPS_NAMESPACE
