// The CUDA executor's entry points under C names and plain arguments, for ctypes.
#include "driver.h"

using namespace apex_amp;

extern "C" {

const char* driver_scale(TABLE_PARAMETERS, float* found_inf, float* per_tensor, float scale,
                         const float* scale_pointer) {
  return text_of(run_elementwise_cuda<ScaleElement>(MAKE_TABLE(2), {{scale, scale_pointer}}, {found_inf, per_tensor},
                                                    nullptr));
}

const char* driver_axpby(TABLE_PARAMETERS, float* found_inf, float* per_tensor, float a, const float* a_pointer,
                         float b, const float* b_pointer, uint32_t check) {
  return text_of(run_elementwise_cuda<AxpbyElement>(MAKE_TABLE(3), {{a, a_pointer}, {b, b_pointer}, check},
                                                    {found_inf, per_tensor}, nullptr));
}

const char* driver_copy(TABLE_PARAMETERS) {
  return text_of(run_elementwise_cuda<CopyElement>(MAKE_TABLE(2), {}, {nullptr, nullptr}, nullptr));
}

int64_t driver_norm_scratch_size(TABLE_PARAMETERS) { return norm_scratch_size(MAKE_TABLE(1)); }

const char* driver_square_sums(TABLE_PARAMETERS, double* scratch, double* sums) {
  return text_of(square_sums_cuda(MAKE_TABLE(1), scratch, sums, nullptr));
}

const char* driver_finish_norms(const double* sums, int64_t tensors, float* total, float* per_tensor) {
  return text_of(finish_norms_cuda(sums, tensors, total, per_tensor, nullptr));
}

const char* driver_check(TABLE_PARAMETERS, float* found_inf, float* per_tensor) {
  return text_of(run_elementwise_cuda<CheckElement>(MAKE_TABLE(1), {}, {found_inf, per_tensor}, nullptr));
}

const char* driver_update_scale(float* scale, int32_t* growth_tracker, const float* found_inf, float growth_factor,
                                float backoff_factor, int32_t growth_interval, float min_scale, float max_scale) {
  return text_of(update_scale_cuda({scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval,
                                    min_scale, max_scale},
                                   nullptr));
}

}  // extern "C"
