// What a multi-tensor op does to one element: host and device, registers only, no torch, no CUDA headers.
//
// An elementwise op is a struct `Element` with
//   using Args               plain data, passed to a CUDA kernel by value; its pointers live where the tensors live
//   static constexpr int      kLists            how many tensor lists it walks in step
//   static constexpr unsigned kReads, kWrites   bit i: list i is loaded before, stored after the call
//   Element(const Args&, int64_t tensor)        reads device scalars once per chunk; `tensor` is the place in the
//                                               caller's list, for arguments that differ per tensor
//   bool skip() const                           true: the executor leaves every list untouched
//   uint32_t operator()(R (&r)[kLists]) const   r[i] is list i's element; non-zero: an input the op checks isn't finite
// R is float, or double when one of the lists is float64. An element never sees pointers into lists, dtypes, indices
// or chunks: those belong to the executors, so each formula exists once for CPU and CUDA.
#pragma once
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define APEX_AMP_HD __host__ __device__ __forceinline__
#else
#define APEX_AMP_HD inline __attribute__((always_inline))
#endif

namespace apex_amp {

// Non-zero when x is inf or NaN: x - x is +0 for every other value. Unlike a chain of isfinite() && ..., words that
// are OR-ed over many elements vectorize.
APEX_AMP_HD uint32_t nonfinite(float x) {
  const float difference = x - x;
  uint32_t bits;
  memcpy(&bits, &difference, sizeof(bits));
  return bits;
}
APEX_AMP_HD uint32_t nonfinite(double x) {
  const double difference = x - x;
  uint64_t bits;
  memcpy(&bits, &difference, sizeof(bits));
  return static_cast<uint32_t>(bits >> 32);
}

// A number known to the host (pointer null) or held in device memory.
struct Scalar {
  float value;
  const float* pointer;
  APEX_AMP_HD float load() const { return pointer ? *pointer : value; }
};

// dst = src * scale; checks src.
struct ScaleElement {
  struct Args {
    Scalar scale;
  };
  static constexpr int kLists = 2;
  static constexpr unsigned kReads = 0b01, kWrites = 0b10;

  APEX_AMP_HD ScaleElement(const Args& args, int64_t) : scale(args.scale.load()) {}
  APEX_AMP_HD bool skip() const { return false; }
  template <class R>
  APEX_AMP_HD uint32_t operator()(R (&r)[kLists]) const {
    r[1] = r[0] * static_cast<R>(scale);
    return nonfinite(r[0]);
  }

  float scale;
};

// out = a * x + b * y, both products rounded; checks x and/or y.
struct AxpbyElement {
  enum Check : uint32_t { kCheckX = 1, kCheckY = 2, kCheckBoth = kCheckX | kCheckY };
  struct Args {
    Scalar a, b;
    uint32_t check;
  };
  static constexpr int kLists = 3;
  static constexpr unsigned kReads = 0b011, kWrites = 0b100;

  APEX_AMP_HD AxpbyElement(const Args& args, int64_t)
      : a(args.a.load()), b(args.b.load()),
        mask_x(args.check & kCheckX ? ~0u : 0u), mask_y(args.check & kCheckY ? ~0u : 0u) {}
  APEX_AMP_HD bool skip() const { return false; }
  template <class R>
  APEX_AMP_HD uint32_t operator()(R (&r)[kLists]) const {
    r[2] = static_cast<R>(a) * r[0] + static_cast<R>(b) * r[1];
    return (nonfinite(r[0]) & mask_x) | (nonfinite(r[1]) & mask_y);
  }

  float a, b;
  uint32_t mask_x, mask_y;
};

// dst = src, converted.
struct CopyElement {
  struct Args {};
  static constexpr int kLists = 2;
  static constexpr unsigned kReads = 0b01, kWrites = 0b10;

  APEX_AMP_HD CopyElement(const Args&, int64_t) {}
  APEX_AMP_HD bool skip() const { return false; }
  template <class R>
  APEX_AMP_HD uint32_t operator()(R (&r)[kLists]) const {
    r[1] = r[0];
    return 0;
  }
};

// Only checks src.
struct CheckElement {
  struct Args {};
  static constexpr int kLists = 1;
  static constexpr unsigned kReads = 0b1, kWrites = 0;

  APEX_AMP_HD CheckElement(const Args&, int64_t) {}
  APEX_AMP_HD bool skip() const { return false; }
  template <class R>
  APEX_AMP_HD uint32_t operator()(R (&r)[kLists]) const {
    return nonfinite(r[0]);
  }
};

// One term of a sum of squares. Exact for half, bfloat16 and float inputs; a float's square can't overflow a double.
template <class T>
APEX_AMP_HD double square(T x) {
  const double d = static_cast<double>(x);
  return d * d;
}

// The dynamic loss scale's state machine, one step.
struct UpdateScaleArgs {
  float* scale;             // in and out
  int32_t* growth_tracker;  // in and out: clean steps since the scale last changed
  const float* found_inf;   // any non-zero value is an overflow
  float growth_factor, backoff_factor;
  int32_t growth_interval;
  float min_scale, max_scale;
};

APEX_AMP_HD void update_scale(const UpdateScaleArgs& args) {
  float scale = *args.scale;
  int32_t tracker = *args.growth_tracker;
  if (*args.found_inf != 0.0f) {
    scale *= args.backoff_factor;
    tracker = 0;
  } else if (++tracker >= args.growth_interval) {
    scale *= args.growth_factor;
    tracker = 0;
  } else {
    *args.growth_tracker = tracker;
    return;
  }
  scale = scale > args.max_scale ? args.max_scale : scale;
  *args.scale = scale < args.min_scale ? args.min_scale : scale;
  *args.growth_tracker = tracker;
}

}  // namespace apex_amp
