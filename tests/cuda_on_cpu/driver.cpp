// The CUDA executor's entry points under C names and plain arguments, for ctypes.
#include "multi_tensor.h"

using namespace apex_amp;

namespace {

// data[list * tensors + tensor].
TensorTable make_table(int lists, int64_t tensors, const int64_t* sizes, const int64_t* index, void* const* data,
                       const uint8_t* dtypes) {
  TensorTable table = {};
  table.tensors = tensors;
  table.sizes = sizes;
  table.index = index;
  for (int list = 0; list < lists; ++list) {
    table.data[list] = data + list * tensors;
    table.dtype[list] = DType(dtypes[list]);
  }
  return table;
}

// Null when all went well.
const char* text_of(const Status& status) {
  if (status.code == Status::kOk) return nullptr;
  return status.detail ? status.detail : "unsupported dtype";
}

// One of an element's two variants: with the model's copies, which are the last of `lists` then, or without.
template <template <bool> class Element>
const char* update(TensorTable table, bool copies, const typename Element<true>::Args& args) {
  return text_of(copies ? run_elementwise_cuda<Element<true>>(table, args, {nullptr, nullptr}, nullptr)
                        : run_elementwise_cuda<Element<false>>(table, args, {nullptr, nullptr}, nullptr));
}

template <bool kCopy>
using SgdWithMomentum = SgdElement<true, kCopy>;

Average average(double beta) { return {static_cast<float>(beta), static_cast<float>(1.0 - beta)}; }

GradientArgs gradient(const float* found_inf, const float* inv_scale) { return {{0.0f, found_inf}, {1.0f, inv_scale}}; }

}  // namespace

extern "C" {

#define TABLE_PARAMETERS \
  int64_t tensors, const int64_t *sizes, const int64_t *index, void *const *data, const uint8_t *dtypes
#define MAKE_TABLE(lists) make_table(lists, tensors, sizes, index, data, dtypes)

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

// The optimizers. `o`: the options of the rule in the order in which its Python function takes them, from lr on.
#define STEP_PARAMETERS bool copies, const float *found_inf, const float *inv_scale, const double *o, StepFactors *factors

const char* driver_check(TABLE_PARAMETERS, float* found_inf, float* per_tensor) {
  return text_of(run_elementwise_cuda<CheckElement>(MAKE_TABLE(1), {}, {found_inf, per_tensor}, nullptr));
}

const char* driver_count_adam(TABLE_PARAMETERS, const float* found_inf, double beta1, double beta2, bool bias_correction,
                              StepFactors* factors) {
  return text_of(run_count_cuda<CountAdam>(MAKE_TABLE(1), {{0.0f, found_inf}, beta1, beta2, bias_correction, factors},
                                           nullptr));
}

const char* driver_adam(TABLE_PARAMETERS, STEP_PARAMETERS) {
  return update<AdamElement>(MAKE_TABLE(4 + copies), copies,
                             {gradient(found_inf, inv_scale), {float(o[0]), nullptr}, average(o[1]), average(o[2]),
                              float(o[3]), float(o[4]), o[5] != 0, {{}, factors}});
}

const char* driver_sgd(TABLE_PARAMETERS, STEP_PARAMETERS) {
  return update<SgdWithMomentum>(MAKE_TABLE(3 + copies), copies,
                                 {gradient(found_inf, inv_scale), {float(o[0]), nullptr}, float(o[1]), float(1.0 - o[2]),
                                  float(o[3]), o[4] != 0, o[5] != 0, o[6] != 0});
}

// data: gradients, parameters, exp_avgs, exp_avg_sqs, copies. The second stage begins at the parameters.
const char* driver_lamb(TABLE_PARAMETERS, STEP_PARAMETERS, double* scratch, double* sums) {
  LambArgs args{gradient(found_inf, inv_scale), {float(o[0]), nullptr}, {float(o[1]), nullptr}, average(o[2]),
                average(o[3]), float(o[4]), float(o[5]), float(o[9]), o[6] != 0, o[10] != 0 || o[5] != 0, {{}, factors},
                sums, sums + tensors};
  const char* error = text_of(run_summing_cuda<LambMomentsElement>(MAKE_TABLE(4), args, scratch, sums, tensors, nullptr));
  return error ? error : update<LambParameterElement>(make_table(3 + copies, tensors, sizes, index, data + tensors,
                                                                 dtypes + 1), copies, args);
}

const char* driver_count_novograd(TABLE_PARAMETERS, const float* found_inf, const float* inv_scale,
                                  const float* grad_norms, double beta1, double beta2, double eps, bool bias_correction,
                                  bool init_zero, bool l2_norm, StepFactors* factors) {
  return text_of(run_count_cuda<CountNovoGrad>(MAKE_TABLE(2), {gradient(found_inf, inv_scale), grad_norms, beta1, beta2,
                                                               float(eps), bias_correction, init_zero, l2_norm, factors},
                                               nullptr));
}

const char* driver_novograd(TABLE_PARAMETERS, STEP_PARAMETERS) {
  return update<NovoGradElement>(MAKE_TABLE(3 + copies), copies,
                                 {gradient(found_inf, inv_scale), {float(o[0]), nullptr}, average(o[1]), float(o[2]),
                                  o[3] != 0, {{}, factors}});
}

const char* driver_count_adagrad(TABLE_PARAMETERS, const float* found_inf, double lr_decay, StepFactors* factors) {
  return text_of(run_count_cuda<CountAdagrad>(MAKE_TABLE(1), {{0.0f, found_inf}, lr_decay, factors}, nullptr));
}

const char* driver_adagrad(TABLE_PARAMETERS, STEP_PARAMETERS) {
  return update<AdagradElement>(MAKE_TABLE(3 + copies), copies,
                                {gradient(found_inf, inv_scale), {float(o[0]), nullptr}, float(o[1]), float(o[2]),
                                 o[3] != 0, {{}, factors}});
}

const char* driver_update_scale(float* scale, int32_t* growth_tracker, const float* found_inf, float growth_factor,
                                float backoff_factor, int32_t growth_interval, float min_scale, float max_scale) {
  return text_of(update_scale_cuda({scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval,
                                    min_scale, max_scale},
                                   nullptr));
}

}  // extern "C"
