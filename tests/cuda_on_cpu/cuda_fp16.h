// Stands in for CUDA's <cuda_fp16.h> on the host; written from the formats' definition, so that it
// is an oracle of its own. Conversions round to nearest even.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace emulator {

// An IEEE 754 format of 16 bits, by its exponent's width.
template <int kExponentBits>
struct SmallFloat {
  static constexpr int kMantissaBits = 15 - kExponentBits;
  static constexpr int kMinExponent = 2 - (1 << (kExponentBits - 1));
  static constexpr uint16_t kInfinity = ((1 << kExponentBits) - 1) << kMantissaBits;
  static constexpr uint16_t kSign = 0x8000, kNaN = 0x7FFF;

  static uint16_t encode(double x) {
    if (std::isnan(x)) return kNaN;
    const uint16_t sign = std::signbit(x) ? kSign : 0;
    x = std::fabs(x);
    if (std::isinf(x)) return sign | kInfinity;
    if (x == 0) return sign;
    const int exponent = std::max(std::ilogb(x), kMinExponent);
    const double units = std::nearbyint(std::ldexp(x, kMantissaBits - exponent));
    // The leading bit of `units` carries into the exponent's field, as rounding up to it does.
    const double code = std::ldexp(double(exponent - kMinExponent), kMantissaBits) + units;
    return sign | (code < kInfinity ? uint16_t(code) : kInfinity);
  }

  static float decode(uint16_t code) {
    const float sign = code & kSign ? -1.0f : 1.0f;
    const int magnitude = code & ~kSign;
    if (magnitude > kInfinity) return NAN;
    if (magnitude == kInfinity) return sign * INFINITY;
    const int field = magnitude >> kMantissaBits, mantissa = magnitude & ((1 << kMantissaBits) - 1);
    const int units = field ? mantissa + (1 << kMantissaBits) : mantissa;
    return sign * std::ldexp(float(units), std::max(field - 1, 0) + kMinExponent - kMantissaBits);
  }
};

}  // namespace emulator

struct __half {
  uint16_t code;
};
inline float __half2float(__half x) { return emulator::SmallFloat<5>::decode(x.code); }
inline __half __float2half_rn(float x) { return {emulator::SmallFloat<5>::encode(x)}; }
inline uint16_t __half_as_ushort(__half x) { return x.code; }
inline __half __ushort_as_half(uint16_t code) { return {code}; }
