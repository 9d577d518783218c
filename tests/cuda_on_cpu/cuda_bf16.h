// Stands in for CUDA's <cuda_bf16.h> on the host.
#pragma once
#include "cuda_fp16.h"

struct __nv_bfloat16 {
  uint16_t code;
};
inline float __bfloat162float(__nv_bfloat16 x) { return emulator::SmallFloat<8>::decode(x.code); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {emulator::SmallFloat<8>::encode(x)}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.code; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t code) { return {code}; }
