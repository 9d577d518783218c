// What the bindings hand to the CPU and CUDA executors: plain structs, no torch, no CUDA headers.
//
// Adding an elementwise op: its struct in elementwise.h (an optimizer's in optimizer_elements.h), its dtypes in
// ElementDTypes below, its name in APEX_AMP_FOR_EACH_ELEMENT, one binding.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "elementwise.h"
#include "optimizer_elements.h"

namespace apex_amp {

enum class DType : uint8_t { kHalf, kBFloat16, kFloat, kDouble };

constexpr int kMaxLists = 6;

// `tensors` tensors in each of up to kMaxLists lists that are walked in step; one dtype per list. Everything in it
// is host memory, valid during the call only; data[list][tensor] points to sizes[tensor] dense elements in the
// memory of the device that runs the op. Lists that an op both reads and writes may be the same memory exactly.
struct TensorTable {
  int64_t tensors;
  const int64_t* sizes;  // elements; 0 allowed
  const int64_t* index;  // place of each tensor in the caller's list, for per-tensor arguments and results
  void* const* data[kMaxLists];
  DType dtype[kMaxLists];
};

// Where an op reports inputs that aren't finite; either may be null. The executors store 1.0f, and never clear.
struct FoundInf {
  float* any;         // one element
  float* per_tensor;  // at TensorTable::index
};

struct Status {
  enum Code { kOk, kUnsupportedDType, kCudaError };
  Code code = kOk;
  const char* detail = nullptr;  // static text
};

// ---- dtypes ---------------------------------------------------------------------------------------------------

template <DType... D>
struct DTypeSet {};
using FloatTypes = DTypeSet<DType::kHalf, DType::kBFloat16, DType::kFloat>;
using FloatAndDoubleTypes = DTypeSet<DType::kHalf, DType::kBFloat16, DType::kFloat, DType::kDouble>;

// One DTypeSet per list.
template <class... Sets>
struct ListTypes {};

template <class Element>
struct ElementDTypes;
template <>
struct ElementDTypes<ScaleElement> {
  using type = ListTypes<FloatAndDoubleTypes, FloatAndDoubleTypes>;
};
template <>
struct ElementDTypes<AxpbyElement> {
  using type = ListTypes<FloatTypes, FloatTypes, FloatTypes>;
};
template <>
struct ElementDTypes<CopyElement> {
  using type = ListTypes<FloatTypes, FloatTypes>;
};

template <>
struct ElementDTypes<CheckElement> {
  using type = ListTypes<FloatTypes>;
};

// Optimizers keep FP32 state, of low-precision parameters too; only an FP32 parameter has a low-precision copy.
using Float = DTypeSet<DType::kFloat>;
using HalfTypes = DTypeSet<DType::kHalf, DType::kBFloat16>;

template <bool kCopy, class... State>
struct UpdateDTypes {
  using type = ListTypes<FloatTypes, FloatTypes, State...>;
};
template <class... State>
struct UpdateDTypes<true, State...> {
  using type = ListTypes<FloatTypes, Float, State..., HalfTypes>;
};
template <bool kCopy>
struct ElementDTypes<AdamElement<kCopy>> : UpdateDTypes<kCopy, Float, Float> {};
template <bool kCopy>
struct ElementDTypes<SgdElement<false, kCopy>> : UpdateDTypes<kCopy> {};
template <bool kCopy>
struct ElementDTypes<SgdElement<true, kCopy>> : UpdateDTypes<kCopy, Float> {};
template <bool kCopy>
struct ElementDTypes<NovoGradElement<kCopy>> : UpdateDTypes<kCopy, Float> {};
template <bool kCopy>
struct ElementDTypes<AdagradElement<kCopy>> : UpdateDTypes<kCopy, Float> {};
template <>
struct ElementDTypes<LambMomentsElement> : UpdateDTypes<false, Float, Float> {};
template <>
struct ElementDTypes<LambParameterElement<false>> {
  using type = ListTypes<FloatTypes, Float, Float>;
};
template <>
struct ElementDTypes<LambParameterElement<true>> {
  using type = ListTypes<Float, Float, Float, HalfTypes>;
};

// Every element that the executors are instantiated for, unless the compiler's command line names fewer.
#ifndef APEX_AMP_FOR_EACH_ELEMENT
#define APEX_AMP_FOR_EACH_ELEMENT(DO)                                                                        \
  DO(ScaleElement) DO(AxpbyElement) DO(CopyElement) DO(CheckElement) DO(AdamElement<false>)                  \
  DO(AdamElement<true>) DO(SgdElement<false, false>) DO(SgdElement<false, true>)                             \
  DO(SgdElement<true, false>) DO(SgdElement<true, true>) DO(LambParameterElement<false>)                     \
  DO(LambParameterElement<true>) DO(NovoGradElement<false>) DO(NovoGradElement<true>)                        \
  DO(AdagradElement<false>) DO(AdagradElement<true>)
#define APEX_AMP_FOR_EACH_COUNT(DO) DO(CountAdam) DO(CountNovoGrad) DO(CountAdagrad)
#endif

template <DType D>
using DTypeTag = std::integral_constant<DType, D>;

// The registers' type: FP32 unless a list holds doubles.
template <DType... D>
using RegisterType = std::conditional_t<((D == DType::kDouble) || ...), double, float>;

template <class F, class... Tags>
Status dispatch_dtypes(const DType*, ListTypes<>, F f, Tags... tags) {
  return f(tags...);
}
// Calls f(DTypeTag<dtype[0]>, DTypeTag<dtype[1]>, ...), one argument per list; kUnsupportedDType when a dtype isn't
// in its list's set.
template <class F, DType... D, class... Sets, class... Tags>
Status dispatch_dtypes(const DType* dtype, ListTypes<DTypeSet<D...>, Sets...>, F f, Tags... tags) {
  Status status{Status::kUnsupportedDType};
  const auto matches = [&](auto tag) {
    if (*dtype != tag.value) return false;
    status = dispatch_dtypes(dtype + 1, ListTypes<Sets...>{}, f, tags..., tag);
    return true;
  };
  (void)(matches(DTypeTag<D>{}) || ...);
  return status;
}

// ---- sums of squares ------------------------------------------------------------------------------------------
//
// Each tensor is cut into chunks of kNormChunk elements counted from its first element. A chunk's squares are summed
// in double, in an order that depends on nothing but the position in the chunk (each executor has its own); a
// tensor's sum adds its chunks' in order, and the total adds the tensors' in the caller's order (a fixed tree is an
// order too). So a norm's bits depend neither on alignment nor on the other tensors, thread count or launch shape,
// and CPU and CUDA differ by the rounding of double sums only: their float norms agree to one unit in the last place.

constexpr int64_t kNormChunk = 32768;

// Doubles of scratch that the sums of `table` need.
inline int64_t norm_scratch_size(const TensorTable& table) {
  int64_t chunks = 0;
  for (int64_t t = 0; t < table.tensors; ++t) chunks += (table.sizes[t] + kNormChunk - 1) / kNormChunk;
  return chunks;
}

// ---- CPU executor ---------------------------------------------------------------------------------------------

// at::parallel_for with the body as a function pointer, so that the executor obeys torch's thread count without
// including torch: runs body(context, b, e) on disjoint ranges that cover [begin, end).
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain_size,
                             void (*body)(void* context, int64_t begin, int64_t end), void* context);

template <class Element>
Status run_elementwise_cpu(const TensorTable& table, const typename Element::Args& args, FoundInf found_inf,
                           ParallelFor parallel_for);

// sums[table.index[t]] = sum of squares of tensor t (0 for an empty one). One list of any dtype.
Status square_sums_cpu(const TensorTable& table, double* scratch, double* sums, ParallelFor parallel_for);

// An element with kSums: it is called with a second argument, R (&terms)[kSums], and the squares of its terms are
// summed as above: sums[s * stride + table.index[t]]. `scratch`: kSums * norm_scratch_size(table). Skipped, it leaves
// the sums alone.
template <class Element>
Status run_summing_cpu(const TensorTable& table, const typename Element::Args& args, double* scratch, double* sums,
                       int64_t stride, ParallelFor parallel_for);

// Count once for each tensor; all have one float32 element.
template <class Count>
Status run_count_cpu(const TensorTable& table, const typename Count::Args& args);

// *total = sqrt(sums[0] + ... + sums[tensors - 1]); per_tensor[t] = sqrt(sums[t]) unless null.
Status finish_norms_cpu(const double* sums, int64_t tensors, float* total, float* per_tensor);

Status update_scale_cpu(const UpdateScaleArgs& args);

// "avx2" or "scalar": the path this machine takes.
const char* cpu_isa();

// ---- CUDA executor --------------------------------------------------------------------------------------------
//
// The same functions with device memory behind every pointer in the arguments (the table itself stays on the host),
// enqueued on `stream`, a cudaStream_t, of the current device. They return without waiting for the device, allocate
// nothing, may be captured in a CUDA graph, and report a failed launch as kCudaError with CUDA's text.

template <class Element>
Status run_elementwise_cuda(const TensorTable& table, const typename Element::Args& args, FoundInf found_inf,
                            void* stream);
template <class Element>
Status run_summing_cuda(const TensorTable& table, const typename Element::Args& args, double* scratch, double* sums,
                        int64_t stride, void* stream);
template <class Count>
Status run_count_cuda(const TensorTable& table, const typename Count::Args& args, void* stream);
Status square_sums_cuda(const TensorTable& table, double* scratch, double* sums, void* stream);
Status finish_norms_cuda(const double* sums, int64_t tensors, float* total, float* per_tensor, void* stream);
Status update_scale_cuda(const UpdateScaleArgs& args, void* stream);

}  // namespace apex_amp
