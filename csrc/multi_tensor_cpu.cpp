// CPU executor: one pass over all tensors, split over threads by total elements. No torch headers.
//
// On x86-64 with AVX2, FMA and F16C, blocks of elements are converted with intrinsics and the element runs in a loop
// the compiler vectorizes; heads, tails, float64 and other machines take the scalar twin, which gives the same bits.
#include "multi_tensor.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define APEX_AMP_AVX2 __attribute__((target("avx2,fma,f16c")))
#define APEX_AMP_AVX2_INLINE __attribute__((target("avx2,fma,f16c"), always_inline)) inline
#endif

namespace apex_amp {
namespace {

// ---- storage types and their scalar conversions ------------------------------------------------------------------

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <DType D>
struct StorageOf;
template <>
struct StorageOf<DType::kHalf> {
  using type = Half;
};
template <>
struct StorageOf<DType::kBFloat16> {
  using type = BFloat16;
};
template <>
struct StorageOf<DType::kFloat> {
  using type = float;
};
template <>
struct StorageOf<DType::kDouble> {
  using type = double;
};
template <DType D>
using Storage = typename StorageOf<D>::type;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// Denormals go through an addition to 0.5f, whose unit in the last place is half's smallest denormal: right even
// where the thread flushes float denormals, as F16C is.
template <class R>
inline R load(Half h) {
  const uint32_t sign = (h.bits & 0x8000u) << 16, magnitude = h.bits & 0x7fffu;
  uint32_t bits;
  if (magnitude < 0x0400u) {
    bits = bits_of(float_of(0x3f000000u | magnitude) - 0.5f);
  } else if (magnitude < 0x7c00u) {
    bits = (magnitude << 13) + (112u << 23);
  } else {
    bits = 0x7f800000u | (magnitude << 13) | (magnitude > 0x7c00u ? 0x00400000u : 0u);
  }
  return float_of(sign | bits);
}
template <class R>
inline R load(BFloat16 b) {
  return float_of(static_cast<uint32_t>(b.bits) << 16);
}
template <class R>
inline R load(float x) {
  return x;
}
template <class R>
inline R load(double x) {
  return x;
}

// To nearest, ties to even. Doubles go to the half types through float, as in torch.
inline void store(Half* p, float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u, magnitude = bits_of(x) & 0x7fffffffu;
  uint32_t bits;
  if (magnitude > 0x7f800000u) {
    bits = 0x7e00u | (magnitude >> 13 & 0x03ffu);
  } else if (magnitude >= 0x477ff000u) {  // halfway from 65504 to the next power of two
    bits = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    bits = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    bits = ((magnitude + 0x0fffu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10);
  }
  p->bits = static_cast<uint16_t>(sign | bits);
}
inline void store(BFloat16* p, float x) {
  const uint32_t bits = bits_of(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  p->bits = static_cast<uint16_t>((nan ? bits | 0x00400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline void store(float* p, float x) { *p = x; }
inline void store(float* p, double x) { *p = static_cast<float>(x); }
inline void store(double* p, double x) { *p = x; }

// ---- eight elements at a time ------------------------------------------------------------------------------------

#ifdef APEX_AMP_AVX2
APEX_AMP_AVX2_INLINE __m256 load8(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
APEX_AMP_AVX2_INLINE __m256 load8(const BFloat16* p) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
APEX_AMP_AVX2_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }

// Streaming stores bypass the caches and want the pointer aligned to the eight elements.
template <bool kStream>
APEX_AMP_AVX2_INLINE void store8(float* p, __m256 x) {
  if constexpr (kStream) {
    _mm256_stream_ps(p, x);
  } else {
    _mm256_storeu_ps(p, x);
  }
}
template <bool kStream, class T>
APEX_AMP_AVX2_INLINE void store8(T* p, __m128i bits) {
  if constexpr (kStream) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), bits);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bits);
  }
}
template <bool kStream>
APEX_AMP_AVX2_INLINE void store8(Half* p, __m256 x) {
  store8<kStream>(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
template <bool kStream>
APEX_AMP_AVX2_INLINE void store8(BFloat16* p, __m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  store8<kStream>(p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
#endif

// ---- elementwise spans -------------------------------------------------------------------------------------------

// Runs an element over n elements that start at pointers[list]; non-zero when a checked input isn't finite.
// `args` is the element's Args; `stream`: the output is best written past the caches.
using Span = uint32_t (*)(const void* args, int64_t index, void* const* pointers, int64_t n, bool stream);

constexpr bool in(unsigned mask, int list) { return mask >> list & 1u; }

template <class Element, class R, class... T, size_t... I>
APEX_AMP_HD uint32_t apply_one(const Element& element, void* const* pointers, int64_t i, std::index_sequence<I...>) {
  R r[Element::kLists];
  ((in(Element::kReads, I) ? void(r[I] = load<R>(static_cast<const T*>(pointers[I])[i])) : void()), ...);
  const uint32_t bad = element(r);
  ((in(Element::kWrites, I) ? store(static_cast<T*>(pointers[I]) + i, r[I]) : void()), ...);
  return bad;
}

template <class Element, class R, class... T>
uint32_t span_scalar(const void* args, int64_t index, void* const* pointers, int64_t n, bool) {
  const Element element(*static_cast<const typename Element::Args*>(args), index);
  if (element.skip()) return 0;
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    bad |= apply_one<Element, R, T...>(element, pointers, i, std::index_sequence_for<T...>{});
  }
  return bad;
}

#ifdef APEX_AMP_AVX2
constexpr int kBlock = 32;

template <bool kRead, class T>
APEX_AMP_AVX2_INLINE void load_block(float* registers, const T* p) {
  if constexpr (kRead) {
    for (int k = 0; k < kBlock; k += 8) _mm256_store_ps(registers + k, load8(p + k));
  }
}
template <bool kWrite, bool kStream, class T>
APEX_AMP_AVX2_INLINE void store_block(T* p, const float* registers) {
  if constexpr (kWrite) {
    for (int k = 0; k < kBlock; k += 8) store8<kStream>(p + k, _mm256_load_ps(registers + k));
  }
}

// Whole blocks from element i on; returns where it stopped. Only lists that aren't read are streamed.
template <class Element, bool kStream, class... T, size_t... I>
APEX_AMP_AVX2_INLINE int64_t apply_blocks(const Element& element, void* const* pointers, int64_t i, int64_t n,
                                          uint32_t* bad, std::index_sequence<I...>) {
  constexpr int kLists = Element::kLists;
  void* const p[kLists] = {pointers[I]...};  // local: no store through the lists can alias it
  alignas(32) float registers[kLists][kBlock];
  alignas(32) uint32_t found[kBlock] = {};
  for (; i + kBlock <= n; i += kBlock) {
    (load_block<in(Element::kReads, I)>(registers[I], static_cast<const T*>(p[I]) + i), ...);
    for (int k = 0; k < kBlock; ++k) {
      float r[kLists] = {(in(Element::kReads, I) ? registers[I][k] : 0.0f)...};
      found[k] |= element(r);
      ((in(Element::kWrites, I) ? void(registers[I][k] = r[I]) : void()), ...);
    }
    (store_block<in(Element::kWrites, I), kStream && !in(Element::kReads, I)>(static_cast<T*>(p[I]) + i,
                                                                              registers[I]), ...);
  }
  for (int k = 0; k < kBlock; ++k) *bad |= found[k];
  return i;
}

// Whether eight elements of every streamed list start at an aligned address, i elements on.
template <class Element, class... T, size_t... I>
bool stream_aligned(void* const* pointers, int64_t i, std::index_sequence<I...>) {
  return ((!in(Element::kWrites & ~Element::kReads, I) ||
           reinterpret_cast<uintptr_t>(static_cast<T*>(pointers[I]) + i) % (8 * sizeof(T)) == 0) && ...);
}

template <class Element, class R, class... T>
APEX_AMP_AVX2 uint32_t span_avx2(const void* args, int64_t index, void* const* pointers, int64_t n, bool stream) {
  const Element element(*static_cast<const typename Element::Args*>(args), index);
  if (element.skip()) return 0;
  constexpr std::index_sequence_for<T...> lists;
  uint32_t bad = 0;
  int64_t head = 0;
  if (stream) {
    while (head < std::min<int64_t>(n, 8) && !stream_aligned<Element, T...>(pointers, head, lists)) ++head;
    stream = head < 8;
    if (!stream) head = 0;
  }
  int64_t i = 0;
  for (; i < head; ++i) bad |= apply_one<Element, R, T...>(element, pointers, i, lists);
  i = stream ? apply_blocks<Element, true, T...>(element, pointers, i, n, &bad, lists)
             : apply_blocks<Element, false, T...>(element, pointers, i, n, &bad, lists);
  for (; i < n; ++i) bad |= apply_one<Element, R, T...>(element, pointers, i, lists);
  return bad;
}

bool has_avx2() {
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                __builtin_cpu_supports("f16c");
  return supported;
}
void store_fence() { _mm_sfence(); }
#else
bool has_avx2() { return false; }
void store_fence() {}
#endif

template <class Element, DType... D>
Span choose_span() {
  using R = RegisterType<D...>;
#ifdef APEX_AMP_AVX2
  if constexpr (std::is_same_v<R, float>) {
    if (has_avx2()) return span_avx2<Element, R, Storage<D>...>;
  }
#endif
  return span_scalar<Element, R, Storage<D>...>;
}

// ---- splitting the work ------------------------------------------------------------------------------------------

constexpr int64_t kGrainSize = 32768;  // elements: below this a second thread doesn't pay

// Lists of more bytes than this don't stay in the last-level cache that a thread reaches (32 MB on today's servers;
// what sysconf reports may be a whole package's), so their output is streamed past it.
constexpr int64_t kStreamBytes = int64_t{32} << 20;

int64_t element_size(DType dtype) { return dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2; }

// starts[t]: how many elements lie before tensor t; starts[tensors]: how many there are.
std::vector<int64_t> element_starts(const TensorTable& table) {
  std::vector<int64_t> starts(table.tensors + 1);
  for (int64_t t = 0; t < table.tensors; ++t) starts[t + 1] = starts[t] + table.sizes[t];
  return starts;
}

// The last tensor that starts at or before `element`, which is never empty for an element that exists.
int64_t tensor_at(const std::vector<int64_t>& starts, int64_t element) {
  return std::upper_bound(starts.begin(), starts.end(), element) - starts.begin() - 1;
}

struct ElementwiseJob {
  const TensorTable& table;
  const std::vector<int64_t> starts;
  const Span span;
  const void* args;
  const int lists;
  const unsigned reads, writes;
  const bool large;  // more bytes than kStreamBytes
  const FoundInf found_inf;
  std::atomic<bool> found{false};

  // Whether a list that is only written is the memory of one that is read.
  bool in_place(int64_t t) const {
    for (int w = 0; w < lists; ++w) {
      for (int r = 0; r < lists && in(writes & ~reads, w); ++r) {
        if (in(reads, r) && table.data[r][t] == table.data[w][t]) return true;
      }
    }
    return false;
  }

  // The part of tensor t from element `offset` on.
  void run_tensor(int64_t t, int64_t offset, int64_t n) {
    void* pointers[kMaxLists];
    for (int l = 0; l < lists; ++l) {
      pointers[l] = static_cast<char*>(table.data[l][t]) + offset * element_size(table.dtype[l]);
    }
    if (!span(args, table.index[t], pointers, n, large && !in_place(t))) return;
    found.store(true, std::memory_order_relaxed);
    if (found_inf.per_tensor) {
      // Threads that share a tensor may store at once: the same value, through an atomic to keep it defined.
      __atomic_store_n(reinterpret_cast<uint32_t*>(found_inf.per_tensor + table.index[t]), bits_of(1.0f),
                       __ATOMIC_RELAXED);
    }
  }

  static void run_range(void* context, int64_t begin, int64_t end) {
    ElementwiseJob& job = *static_cast<ElementwiseJob*>(context);
    for (int64_t t = tensor_at(job.starts, begin); begin < end; ++t) {
      const int64_t stop = std::min(end, job.starts[t + 1]);
      if (stop > begin) job.run_tensor(t, begin - job.starts[t], stop - begin);
      begin = stop;
    }
    if (job.large) store_fence();
  }
};

int64_t bytes_per_element(const TensorTable& table, int lists) {
  int64_t bytes = 0;
  for (int l = 0; l < lists; ++l) bytes += element_size(table.dtype[l]);
  return bytes;
}

}  // namespace

template <class Element>
Status run_elementwise_cpu(const TensorTable& table, const typename Element::Args& args, FoundInf found_inf,
                           ParallelFor parallel_for) {
  return dispatch_dtypes(table.dtype, typename ElementDTypes<Element>::type{}, [&](auto... tags) {
    std::vector<int64_t> starts = element_starts(table);
    const int64_t total = starts.back();
    const bool large = total * bytes_per_element(table, Element::kLists) > kStreamBytes;
    ElementwiseJob job{table, std::move(starts), choose_span<Element, decltype(tags)::value...>(), &args,
                       Element::kLists, Element::kReads, Element::kWrites, large, found_inf};
    parallel_for(0, total, kGrainSize, ElementwiseJob::run_range, &job);
    if (job.found && found_inf.any) *found_inf.any = 1.0f;
    return Status{};
  });
}

#define APEX_AMP_INSTANTIATE(...) \
  template Status run_elementwise_cpu<__VA_ARGS__>(const TensorTable&, const __VA_ARGS__::Args&, FoundInf, ParallelFor);
APEX_AMP_FOR_EACH_ELEMENT(APEX_AMP_INSTANTIATE)

// ---- sums of squares ---------------------------------------------------------------------------------------------

namespace {

// Element i of a chunk is added to lane i % kLanes, and the lanes are added pairwise at the end.
constexpr int kLanes = 16;

using ChunkSum = double (*)(const void* data, int64_t n);

double add_lanes(double (&lanes)[kLanes]) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  }
  return lanes[0];
}

template <class T>
double finish_lanes(double (&lanes)[kLanes], const T* p, int64_t i, int64_t n) {
  for (; i < n; ++i) {
    lanes[i % kLanes] += square(load<std::conditional_t<std::is_same_v<T, double>, double, float>>(p[i]));
  }
  return add_lanes(lanes);
}

template <class T>
double chunk_sum_scalar(const void* data, int64_t n) {
  double lanes[kLanes] = {};
  return finish_lanes(lanes, static_cast<const T*>(data), 0, n);
}

#ifdef APEX_AMP_AVX2
// Adds the squares of p[0 .. kLanes - 1], a lane each. Intrinsics, because the compiler turns square() over an array of
// lanes into shuffles. A float's square is exact in double, so the fused multiply-add has the bits of the scalar twin.
template <class T>
APEX_AMP_AVX2_INLINE void add_squares(const T* p, __m256d (&sums)[kLanes / 4]) {
  for (int k = 0; k < kLanes; k += 8) {
    const __m256 x = load8(p + k);
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    sums[k / 4] = _mm256_fmadd_pd(low, low, sums[k / 4]);
    sums[k / 4 + 1] = _mm256_fmadd_pd(high, high, sums[k / 4 + 1]);
  }
}

template <class T>
APEX_AMP_AVX2 double chunk_sum_avx2(const void* data, int64_t n) {
  const T* p = static_cast<const T*>(data);
  __m256d sums[kLanes / 4] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add_squares(p + i, sums);
  double lanes[kLanes];
  for (int k = 0; k < kLanes / 4; ++k) _mm256_storeu_pd(lanes + 4 * k, sums[k]);
  return finish_lanes(lanes, p, i, n);
}
#endif

template <DType D>
ChunkSum choose_chunk_sum() {
#ifdef APEX_AMP_AVX2
  if constexpr (D != DType::kDouble) {
    if (has_avx2()) return chunk_sum_avx2<Storage<D>>;
  }
#endif
  return chunk_sum_scalar<Storage<D>>;
}

// Calls body(tensor, chunk, its first element, its elements) for the chunks whose first element lies in [begin, end).
template <class Body>
void for_each_chunk(const std::vector<int64_t>& starts, int64_t begin, int64_t end, Body body) {
  const int64_t tensors = static_cast<int64_t>(starts.size()) - 1;
  for (int64_t t = tensor_at(starts, begin); t < tensors && starts[t] < end; ++t) {
    const int64_t n = starts[t + 1] - starts[t];
    int64_t chunk = (std::max(begin - starts[t], int64_t{0}) + kNormChunk - 1) / kNormChunk;
    for (int64_t first = chunk * kNormChunk; first < std::min(n, end - starts[t]); first += kNormChunk) {
      body(t, chunk++, first, std::min(kNormChunk, n - first));
    }
  }
}

struct SquareSumJob {
  const TensorTable& table;
  const std::vector<int64_t> starts;        // elements before each tensor
  const std::vector<int64_t> chunk_starts;  // chunks before each tensor
  const ChunkSum chunk_sum;
  double* const scratch;

  static void run_range(void* context, int64_t begin, int64_t end) {
    const SquareSumJob& job = *static_cast<const SquareSumJob*>(context);
    const int64_t size = element_size(job.table.dtype[0]);
    for_each_chunk(job.starts, begin, end, [&](int64_t t, int64_t chunk, int64_t first, int64_t n) {
      const char* data = static_cast<const char*>(job.table.data[0][t]);
      job.scratch[job.chunk_starts[t] + chunk] = job.chunk_sum(data + first * size, n);
    });
  }
};

std::vector<int64_t> norm_chunk_starts(const TensorTable& table) {
  std::vector<int64_t> starts(table.tensors + 1);
  for (int64_t t = 0; t < table.tensors; ++t) {
    starts[t + 1] = starts[t] + (table.sizes[t] + kNormChunk - 1) / kNormChunk;
  }
  return starts;
}

// sums[table.index[t]] = the sum of tensor t's chunks.
void add_chunks(const TensorTable& table, const std::vector<int64_t>& chunk_starts, const double* scratch,
                double* sums) {
  for (int64_t t = 0; t < table.tensors; ++t) {
    double sum = 0;
    for (int64_t c = chunk_starts[t]; c < chunk_starts[t + 1]; ++c) sum += scratch[c];
    sums[table.index[t]] = sum;
  }
}

}  // namespace

Status square_sums_cpu(const TensorTable& table, double* scratch, double* sums, ParallelFor parallel_for) {
  return dispatch_dtypes(table.dtype, ListTypes<FloatAndDoubleTypes>{}, [&](auto tag) {
    SquareSumJob job{table, element_starts(table), norm_chunk_starts(table), choose_chunk_sum<tag.value>(), scratch};
    parallel_for(0, job.starts.back(), kGrainSize, SquareSumJob::run_range, &job);
    add_chunks(table, job.chunk_starts, scratch, sums);
    return Status{};
  });
}

// ---- elements that sum ---------------------------------------------------------------------------------------------

namespace {

// Runs an element over a chunk of n elements and leaves the sums of its terms' squares in sums[0], sums[stride], ...
// False: it was skipped.
using SummingSpan = bool (*)(const void* args, int64_t index, void* const* pointers, int64_t n, double* sums,
                             int64_t stride);

template <class Element, class... T, size_t... I>
APEX_AMP_HD void sum_one(const Element& element, void* const* pointers, int64_t i,
                         double (&lanes)[Element::kSums][kLanes], std::index_sequence<I...>) {
  float r[Element::kLists], terms[Element::kSums];
  ((in(Element::kReads, I) ? void(r[I] = load<float>(static_cast<const T*>(pointers[I])[i])) : void()), ...);
  element(r, terms);
  ((in(Element::kWrites, I) ? store(static_cast<T*>(pointers[I]) + i, r[I]) : void()), ...);
  for (int s = 0; s < Element::kSums; ++s) lanes[s][i % kLanes] += square(terms[s]);
}

template <class Element>
void finish_sums(double (&lanes)[Element::kSums][kLanes], double* sums, int64_t stride) {
  for (int s = 0; s < Element::kSums; ++s) sums[s * stride] = add_lanes(lanes[s]);
}

template <class Element, class... T>
bool summing_scalar(const void* args, int64_t index, void* const* pointers, int64_t n, double* sums, int64_t stride) {
  const Element element(*static_cast<const typename Element::Args*>(args), index);
  if (element.skip()) return false;
  double lanes[Element::kSums][kLanes] = {};
  for (int64_t i = 0; i < n; ++i) {
    sum_one<Element, T...>(element, pointers, i, lanes, std::index_sequence_for<T...>{});
  }
  finish_sums<Element>(lanes, sums, stride);
  return true;
}

#ifdef APEX_AMP_AVX2
template <class Element, class... T, size_t... I>
APEX_AMP_AVX2_INLINE int64_t sum_blocks(const Element& element, void* const* pointers, int64_t n,
                                        double (&lanes)[Element::kSums][kLanes], std::index_sequence<I...>) {
  constexpr int kLists = Element::kLists, kSums = Element::kSums;
  alignas(32) float registers[kLists][kBlock], terms[kSums][kBlock];
  __m256d squares[kSums][kLanes / 4] = {};
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    (load_block<in(Element::kReads, I)>(registers[I], static_cast<const T*>(pointers[I]) + i), ...);
    for (int k = 0; k < kBlock; ++k) {
      float r[kLists] = {(in(Element::kReads, I) ? registers[I][k] : 0.0f)...};
      float t[kSums];
      element(r, t);
      ((in(Element::kWrites, I) ? void(registers[I][k] = r[I]) : void()), ...);
      for (int s = 0; s < kSums; ++s) terms[s][k] = t[s];
    }
    (store_block<in(Element::kWrites, I), false>(static_cast<T*>(pointers[I]) + i, registers[I]), ...);
    for (int s = 0; s < kSums; ++s) {
      for (int k = 0; k < kBlock; k += kLanes) add_squares(terms[s] + k, squares[s]);
    }
  }
  for (int s = 0; s < kSums; ++s) {
    for (int k = 0; k < kLanes / 4; ++k) _mm256_storeu_pd(lanes[s] + 4 * k, squares[s][k]);
  }
  return i;
}

template <class Element, class... T>
APEX_AMP_AVX2 bool summing_avx2(const void* args, int64_t index, void* const* pointers, int64_t n, double* sums,
                                int64_t stride) {
  const Element element(*static_cast<const typename Element::Args*>(args), index);
  if (element.skip()) return false;
  constexpr std::index_sequence_for<T...> lists;
  double lanes[Element::kSums][kLanes];
  for (int64_t i = sum_blocks<Element, T...>(element, pointers, n, lanes, lists); i < n; ++i) {
    sum_one<Element, T...>(element, pointers, i, lanes, lists);
  }
  finish_sums<Element>(lanes, sums, stride);
  return true;
}
#endif

template <class Element, DType... D>
SummingSpan choose_summing_span() {
#ifdef APEX_AMP_AVX2
  if (has_avx2()) return summing_avx2<Element, Storage<D>...>;
#endif
  return summing_scalar<Element, Storage<D>...>;
}

struct SummingJob {
  const TensorTable& table;
  const std::vector<int64_t> starts, chunk_starts;  // elements and chunks before each tensor
  const SummingSpan span;
  const void* args;
  const int lists;
  double* const scratch;
  std::atomic<bool> skipped{false};

  static void run_range(void* context, int64_t begin, int64_t end) {
    SummingJob& job = *static_cast<SummingJob*>(context);
    for_each_chunk(job.starts, begin, end, [&](int64_t t, int64_t chunk, int64_t first, int64_t n) {
      void* pointers[kMaxLists];
      for (int l = 0; l < job.lists; ++l) {
        pointers[l] = static_cast<char*>(job.table.data[l][t]) + first * element_size(job.table.dtype[l]);
      }
      double* const sums = job.scratch + job.chunk_starts[t] + chunk;
      if (!job.span(job.args, job.table.index[t], pointers, n, sums, job.chunk_starts.back())) job.skipped = true;
    });
  }
};

}  // namespace

template <class Element>
Status run_summing_cpu(const TensorTable& table, const typename Element::Args& args, double* scratch, double* sums,
                       int64_t stride, ParallelFor parallel_for) {
  return dispatch_dtypes(table.dtype, typename ElementDTypes<Element>::type{}, [&](auto... tags) {
    SummingJob job{table, element_starts(table), norm_chunk_starts(table),
                   choose_summing_span<Element, decltype(tags)::value...>(), &args, Element::kLists, scratch};
    parallel_for(0, job.starts.back(), kGrainSize, SummingJob::run_range, &job);
    for (int s = 0; s < Element::kSums && !job.skipped; ++s) {
      add_chunks(table, job.chunk_starts, scratch + s * job.chunk_starts.back(), sums + s * stride);
    }
    return Status{};
  });
}

template Status run_summing_cpu<LambMomentsElement>(const TensorTable&, const LambMomentsElement::Args&, double*,
                                                    double*, int64_t, ParallelFor);

template <class Count>
Status run_count_cpu(const TensorTable& table, const typename Count::Args& args) {
  for (int64_t t = 0; t < table.tensors; ++t) {
    const Count count(args, table.index[t]);
    if (count.skip()) break;
    float r[Count::kLists];
    for (int l = 0; l < Count::kLists; ++l) r[l] = *static_cast<const float*>(table.data[l][t]);
    count(r);
    for (int l = 0; l < Count::kLists; ++l) *static_cast<float*>(table.data[l][t]) = r[l];
  }
  return Status{};
}

#define APEX_AMP_INSTANTIATE_COUNT(Count) \
  template Status run_count_cpu<Count>(const TensorTable&, const Count::Args&);
APEX_AMP_FOR_EACH_COUNT(APEX_AMP_INSTANTIATE_COUNT)

Status finish_norms_cpu(const double* sums, int64_t tensors, float* total, float* per_tensor) {
  double sum = 0;
  for (int64_t t = 0; t < tensors; ++t) {
    sum += sums[t];
    if (per_tensor) per_tensor[t] = static_cast<float>(std::sqrt(sums[t]));
  }
  *total = static_cast<float>(std::sqrt(sum));
  return Status{};
}

Status update_scale_cpu(const UpdateScaleArgs& args) {
  update_scale(args);
  return Status{};
}

const char* cpu_isa() { return has_avx2() ? "avx2" : "scalar"; }

}  // namespace apex_amp
