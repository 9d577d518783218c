// What an optimizer's step does to one element: elements in the sense of elementwise.h, one per pass of an update rule.
//
// Lists come in the order gradient, parameter, state, and last, with kCopy, a low-precision copy of the new parameter
// for the model. An element multiplies gradients by inv_scale, and skips everything when found_inf isn't zero. What
// depends on a parameter's step count is worked out once per tensor by a Count*, which sees tensors of one float32
// element, and kept in an array of StepFactors. R is float throughout.
#pragma once
#include <math.h>

#include "elementwise.h"

namespace apex_amp {

// Two numbers that an update rule derives from a parameter's step count; their meaning is the rule's.
struct StepFactors {
  float first, second;
};

// Factors of each tensor, or (pointer null) the same for all.
struct StepFactorsArgument {
  StepFactors value;
  StepFactors* pointer;
  APEX_AMP_HD StepFactors load(int64_t tensor) const { return pointer ? pointer[tensor] : value; }
};

struct GradientArgs {
  Scalar found_inf, inv_scale;
  APEX_AMP_HD bool skip() const { return found_inf.load() != 0.0f; }
};

// An exponential moving average's weights, 1 - beta rounded from double.
struct Average {
  float beta, rest;
  APEX_AMP_HD float operator()(float average, float x) const { return beta * average + rest * x; }
};

// factor * x; 0 for a factor of 0, whatever x. The choice comes before the product, because the
// compiler vectorizes no branch around arithmetic.
APEX_AMP_HD float times(float factor, float x) { return factor * (factor != 0.0f ? x : 0.0f); }

// ---- Adam and LAMB: bias corrections -----------------------------------------------------------------------------

// {1 - beta1^step, sqrt(1 - beta2^step)}, or ones.
APEX_AMP_HD StepFactors bias_corrections(double beta1, double beta2, double step, bool enabled) {
  if (!enabled) return {1.0f, 1.0f};
  return {static_cast<float>(1.0 - pow(beta1, step)), static_cast<float>(sqrt(1.0 - pow(beta2, step)))};
}

// Counts a step of the parameters that are about to take it, and leaves their bias corrections in `factors`.
struct CountAdam {
  struct Args {
    Scalar found_inf;
    double beta1, beta2;
    bool bias_correction;
    StepFactors* factors;
  };
  static constexpr int kLists = 1;  // step

  APEX_AMP_HD CountAdam(const Args& args, int64_t tensor) : args(args), tensor(tensor) {}
  APEX_AMP_HD bool skip() const { return args.found_inf.load() != 0.0f; }
  APEX_AMP_HD void operator()(float (&r)[kLists]) const {
    r[0] += 1;
    args.factors[tensor] = bias_corrections(args.beta1, args.beta2, r[0], args.bias_correction);
  }

  Args args;
  int64_t tensor;
};

// ---- Adam, AdamW -------------------------------------------------------------------------------------------------

struct AdamArgs {
  GradientArgs gradient;
  Scalar lr;
  Average first, second;
  float eps, weight_decay;
  bool decoupled;
  StepFactorsArgument factors;
};

// Adam (arXiv 1412.6980), with L2 regularization, or decoupled weight decay (AdamW, arXiv 1711.05101).
template <bool kCopy>
struct AdamElement {
  using Args = AdamArgs;
  static constexpr int kLists = 4 + kCopy;  // gradient, parameter, exp_avg, exp_avg_sq, copy
  static constexpr unsigned kReads = 0b1111, kWrites = 0b1110u | unsigned{kCopy} << 4;

  APEX_AMP_HD AdamElement(const Args& args, int64_t tensor)
      : skipped(args.gradient.skip()), inv_scale(args.gradient.inv_scale.load()), first(args.first),
        second(args.second), eps(args.eps), l2(args.decoupled ? 0.0f : args.weight_decay) {
    const float lr = args.lr.load();
    const StepFactors corrections = args.factors.load(tensor);
    step_size = lr / corrections.first;
    second_correction = 1.0f / corrections.second;
    shrink = args.decoupled ? lr * args.weight_decay : 0.0f;
  }
  APEX_AMP_HD bool skip() const { return skipped; }
  template <class R>
  APEX_AMP_HD uint32_t operator()(R (&r)[kLists]) const {
    const R gradient = r[0] * inv_scale + times(l2, r[1]);
    r[2] = first(r[2], gradient);
    r[3] = second(r[3], gradient * gradient);
    r[1] -= step_size * (r[2] / (sqrtf(r[3]) * second_correction + eps)) + times(shrink, r[1]);
    if constexpr (kCopy) r[4] = r[1];
    return 0;
  }

  bool skipped;
  float inv_scale;
  Average first, second;
  float eps, l2, step_size, second_correction, shrink;
};

// ---- SGD ---------------------------------------------------------------------------------------------------------

struct SgdArgs {
  GradientArgs gradient;
  Scalar lr;
  float momentum, undamped;  // undamped: 1 - dampening
  float weight_decay;
  bool nesterov, first_run;  // first_run: momentum buffers are written, not read
  bool decay_after_momentum;
};

template <bool kMomentum, bool kCopy>
struct SgdElement {
  using Args = SgdArgs;
  static constexpr int kLists = 2 + kMomentum + kCopy;  // gradient, parameter, momentum buffer, copy
  static constexpr unsigned kReads = kMomentum ? 0b111 : 0b11;
  static constexpr unsigned kWrites = (kReads & ~1u) | unsigned{kCopy} << (kLists - 1);

  APEX_AMP_HD SgdElement(const Args& args, int64_t)
      : skipped(args.gradient.skip()), inv_scale(args.gradient.inv_scale.load()), lr(args.lr.load()),
        keep(args.first_run ? 0.0f : args.momentum), take(args.first_run ? 1.0f : args.undamped),
        direct(args.nesterov ? 1.0f : 0.0f), through(args.nesterov ? args.momentum : 1.0f),
        decay_before(args.decay_after_momentum ? 0.0f : args.weight_decay),
        decay_after(args.decay_after_momentum ? args.weight_decay : 0.0f) {}
  APEX_AMP_HD bool skip() const { return skipped; }
  template <class R>
  APEX_AMP_HD uint32_t operator()(R (&r)[kLists]) const {
    R update = r[0] * inv_scale + times(decay_before, r[1]);
    if constexpr (kMomentum) {
      r[2] = times(keep, r[2]) + take * update;
      update = direct * update + through * r[2];
    }
    r[1] -= lr * (update + times(decay_after, r[1]));
    if constexpr (kCopy) r[kLists - 1] = r[1];
    return 0;
  }

  bool skipped;
  float inv_scale, lr, keep, take, direct, through, decay_before, decay_after;
};

// ---- LAMB --------------------------------------------------------------------------------------------------------

struct LambArgs {
  GradientArgs gradient;
  Scalar lr, grad_norm;  // grad_norm: of all gradients together, still multiplied by the loss scale
  Average first;         // first.rest is 1 without grad_averaging
  Average second;
  float eps, weight_decay, max_grad_norm;  // max_grad_norm 0: no clipping
  bool decoupled, trust;                   // trust: scale the update by the ratio of the two norms
  StepFactorsArgument factors;
  const double *parameter_squares, *update_squares;  // sums of squares of each tensor, for the second stage
};

// The update before the trust ratio, from moments that are up to date.
struct LambUpdate {
  APEX_AMP_HD LambUpdate(const LambArgs& args, int64_t tensor)
      : decoupled(args.decoupled ? args.weight_decay : 0.0f), eps(args.eps) {
    const StepFactors corrections = args.factors.load(tensor);
    first_correction = 1.0f / corrections.first;
    second_correction = 1.0f / corrections.second;
  }
  template <class R>
  APEX_AMP_HD R operator()(R parameter, R exp_avg, R exp_avg_sq) const {
    return exp_avg * first_correction / (sqrtf(exp_avg_sq) * second_correction + eps) + times(decoupled, parameter);
  }

  float decoupled, eps, first_correction, second_correction;
};

// First stage: moves the moments. Sums the squares of parameter and update.
struct LambMomentsElement {
  using Args = LambArgs;
  static constexpr int kLists = 4, kSums = 2;  // gradient, parameter, exp_avg, exp_avg_sq
  static constexpr unsigned kReads = 0b1111, kWrites = 0b1100;

  APEX_AMP_HD LambMomentsElement(const Args& args, int64_t tensor)
      : skipped(args.gradient.skip()), first(args.first), second(args.second),
        l2(args.decoupled ? 0.0f : args.weight_decay), update(args, tensor) {
    factor = args.gradient.inv_scale.load();
    const float norm = args.grad_norm.load() * factor;
    if (args.max_grad_norm > 0.0f && norm > args.max_grad_norm) factor /= norm / args.max_grad_norm;
  }
  APEX_AMP_HD bool skip() const { return skipped; }
  template <class R>
  APEX_AMP_HD void operator()(R (&r)[kLists], R (&terms)[kSums]) const {
    const R gradient = r[0] * factor + times(l2, r[1]);
    r[2] = first(r[2], gradient);
    r[3] = second(r[3], gradient * gradient);
    terms[0] = r[1];
    terms[1] = update(r[1], r[2], r[3]);
  }

  bool skipped;
  Average first, second;
  float l2, factor;
  LambUpdate update;
};

// Second stage: moves the parameters.
template <bool kCopy>
struct LambParameterElement {
  using Args = LambArgs;
  static constexpr int kLists = 3 + kCopy;  // parameter, exp_avg, exp_avg_sq, copy
  static constexpr unsigned kReads = 0b111, kWrites = 0b1u | unsigned{kCopy} << 3;

  APEX_AMP_HD LambParameterElement(const Args& args, int64_t tensor)
      : skipped(args.gradient.skip()), step_size(args.lr.load()), update(args, tensor) {
    if (!args.trust) return;
    const double parameter = args.parameter_squares[tensor], whole = args.update_squares[tensor];
    if (parameter != 0.0 && whole != 0.0) step_size *= static_cast<float>(sqrt(parameter) / sqrt(whole));
  }
  APEX_AMP_HD bool skip() const { return skipped; }
  template <class R>
  APEX_AMP_HD uint32_t operator()(R (&r)[kLists]) const {
    r[0] -= step_size * update(r[0], r[1], r[2]);
    if constexpr (kCopy) r[3] = r[0];
    return 0;
  }

  bool skipped;
  float step_size;
  LambUpdate update;
};

// ---- NovoGrad ----------------------------------------------------------------------------------------------------

// Counts a step and averages the norms of the gradients; leaves {1 - beta1^step, denominator} in `factors`.
struct CountNovoGrad {
  struct Args {
    GradientArgs gradient;
    const float* grad_norms;  // of this step's gradients, still multiplied by the loss scale
    double beta1, beta2;
    float eps;
    bool bias_correction, init_zero, l2_norm;  // l2_norm: average squares, else (largest magnitudes) norms
    StepFactors* factors;
  };
  static constexpr int kLists = 2;  // step, averaged norm

  APEX_AMP_HD CountNovoGrad(const Args& args, int64_t tensor) : args(args), tensor(tensor) {}
  APEX_AMP_HD bool skip() const { return args.gradient.skip(); }
  APEX_AMP_HD void operator()(float (&r)[kLists]) const {
    const double norm = static_cast<double>(args.grad_norms[tensor]) * args.gradient.inv_scale.load();
    const double earlier = r[0] == 0 && !args.init_zero ? norm : r[1];
    r[0] += 1;
    r[1] = static_cast<float>(args.l2_norm ? sqrt(args.beta2 * earlier * earlier + (1.0 - args.beta2) * norm * norm)
                                       : args.beta2 * earlier + (1.0 - args.beta2) * norm);
    const StepFactors corrections = bias_corrections(args.beta1, args.beta2, r[0], args.bias_correction);
    args.factors[tensor] = {corrections.first, r[1] / corrections.second + args.eps};
  }

  Args args;
  int64_t tensor;
};

struct NovoGradArgs {
  GradientArgs gradient;
  Scalar lr;
  Average first;  // first.rest is 1 without grad_averaging
  float weight_decay;
  bool reg_inside_moment;
  StepFactorsArgument factors;
};

template <bool kCopy>
struct NovoGradElement {
  using Args = NovoGradArgs;
  static constexpr int kLists = 3 + kCopy;  // gradient, parameter, exp_avg, copy
  static constexpr unsigned kReads = 0b111, kWrites = 0b110u | unsigned{kCopy} << 3;

  APEX_AMP_HD NovoGradElement(const Args& args, int64_t tensor)
      : skipped(args.gradient.skip()), first(args.first), inv_scale(args.gradient.inv_scale.load()),
        l2(args.reg_inside_moment ? args.weight_decay : 0.0f),
        shrink(args.reg_inside_moment ? 0.0f : args.lr.load() * args.weight_decay) {
    const StepFactors factors = args.factors.load(tensor);
    step_size = args.lr.load() / factors.first;
    (args.reg_inside_moment ? inv_scale : step_size) /= factors.second;
  }
  APEX_AMP_HD bool skip() const { return skipped; }
  template <class R>
  APEX_AMP_HD uint32_t operator()(R (&r)[kLists]) const {
    r[2] = first(r[2], r[0] * inv_scale + times(l2, r[1]));
    r[1] -= step_size * r[2] + times(shrink, r[1]);
    if constexpr (kCopy) r[3] = r[1];
    return 0;
  }

  bool skipped;
  Average first;
  float inv_scale, l2, shrink, step_size;
};

// ---- Adagrad -----------------------------------------------------------------------------------------------------

// Counts a step and leaves the learning rate's divisor, 1 + (step - 1) * lr_decay, in `factors`.
struct CountAdagrad {
  struct Args {
    Scalar found_inf;
    double lr_decay;
    StepFactors* factors;
  };
  static constexpr int kLists = 1;  // step

  APEX_AMP_HD CountAdagrad(const Args& args, int64_t tensor) : args(args), tensor(tensor) {}
  APEX_AMP_HD bool skip() const { return args.found_inf.load() != 0.0f; }
  APEX_AMP_HD void operator()(float (&r)[kLists]) const {
    args.factors[tensor] = {static_cast<float>(1.0 + r[0] * args.lr_decay), 1.0f};
    r[0] += 1;
  }

  Args args;
  int64_t tensor;
};

struct AdagradArgs {
  GradientArgs gradient;
  Scalar lr;
  float eps, weight_decay;
  bool decoupled;
  StepFactorsArgument factors;
};

template <bool kCopy>
struct AdagradElement {
  using Args = AdagradArgs;
  static constexpr int kLists = 3 + kCopy;  // gradient, parameter, sum, copy
  static constexpr unsigned kReads = 0b111, kWrites = 0b110u | unsigned{kCopy} << 3;

  APEX_AMP_HD AdagradElement(const Args& args, int64_t tensor)
      : skipped(args.gradient.skip()), inv_scale(args.gradient.inv_scale.load()), eps(args.eps),
        l2(args.decoupled ? 0.0f : args.weight_decay) {
    step_size = args.lr.load() / args.factors.load(tensor).first;
    shrink = step_size * (args.decoupled ? args.weight_decay : 0.0f);
  }
  APEX_AMP_HD bool skip() const { return skipped; }
  template <class R>
  APEX_AMP_HD uint32_t operator()(R (&r)[kLists]) const {
    const R gradient = r[0] * inv_scale + times(l2, r[1]);
    r[2] += gradient * gradient;
    r[1] -= step_size * (gradient / (sqrtf(r[2]) + eps)) + times(shrink, r[1]);
    if constexpr (kCopy) r[3] = r[1];
    return 0;
  }

  bool skipped;
  float inv_scale, eps, l2, step_size, shrink;
};

}  // namespace apex_amp
