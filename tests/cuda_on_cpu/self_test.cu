// Small kernels with known results or known faults, which show what the emulator sees.
#include <cuda_runtime.h>

namespace {

__shared__ int shared[64];

__global__ void collectives(int* out) {
  const int thread = threadIdx.x;
  out[thread] = __shfl_down_sync(0xffffffffu, thread, 1);
  out[64 + thread] = __shfl_xor_sync(0xffffffffu, thread, 16);
  out[128 + thread] = __ballot_sync(0xffffffffu, thread % 2);
  out[192 + thread] = __syncthreads_or(thread == 40);
  atomicAdd(out + 256, 1);
}

__global__ void reads_unwritten(int* out) {
  if (threadIdx.x == 0) shared[0] = 1;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x];
}

__global__ void lane_missing(int* out) {
  if (threadIdx.x != 5) out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
}

__global__ void lane_not_named(int* out) { out[threadIdx.x] = __ballot_sync(0x7fffffffu, 1); }

__global__ void leaves_early(int* out) {
  if (threadIdx.x < 32) return;
  __syncthreads();
  out[threadIdx.x] = 0;
}

__global__ void blocks_collide(int* out) { out[threadIdx.x] = blockIdx.x; }

__global__ void writes_its_input(const int* in) { const_cast<int*>(in)[threadIdx.x] = 0; }

template <class T>
void run(void (*kernel)(T*), T* data, unsigned blocks) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(64);
  cudaLaunchKernelEx(&config, kernel, data);
}

}  // namespace

extern "C" {
void self_collectives(int* out) { run(collectives, out, 1); }
void self_reads_unwritten(int* out) { run(reads_unwritten, out, 1); }
void self_lane_missing(int* out) { run(lane_missing, out, 1); }
void self_lane_not_named(int* out) { run(lane_not_named, out, 1); }
void self_leaves_early(int* out) { run(leaves_early, out, 1); }
void self_blocks_collide(int* out) { run(blocks_collide, out, 2); }
void self_writes_its_input(const int* in) { run(writes_its_input, in, 1); }
}
