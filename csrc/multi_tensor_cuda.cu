// CUDA executor: cuts the tensors into chunks, a block each, and runs an element (elementwise.h) over them.
// Torch-free. Given to a host compiler with tests/cuda_on_cpu on the include path, the same source runs without a GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>
#include <utility>

#include "multi_tensor.h"

namespace apex_amp {
namespace {

constexpr int kWarpSize = 32;
constexpr int kBlockThreads = 256;
constexpr int kThreadElements = 8;  // of each list that a thread holds in registers at a time
constexpr int kTile = kBlockThreads * kThreadElements;
constexpr int kElementwiseChunk = 8 * kTile;
constexpr int kVectorBytes = 16;  // the widest memory access of a thread

// For __launch_bounds__: with many lists ptxas would rather spill a register than let fewer blocks be resident.
constexpr int min_resident_blocks(int lists) { return lists < 4 ? 1 : 3; }

// ---- dtypes ---------------------------------------------------------------------------------------------------
//
// Kernels are compiled for the size of an element. Half and bfloat16 differ in a conversion between registers only:
// which one it is, is known when the kernel runs.

template <int kBytes>
struct StorageOf;
template <>
struct StorageOf<2> {
  using type = uint16_t;
};
template <>
struct StorageOf<4> {
  using type = float;
};
template <>
struct StorageOf<8> {
  using type = double;
};
template <int kBytes>
using Storage = typename StorageOf<kBytes>::type;

template <int... kBytes>
using Register = std::conditional_t<((kBytes == 8) || ...), double, float>;

constexpr int size_of(DType dtype) {
  return dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2;
}

template <int... kBytes>
constexpr int largest() {
  int result = 0;
  ((result = kBytes > result ? kBytes : result), ...);
  return result;
}

// Bit i: list i holds bfloat16.
unsigned bfloat16_lists(const TensorTable& tensors, int lists) {
  unsigned mask = 0;
  for (int list = 0; list < lists; ++list) mask |= (tensors.dtype[list] == DType::kBFloat16 ? 1u : 0u) << list;
  return mask;
}

template <class R>
__device__ __forceinline__ void widen(const uint16_t (&from)[kThreadElements], bool bfloat16,
                                      R (&r)[kThreadElements]) {
  if (bfloat16) {
#pragma unroll
    for (int e = 0; e < kThreadElements; ++e) r[e] = __bfloat162float(__ushort_as_bfloat16(from[e]));
  } else {
#pragma unroll
    for (int e = 0; e < kThreadElements; ++e) r[e] = __half2float(__ushort_as_half(from[e]));
  }
}
template <class T, class R>
__device__ __forceinline__ void widen(const T (&from)[kThreadElements], bool, R (&r)[kThreadElements]) {
#pragma unroll
  for (int e = 0; e < kThreadElements; ++e) r[e] = from[e];
}

// Rounds to nearest even; doubles go to the half types through float, as in torch and on the CPU.
template <class R>
__device__ __forceinline__ void narrow(const R (&r)[kThreadElements], bool bfloat16,
                                       uint16_t (&to)[kThreadElements]) {
  if (bfloat16) {
#pragma unroll
    for (int e = 0; e < kThreadElements; ++e)
      to[e] = __bfloat16_as_ushort(__float2bfloat16_rn(static_cast<float>(r[e])));
  } else {
#pragma unroll
    for (int e = 0; e < kThreadElements; ++e) to[e] = __half_as_ushort(__float2half_rn(static_cast<float>(r[e])));
  }
}
template <class T, class R>
__device__ __forceinline__ void narrow(const R (&r)[kThreadElements], bool, T (&to)[kThreadElements]) {
#pragma unroll
  for (int e = 0; e < kThreadElements; ++e) to[e] = static_cast<T>(r[e]);
}

// ---- tables ---------------------------------------------------------------------------------------------------

// Kernel parameters may take 4 KiB, and since CUDA 12.1 almost 32 KiB. What a kernel takes beside its table must fit
// into the rest.
constexpr int kSmallParameterBytes = 4096, kLargeParameterBytes = 32764, kOtherParameterBytes = 256;
constexpr int kLargeParameterVersion = 12010;  // of driver and toolkit

// The tensors of one launch, passed by value. Their chunks are numbered through, a block each; the block finds its
// tensor by binary search, so a launch is limited in tensors only.
template <int kListCount, int kParameterBytes>
struct LaunchTable {
  static constexpr int kLists = kListCount;
  static constexpr int kTensorBytes = kLists * sizeof(void*) + sizeof(int64_t) + sizeof(uint32_t) + sizeof(int32_t);
  static constexpr int kCapacity = (kParameterBytes - kOtherParameterBytes) / kTensorBytes;

  void* data[kLists][kCapacity];
  int64_t size[kCapacity];
  uint32_t first_block[kCapacity];
  int32_t index[kCapacity];
  int32_t tensors;
};

// The part of a tensor that a block works on.
struct Chunk {
  int tensor;      // its place in the launch table
  int64_t offset;  // of the first element
  int size;
};

template <class Table>
__host__ __device__ __forceinline__ int64_t chunk_count(const Table& table, int tensor, int chunk_size) {
  return (table.size[tensor] + chunk_size - 1) / chunk_size;
}

template <class Table>
__device__ __forceinline__ Chunk find_chunk(const Table& table, int chunk_size) {
  int tensor = 0, end = table.tensors;
  while (end - tensor > 1) {
    const int middle = (tensor + end) / 2;
    if (table.first_block[middle] <= blockIdx.x) {
      tensor = middle;
    } else {
      end = middle;
    }
  }
  const int64_t offset = static_cast<int64_t>(blockIdx.x - table.first_block[tensor]) * chunk_size;
  const int64_t left = table.size[tensor] - offset;
  return {tensor, offset, static_cast<int>(left < chunk_size ? left : chunk_size)};
}

template <class T, class Table>
__device__ __forceinline__ T* chunk_data(const Table& table, int list, const Chunk& chunk) {
  return static_cast<T*>(table.data[list][chunk.tensor]) + chunk.offset;
}

// ---- memory ---------------------------------------------------------------------------------------------------

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Vector {
  T value[kVector];
};

template <class V, class T>
__device__ __forceinline__ bool is_aligned(const T* data) {
  return reinterpret_cast<uintptr_t>(data) % alignof(V) == 0;
}

// A thread's elements of a tile are vectors, a whole block's apart, that begin at `first`. Which thread holds which
// element doesn't depend on alignment: unaligned data and the tail go element by element, zeros after the end.
template <int kVector, class T>
__device__ __forceinline__ void load(const T* data, int first, int size, T (&elements)[kThreadElements]) {
  using V = Vector<T, kVector>;
  const bool aligned = is_aligned<V>(data);
#pragma unroll
  for (int i = 0; i < kThreadElements / kVector; ++i) {
    const int begin = first + i * kBlockThreads * kVector;
    V vector;
    if (aligned && begin + kVector <= size) {
      vector = *reinterpret_cast<const V*>(data + begin);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) vector.value[k] = begin + k < size ? data[begin + k] : T{};
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) elements[i * kVector + k] = vector.value[k];
  }
}

template <int kVector, class T>
__device__ __forceinline__ void store(const T (&elements)[kThreadElements], int first, int size, T* data) {
  using V = Vector<T, kVector>;
  const bool aligned = is_aligned<V>(data);
#pragma unroll
  for (int i = 0; i < kThreadElements / kVector; ++i) {
    const int begin = first + i * kBlockThreads * kVector;
    V vector;
#pragma unroll
    for (int k = 0; k < kVector; ++k) vector.value[k] = elements[i * kVector + k];
    if (aligned && begin + kVector <= size) {
      *reinterpret_cast<V*>(data + begin) = vector;
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        if (begin + k < size) data[begin + k] = vector.value[k];
    }
  }
}

// Whether a thread's element number `e` lies in the data, which zeros follow.
template <int kVector>
__device__ __forceinline__ bool is_inside(int first, int e, int size) {
  return first + e / kVector * kBlockThreads * kVector + e % kVector < size;
}

template <int kVector, class T, class R>
__device__ __forceinline__ void load_registers(const T* data, int first, int size, bool bfloat16,
                                               R (&r)[kThreadElements]) {
  T elements[kThreadElements];
  load<kVector>(data, first, size, elements);
  widen(elements, bfloat16, r);
}

template <int kVector, class T, class R>
__device__ __forceinline__ void store_registers(const R (&r)[kThreadElements], bool bfloat16, int first, int size,
                                                T* data) {
  T elements[kThreadElements];
  narrow(r, bfloat16, elements);
  store<kVector>(elements, first, size, data);
}

// ---- elementwise kernels --------------------------------------------------------------------------------------

// Runs the element over a tile in registers; non-zero when it checked an input that isn't finite.
template <class Element, class R>
__device__ __forceinline__ uint32_t apply(const Element& element, R (&r)[Element::kLists][kThreadElements]) {
  uint32_t nonfinite = 0;
#pragma unroll
  for (int e = 0; e < kThreadElements; ++e) {
    R lists[Element::kLists];
#pragma unroll
    for (int list = 0; list < Element::kLists; ++list) lists[list] = r[list][e];
    nonfinite |= element(lists);
#pragma unroll
    for (int list = 0; list < Element::kLists; ++list) r[list][e] = lists[list];
  }
  return nonfinite;
}

template <int... kBytes, class Element, class Table, size_t... List>
__device__ __forceinline__ uint32_t run_chunk(const Element& element, const Table& table, const Chunk& chunk,
                                              unsigned bfloat16, std::index_sequence<List...>) {
  constexpr int kVector = kVectorBytes / largest<kBytes...>();  // of all lists: they are cut alike
  uint32_t nonfinite = 0;
  for (int first = threadIdx.x * kVector; first < chunk.size; first += kTile) {
    Register<kBytes...> r[Element::kLists][kThreadElements] = {};
    ((Element::kReads >> List & 1 ? load_registers<kVector>(chunk_data<Storage<kBytes>>(table, List, chunk), first,
                                                            chunk.size, bfloat16 >> List & 1, r[List])
                                  : void()),
     ...);
    nonfinite |= apply(element, r);
    ((Element::kWrites >> List & 1 ? store_registers<kVector>(r[List], bfloat16 >> List & 1, first, chunk.size,
                                                              chunk_data<Storage<kBytes>>(table, List, chunk))
                                   : void()),
     ...);
  }
  return nonfinite;
}

template <class Element, class Table, int... kBytes>
__global__ void __launch_bounds__(kBlockThreads, min_resident_blocks(Element::kLists))
    elementwise_kernel(const Table __grid_constant__ table, typename Element::Args args, unsigned bfloat16,
                       FoundInf found_inf) {
  const Chunk chunk = find_chunk(table, kElementwiseChunk);
  const Element element(args, table.index[chunk.tensor]);
  if (element.skip()) return;
  const uint32_t nonfinite =
      run_chunk<kBytes...>(element, table, chunk, bfloat16, std::make_index_sequence<Element::kLists>{});
  // Once a block: when everything has overflowed, a store from every thread would queue at one address.
  if (__syncthreads_or(nonfinite) && threadIdx.x == 0) {
    if (found_inf.any) atomicExch(found_inf.any, 1.0f);
    if (found_inf.per_tensor) atomicExch(found_inf.per_tensor + table.index[chunk.tensor], 1.0f);
  }
}

// ---- norms ----------------------------------------------------------------------------------------------------

// The sum over the block's threads, in a fixed order; only thread 0 receives it.
__device__ double block_sum(double sum) {
  __shared__ double warp_sums[kBlockThreads / kWarpSize];
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int warp = 1; warp < kBlockThreads / kWarpSize; ++warp) sum += warp_sums[warp];
  return sum;
}

template <int... kBytes, class Element, class Table, size_t... List>
__device__ __forceinline__ void sum_chunk(const Element& element, const Table& table, const Chunk& chunk,
                                          unsigned bfloat16, double (&squares)[Element::kSums],
                                          std::index_sequence<List...>) {
  constexpr int kVector = kVectorBytes / largest<kBytes...>();
  for (int first = threadIdx.x * kVector; first < chunk.size; first += kTile) {
    float r[Element::kLists][kThreadElements] = {};
    ((Element::kReads >> List & 1 ? load_registers<kVector>(chunk_data<Storage<kBytes>>(table, List, chunk), first,
                                                            chunk.size, bfloat16 >> List & 1, r[List])
                                  : void()),
     ...);
#pragma unroll
    for (int e = 0; e < kThreadElements; ++e) {
      float lists[Element::kLists] = {r[List][e]...}, terms[Element::kSums];
      element(lists, terms);
      ((r[List][e] = lists[List]), ...);
#pragma unroll
      for (int s = 0; s < Element::kSums; ++s) {
        if (is_inside<kVector>(first, e, chunk.size)) squares[s] += square(terms[s]);
      }
    }
    ((Element::kWrites >> List & 1 ? store_registers<kVector>(r[List], bfloat16 >> List & 1, first, chunk.size,
                                                              chunk_data<Storage<kBytes>>(table, List, chunk))
                                   : void()),
     ...);
  }
}

// A block for each chunk: its sum of squares goes to `scratch`, or straight to `sums` when it is its tensor's only one.
template <class Table, int kBytes>
__global__ void __launch_bounds__(kBlockThreads)
    chunk_square_sums_kernel(const Table __grid_constant__ table, bool bfloat16, double* scratch, double* sums) {
  constexpr int kVector = kVectorBytes / kBytes;
  const Chunk chunk = find_chunk(table, kNormChunk);
  const Storage<kBytes>* data = chunk_data<Storage<kBytes>>(table, 0, chunk);
  double sum = 0;
  for (int first = threadIdx.x * kVector; first < chunk.size; first += kTile) {
    Register<kBytes> r[kThreadElements];
    load_registers<kVector>(data, first, chunk.size, bfloat16, r);
#pragma unroll
    for (int e = 0; e < kThreadElements; ++e) sum += square(r[e]);
  }
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  if (chunk_count(table, chunk.tensor, kNormChunk) == 1) {
    sums[table.index[chunk.tensor]] = sum;
  } else {
    scratch[blockIdx.x] = sum;
  }
}

// A block for each chunk of an element with kSums: the sums of its terms' squares go where chunk_square_sums_kernel
// puts one, a term's `scratch_stride` and `sums_stride` after the one before.
template <class Element, class Table, int... kBytes>
__global__ void __launch_bounds__(kBlockThreads)
    summing_kernel(const Table __grid_constant__ table, typename Element::Args args, unsigned bfloat16, double* scratch,
                   int64_t scratch_stride, double* sums, int64_t sums_stride) {
  const Chunk chunk = find_chunk(table, kNormChunk);
  const Element element(args, table.index[chunk.tensor]);
  if (element.skip()) return;
  double squares[Element::kSums] = {};
  sum_chunk<kBytes...>(element, table, chunk, bfloat16, squares, std::make_index_sequence<Element::kLists>{});
  const bool whole = chunk_count(table, chunk.tensor, kNormChunk) == 1;
#pragma unroll
  for (int s = 0; s < Element::kSums; ++s) {
    const double sum = block_sum(squares[s]);
    if (threadIdx.x == 0) {
      (whole ? sums[s * sums_stride + table.index[chunk.tensor]] : scratch[s * scratch_stride + blockIdx.x]) = sum;
    }
    __syncthreads();  // thread 0 has read what the next sum overwrites
  }
}

// A block for each tensor: adds up the chunks of one that has none or several.
template <class Table>
__global__ void __launch_bounds__(kBlockThreads)
    tensor_square_sums_kernel(const Table __grid_constant__ table, const double* scratch, double* sums) {
  const int tensor = blockIdx.x;
  const int64_t chunks = chunk_count(table, tensor, kNormChunk);
  if (chunks == 1) return;
  double sum = 0;
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kBlockThreads)
    sum += scratch[table.first_block[tensor] + chunk];
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[table.index[tensor]] = sum;
}

// One block.
__global__ void __launch_bounds__(kBlockThreads)
    finish_norms_kernel(const double* sums, int64_t tensors, float* total, float* per_tensor) {
  double sum = 0;
  for (int64_t tensor = threadIdx.x; tensor < tensors; tensor += kBlockThreads) {
    sum += sums[tensor];
    if (per_tensor) per_tensor[tensor] = static_cast<float>(sqrt(sums[tensor]));
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) *total = static_cast<float>(sqrt(sum));
}

// A thread for each tensor.
template <class Count, class Table>
__global__ void __launch_bounds__(kBlockThreads)
    count_kernel(const Table __grid_constant__ table, typename Count::Args args) {
  const int tensor = blockIdx.x * kBlockThreads + threadIdx.x;
  if (tensor >= table.tensors) return;
  const Count count(args, table.index[tensor]);
  if (count.skip()) return;
  float r[Count::kLists];
#pragma unroll
  for (int list = 0; list < Count::kLists; ++list) r[list] = *static_cast<const float*>(table.data[list][tensor]);
  count(r);
#pragma unroll
  for (int list = 0; list < Count::kLists; ++list) *static_cast<float*>(table.data[list][tensor]) = r[list];
}

__global__ void update_scale_kernel(UpdateScaleArgs args) { update_scale(args); }

// ---- launches -------------------------------------------------------------------------------------------------

template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), int64_t grid, int block, size_t shared_bytes, void* stream,
              const Arguments&... arguments) {
  static_assert((sizeof(Arguments) + ...) <= kLargeParameterBytes, "the kernel's parameters exceed 32764 bytes");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // it is reported here: nobody is to find it again
  return {Status::kCudaError, cudaGetErrorString(error)};
}

// Puts the tensors from `begin` on into `table`, as many as it holds; returns their chunks.
template <class Table>
int64_t fill(const TensorTable& tensors, int64_t begin, int chunk_size, Table* table) {
  const int64_t left = tensors.tensors - begin;
  table->tensors = static_cast<int32_t>(left < Table::kCapacity ? left : Table::kCapacity);
  int64_t chunks = 0;
  for (int i = 0; i < table->tensors; ++i) {
    for (int list = 0; list < Table::kLists; ++list) table->data[list][i] = tensors.data[list][begin + i];
    table->size[i] = tensors.sizes[begin + i];
    table->index[i] = static_cast<int32_t>(tensors.index[begin + i]);
    table->first_block[i] = static_cast<uint32_t>(chunks);
    chunks += chunk_count(*table, i, chunk_size);
  }
  return chunks;
}

// Calls launch(table, chunks) for one table after another, until one fails.
template <class Table, class Launch>
Status for_each_table(const TensorTable& tensors, int chunk_size, Launch launch) {
  Table table;
  for (int64_t begin = 0; begin < tensors.tensors; begin += table.tensors) {
    const int64_t chunks = fill(tensors, begin, chunk_size, &table);
    const Status status = launch(table, chunks);
    if (status.code != Status::kOk) return status;
  }
  return {};
}

// Whether no tensor's chunks are left to be added up.
template <class Table>
bool all_of_one_chunk(const Table& table) {
  for (int i = 0; i < table.tensors; ++i)
    if (chunk_count(table, i, kNormChunk) != 1) return false;
  return true;
}

bool driver_takes_large_parameters() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess && version >= kLargeParameterVersion;
}

// In small tables when one is enough (32 KiB of parameters delay a launch), else in as few as the driver allows.
template <int kLists, class Launch>
Status for_each_launch(const TensorTable& tensors, int chunk_size, Launch launch) {
  using Small = LaunchTable<kLists, kSmallParameterBytes>;
  using Large = LaunchTable<kLists, kLargeParameterBytes>;
  return tensors.tensors <= Small::kCapacity || !driver_takes_large_parameters()
             ? for_each_table<Small>(tensors, chunk_size, launch)
             : for_each_table<Large>(tensors, chunk_size, launch);
}

}  // namespace

template <class Element>
Status run_elementwise_cuda(const TensorTable& tensors, const typename Element::Args& args, FoundInf found_inf,
                            void* stream) {
  static_assert(sizeof(args) + sizeof(found_inf) <= kOtherParameterBytes, "a small table leaves less room");
  return for_each_launch<Element::kLists>(tensors, kElementwiseChunk, [&](const auto& table, int64_t chunks) {
    using Table = std::decay_t<decltype(table)>;
    void (*kernel)(const Table __grid_constant__, typename Element::Args, unsigned, FoundInf) = nullptr;
    const Status status = dispatch_dtypes(tensors.dtype, typename ElementDTypes<Element>::type{}, [&](auto... dtypes) {
      kernel = elementwise_kernel<Element, Table, size_of(decltype(dtypes)::value)...>;
      return Status{};
    });
    if (status.code != Status::kOk || chunks == 0) return status;
    return launch(kernel, chunks, kBlockThreads, 0, stream, table, args, bfloat16_lists(tensors, Element::kLists),
                  found_inf);
  });
}

#define APEX_AMP_INSTANTIATE(...) \
  template Status run_elementwise_cuda<__VA_ARGS__>(const TensorTable&, const __VA_ARGS__::Args&, FoundInf, void*);
APEX_AMP_FOR_EACH_ELEMENT(APEX_AMP_INSTANTIATE)

Status square_sums_cuda(const TensorTable& tensors, double* scratch, double* sums, void* stream) {
  return for_each_launch<1>(tensors, kNormChunk, [&](const auto& table, int64_t chunks) {
    using Table = std::decay_t<decltype(table)>;
    void (*kernel)(const Table __grid_constant__, bool, double*, double*) = nullptr;
    Status status = dispatch_dtypes(tensors.dtype, ListTypes<FloatAndDoubleTypes>{}, [&](auto dtype) {
      kernel = chunk_square_sums_kernel<Table, size_of(dtype.value)>;
      return Status{};
    });
    if (status.code == Status::kOk && chunks > 0)
      status = launch(kernel, chunks, kBlockThreads, 0, stream, table, bfloat16_lists(tensors, 1) != 0, scratch, sums);
    if (all_of_one_chunk(table) || status.code != Status::kOk) return status;
    return launch(tensor_square_sums_kernel<Table>, table.tensors, kBlockThreads, 0, stream, table, scratch, sums);
  });
}

template <class Element>
Status run_summing_cuda(const TensorTable& tensors, const typename Element::Args& args, double* scratch, double* sums,
                        int64_t stride, void* stream) {
  static_assert(sizeof(args) + 4 * sizeof(int64_t) + sizeof(unsigned) <= kOtherParameterBytes, "see the table");
  return for_each_launch<Element::kLists>(tensors, kNormChunk, [&](const auto& table, int64_t chunks) {
    using Table = std::decay_t<decltype(table)>;
    void (*kernel)(const Table __grid_constant__, typename Element::Args, unsigned, double*, int64_t, double*,
                   int64_t) = nullptr;
    Status status = dispatch_dtypes(tensors.dtype, typename ElementDTypes<Element>::type{}, [&](auto... dtypes) {
      kernel = summing_kernel<Element, Table, size_of(decltype(dtypes)::value)...>;
      return Status{};
    });
    if (status.code == Status::kOk && chunks > 0)
      status = launch(kernel, chunks, kBlockThreads, 0, stream, table, args, bfloat16_lists(tensors, Element::kLists),
                      scratch, chunks, sums, stride);
    if (all_of_one_chunk(table)) return status;
    for (int s = 0; s < Element::kSums && status.code == Status::kOk; ++s)
      status = launch(tensor_square_sums_kernel<Table>, table.tensors, kBlockThreads, 0, stream, table,
                      scratch + s * chunks, sums + s * stride);
    return status;
  });
}

template Status run_summing_cuda<LambMomentsElement>(const TensorTable&, const LambMomentsElement::Args&, double*,
                                                     double*, int64_t, void*);

template <class Count>
Status run_count_cuda(const TensorTable& tensors, const typename Count::Args& args, void* stream) {
  static_assert(sizeof(args) <= kOtherParameterBytes, "a small table leaves less room");
  return for_each_launch<Count::kLists>(tensors, 1, [&](const auto& table, int64_t) {
    using Table = std::decay_t<decltype(table)>;
    return launch(count_kernel<Count, Table>, (table.tensors + kBlockThreads - 1) / kBlockThreads, kBlockThreads, 0,
                  stream, table, args);
  });
}

#define APEX_AMP_INSTANTIATE_COUNT(Count) \
  template Status run_count_cuda<Count>(const TensorTable&, const Count::Args&, void*);
APEX_AMP_FOR_EACH_COUNT(APEX_AMP_INSTANTIATE_COUNT)

Status finish_norms_cuda(const double* sums, int64_t tensors, float* total, float* per_tensor, void* stream) {
  return launch(finish_norms_kernel, 1, kBlockThreads, 0, stream, sums, tensors, total, per_tensor);
}

Status update_scale_cuda(const UpdateScaleArgs& args, void* stream) {
  return launch(update_scale_kernel, 1, 1, 0, stream, args);
}

}  // namespace apex_amp
