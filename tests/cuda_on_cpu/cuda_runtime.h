// Stands in for CUDA's <cuda_runtime.h> when a .cu file is compiled by a host compiler: the part of
// the execution model that csrc/multi_tensor_cuda.cu uses, carried out by emulator.cpp. A CUDA
// thread is a fiber, blocks run one after another, and a launch returns when all have run.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Written after the parameter's type, it becomes a reference: a table of 32 KiB is not copied to
// the stack of every fiber.
#define __grid_constant__ &
// One section holds the block's shared memory, so that it can be poisoned between blocks. A
// shared variable must not sit in a template (a section can't mix COMDAT and plain data).
#define __shared__ static __attribute__((section("emulated_shared")))

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};

typedef struct CUstream_st* cudaStream_t;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

namespace emulator {

constexpr int kWarpSize = 32;

// Of the thread that runs.
struct Indices {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
extern Indices indices;

// Waits for the whole block; returns whether any thread's predicate was true.
int barrier(int predicate);

// Waits for the lanes named in `mask`, each bringing a value; `values` receives what they brought.
void exchange(unsigned mask, uint64_t value, uint64_t (&values)[kWarpSize]);

// Reports a fault of the running kernel, in printf's words.
void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A kernel with its arguments, which it may read; `call` runs it as the thread that the indices name.
struct Kernel {
  void (*call)(const void* arguments);
  const void* arguments;
  size_t bytes;
};
cudaError_t launch(const cudaLaunchConfig_t& config, const Kernel& kernel);

// The accesses made while one is alive are one atomic operation.
struct AtomicScope {
  AtomicScope();
  ~AtomicScope();
};

template <typename T>
T shuffle(unsigned mask, T value, int source, bool in_range) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0, values[kWarpSize];
  std::memcpy(&bits, &value, sizeof(T));
  exchange(mask, bits, values);
  if (!in_range) return value;
  if (!(mask >> source & 1)) fault("a shuffle reads lane %d, which mask %08x lacks", source, mask);
  std::memcpy(&value, &values[source], sizeof(T));
  return value;
}

}  // namespace emulator

// References, not macros: cudaLaunchConfig_t has members of the same names.
static constexpr const uint3& threadIdx = emulator::indices.thread;
static constexpr const uint3& blockIdx = emulator::indices.block;
static constexpr const dim3& blockDim = emulator::indices.block_dim;
static constexpr const dim3& gridDim = emulator::indices.grid_dim;

inline void __syncthreads() { emulator::barrier(0); }
inline int __syncthreads_or(int predicate) { return emulator::barrier(predicate); }

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const int source = threadIdx.x % emulator::kWarpSize + delta;
  return emulator::shuffle(mask, value, source, source < emulator::kWarpSize);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return emulator::shuffle(mask, value, int(threadIdx.x % emulator::kWarpSize) ^ lane_mask, true);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  uint64_t values[emulator::kWarpSize];
  emulator::exchange(mask, predicate != 0, values);
  unsigned ballot = 0;
  for (int lane = 0; lane < emulator::kWarpSize; ++lane)
    if (mask >> lane & 1 && values[lane]) ballot |= 1u << lane;
  return ballot;
}

template <typename T>
T atomicExch(T* address, T value) {
  emulator::AtomicScope scope;
  const T old = *address;
  *address = value;
  return old;
}

template <typename T>
T atomicAdd(T* address, T value) {
  emulator::AtomicScope scope;
  const T old = *address;
  *address = old + value;
  return old;
}

cudaError_t cudaDriverGetVersion(int* version);
const char* cudaGetErrorString(cudaError_t error);
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using Call = std::tuple<void (*)(Parameters...), std::tuple<std::decay_t<Parameters>...>>;
  const Call call(kernel, {arguments...});
  const auto run = [](const void* call) {
    const auto& [kernel, arguments] = *static_cast<const Call*>(call);
    std::apply(kernel, arguments);
  };
  return emulator::launch(*config, {run, &call, sizeof(call)});
}
