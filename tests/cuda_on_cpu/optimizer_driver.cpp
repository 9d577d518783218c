// The optimizers' update rules under C names, for ctypes.
#include "driver.h"

using namespace apex_amp;

namespace {

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

// `o`: the options of the rule in the order in which its Python function takes them, from lr on.
#define STEP_PARAMETERS \
  bool copies, const float *found_inf, const float *inv_scale, const double *o, StepFactors *factors

const char* driver_count_adam(TABLE_PARAMETERS, const float* found_inf, double beta1, double beta2,
                              bool bias_correction, StepFactors* factors) {
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
                                 {gradient(found_inf, inv_scale), {float(o[0]), nullptr}, float(o[1]),
                                  float(1.0 - o[2]), float(o[3]), o[4] != 0, o[5] != 0, o[6] != 0});
}

// data: gradients, parameters, exp_avgs, exp_avg_sqs, copies. The second stage begins at the parameters.
const char* driver_lamb(TABLE_PARAMETERS, STEP_PARAMETERS, double* scratch, double* sums) {
  LambArgs args{gradient(found_inf, inv_scale), {float(o[0]), nullptr}, {float(o[1]), nullptr}, average(o[2]),
                average(o[3]), float(o[4]), float(o[5]), float(o[9]), o[6] != 0, o[10] != 0 || o[5] != 0, {{}, factors},
                sums, sums + tensors};
  const char* error =
      text_of(run_summing_cuda<LambMomentsElement>(MAKE_TABLE(4), args, scratch, sums, tensors, nullptr));
  return error ? error : update<LambParameterElement>(make_table(3 + copies, tensors, sizes, index, data + tensors,
                                                                 dtypes + 1), copies, args);
}

const char* driver_count_novograd(TABLE_PARAMETERS, const float* found_inf, const float* inv_scale,
                                  const float* grad_norms, double beta1, double beta2, double eps, bool bias_correction,
                                  bool init_zero, bool l2_norm, StepFactors* factors) {
  const CountNovoGrad::Args args{gradient(found_inf, inv_scale), grad_norms, beta1, beta2, float(eps), bias_correction,
                                 init_zero, l2_norm, factors};
  return text_of(run_count_cuda<CountNovoGrad>(MAKE_TABLE(2), args, nullptr));
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

}  // extern "C"
