// The fused optimizers' update rules as functions of apex_amp._C.
#include "bindings.h"
#include "tensor_lists.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace apex_amp {
namespace {

// Every list of a step is on one device, and nothing is written before all arguments are known to be right.

// The lists that an update rule walks, with the model's low-precision copies (None: there are none) last.
std::vector<ListArgument> with_copies(std::vector<ListArgument> arguments, py::handle copies) {
  if (!copies.is_none()) arguments.push_back({"model_params", copies, true});
  return arguments;
}

// The arguments that all update rules take alike.
struct StepArguments {
  StepArguments(Call& call, const TensorLists& lists, py::handle found_inf, py::handle inv_scale, py::handle lr)
      : device(lists.device()), found_inf_(call.optional_scalar(found_inf, "found_inf", 0.0f)),
        inv_scale_(call.optional_scalar(inv_scale, "inv_scale", 1.0f)), lr_(call.scalar(lr, "lr")) {
    for (const Group& group : lists.groups()) {
      if (group.device == device) continue;
      call.fail<py::value_error>(text("grads[", group.index[0], "]"), text("device ", device, " like grads[0]"),
                                 text(group.device));
    }
  }

  GradientArgs gradient() { return {found_inf_.on(device, keep), inv_scale_.on(device, keep)}; }
  Scalar lr() { return lr_.on(device, keep); }

  const at::Device device;
  std::vector<at::Tensor> keep;

 private:
  const ScalarArgument found_inf_, inv_scale_, lr_;
};

// The step counts of the parameters: a float32 tensor of one element each, counted by a Count* element, or one number
// for all that has been counted already.
class StepCounts {
 public:
  StepCounts(Call& call, const TensorLists& updated, std::vector<ListArgument> lists) : call_(call) {
    if (PyFloat_Check(lists[0].object.ptr()) || PyLong_Check(lists[0].object.ptr())) {
      number_ = lists[0].object.cast<double>();
      return;
    }
    lists_.emplace(call, std::move(lists), /*doubles=*/false);
    if (lists_->size() != updated.size()) {
      call.fail<py::value_error>("steps", text(updated.size(), " tensors like grads"), text(lists_->size()));
    }
    for (int64_t i = 0; i < updated.size(); ++i) {
      const at::Tensor& step = lists_->tensor(0, i);
      if (step.numel() == 1 && step.device() == updated.device() && lists_->all_of(i, at::kFloat)) continue;
      call.fail<py::value_error>(text("steps[", i, "]"),
                                 text("one element of float32 on ", updated.device(), " like grads[", i, "]"),
                                 text("shape ", step.sizes(), " on ", step.device(), ", ", lists_->dtype_names(i)));
    }
  }

  // args_for(factors) makes the arguments of Count, of_number(step) the factors of a number.
  template <class Count, class ArgsFor, class OfNumber>
  StepFactorsArgument count(at::Device device, ArgsFor args_for, OfNumber of_number) {
    if (!lists_) return {of_number(number_), nullptr};
    factors_ = at::empty({lists_->size(), 2}, at::TensorOptions().dtype(at::kFloat).device(device));
    StepFactors* const factors = reinterpret_cast<StepFactors*>(factors_.mutable_data_ptr<float>());
    const typename Count::Args args = args_for(factors);
    for (const Group& group : lists_->groups()) {
      const TensorTable table = group.table();
      run_on(call_.op, device, [&] { return run_count_cpu<Count>(table, args); },
             APEX_AMP_ON_CUDA(run_count_cuda<Count>(table, args, stream)));
    }
    lists_->finish();
    return {{}, factors};
  }

 private:
  Call& call_;
  double number_ = 0;
  std::optional<TensorLists> lists_;
  at::Tensor factors_;
};

template <template <bool> class Element>
void require_update_kernels(const Call& call, const TensorLists& lists, bool copies) {
  copies ? require_kernels<Element<true>>(call, lists) : require_kernels<Element<false>>(call, lists);
}

template <template <bool> class Element, class Args>
void run_update(const Call& call, TensorLists& lists, bool copies, const Args& args) {
  const auto same = [&](at::Device, auto&) { return args; };
  copies ? run_elementwise<Element<true>>(call.op, lists, {}, {}, same)
         : run_elementwise<Element<false>>(call.op, lists, {}, {}, same);
}

Average average(double beta, double rest) { return {static_cast<float>(beta), static_cast<float>(rest)}; }
Average average(double beta) { return average(beta, 1.0 - beta); }

// A step of Adam's moments, which LAMB has too.
StepFactorsArgument count_adam(StepCounts& counts, at::Device device, const GradientArgs& gradient, double beta1,
                               double beta2, bool bias_correction) {
  return counts.count<CountAdam>(
      device, [&](StepFactors* out) { return CountAdam::Args{gradient.found_inf, beta1, beta2, bias_correction, out}; },
      [&](double number) { return bias_corrections(beta1, beta2, number, bias_correction); });
}

bool multi_tensor_adam(py::handle grads, py::handle params, py::handle exp_avgs, py::handle exp_avg_sqs,
                       py::handle steps, py::handle model_params, py::handle found_inf, py::handle inv_scale,
                       py::handle lr, double beta1, double beta2, float eps, float weight_decay, bool adam_w_mode,
                       bool bias_correction) {
  Call call{"multi_tensor_adam"};
  const bool copies = !model_params.is_none();
  TensorLists lists(call, with_copies({{"grads", grads, false}, {"params", params, true},
                                       {"exp_avgs", exp_avgs, true}, {"exp_avg_sqs", exp_avg_sqs, true}},
                                      model_params), /*doubles=*/false);
  StepCounts counts(call, lists, {{"steps", steps, true}});
  StepArguments step(call, lists, found_inf, inv_scale, lr);
  if (!call.direct) return false;
  require_update_kernels<AdamElement>(call, lists, copies);
  const GradientArgs gradient = step.gradient();
  const StepFactorsArgument factors = count_adam(counts, step.device, gradient, beta1, beta2, bias_correction);
  run_update<AdamElement>(call, lists, copies, AdamArgs{gradient, step.lr(), average(beta1), average(beta2), eps,
                                                        weight_decay, adam_w_mode, factors});
  return true;
}

template <bool kCopy>
using SgdWithMomentum = SgdElement<true, kCopy>;
template <bool kCopy>
using SgdWithoutMomentum = SgdElement<false, kCopy>;

bool multi_tensor_sgd(py::handle grads, py::handle params, py::handle momentum_buffers, py::handle model_params,
                      py::handle found_inf, py::handle inv_scale, py::handle lr, float momentum, double dampening,
                      float weight_decay, bool nesterov, bool first_run, bool wd_after_momentum) {
  Call call{"multi_tensor_sgd"};
  const bool copies = !model_params.is_none();
  std::vector<ListArgument> arguments{{"grads", grads, false}, {"params", params, true}};
  if (momentum != 0.0f) arguments.push_back({"momentum_buffers", momentum_buffers, true});
  TensorLists lists(call, with_copies(std::move(arguments), model_params), /*doubles=*/false);
  StepArguments step(call, lists, found_inf, inv_scale, lr);
  if (!call.direct) return false;
  const SgdArgs args{step.gradient(), step.lr(), momentum, static_cast<float>(1.0 - dampening), weight_decay,
                     nesterov, first_run, wd_after_momentum};
  if (momentum != 0.0f) {
    require_update_kernels<SgdWithMomentum>(call, lists, copies);
    run_update<SgdWithMomentum>(call, lists, copies, args);
  } else {
    require_update_kernels<SgdWithoutMomentum>(call, lists, copies);
    run_update<SgdWithoutMomentum>(call, lists, copies, args);
  }
  return true;
}

// LAMB's first stage: moves the moments; returns the sums of squares of parameters and updates, [2, tensors].
at::Tensor move_lamb_moments(const Call& call, TensorLists& lists, const LambArgs& args, at::Device device) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble).device(device);
  at::Tensor sums = at::zeros({LambMomentsElement::kSums, lists.size()}, options);
  for (const Group& group : lists.groups()) {
    const TensorTable table = group.table();
    const at::Tensor scratch = at::empty({LambMomentsElement::kSums * norm_scratch_size(table)}, options);
    double* const scratch_data = scratch.mutable_data_ptr<double>();
    double* const sums_data = sums.mutable_data_ptr<double>();
    run_on(call.op, device,
           [&] { return run_summing_cpu<LambMomentsElement>(table, args, scratch_data, sums_data, lists.size(),
                                                            parallel_for); },
           APEX_AMP_ON_CUDA(run_summing_cuda<LambMomentsElement>(table, args, scratch_data, sums_data, lists.size(),
                                                                 stream)));
  }
  lists.finish();
  return sums;
}

bool multi_tensor_lamb(py::handle grads, py::handle params, py::handle exp_avgs, py::handle exp_avg_sqs,
                       py::handle steps, py::handle model_params, py::handle found_inf, py::handle inv_scale,
                       py::handle lr, py::handle grad_norm, double beta1, double beta2, float eps,
                       float weight_decay, bool adam_w_mode, bool bias_correction, bool grad_averaging,
                       float max_grad_norm, bool use_nvlamb) {
  Call call{"multi_tensor_lamb"};
  const bool copies = !model_params.is_none();
  TensorLists moments(call, {{"grads", grads, false}, {"params", params, false}, {"exp_avgs", exp_avgs, true},
                             {"exp_avg_sqs", exp_avg_sqs, true}}, /*doubles=*/false);
  TensorLists parameters(call, with_copies({{"params", params, true}, {"exp_avgs", exp_avgs, false},
                                            {"exp_avg_sqs", exp_avg_sqs, false}}, model_params), /*doubles=*/false);
  StepCounts counts(call, moments, {{"steps", steps, true}});
  StepArguments step(call, moments, found_inf, inv_scale, lr);
  const ScalarArgument norm = call.scalar(grad_norm, "grad_norm");
  if (!call.direct) return false;
  const at::NoGradGuard no_grad;
  require_kernels<LambMomentsElement>(call, moments);
  require_update_kernels<LambParameterElement>(call, parameters, copies);
  const GradientArgs gradient = step.gradient();
  const StepFactorsArgument factors = count_adam(counts, step.device, gradient, beta1, beta2, bias_correction);
  LambArgs args{gradient, step.lr(), norm.on(step.device, step.keep),
                average(beta1, grad_averaging ? 1.0 - beta1 : 1.0), average(beta2), eps, weight_decay, max_grad_norm,
                adam_w_mode, use_nvlamb || weight_decay != 0.0f, factors, nullptr, nullptr};
  const at::Tensor sums = move_lamb_moments(call, moments, args, step.device);
  args.parameter_squares = sums.const_data_ptr<double>();
  args.update_squares = args.parameter_squares + moments.size();
  parameters.refresh();
  run_update<LambParameterElement>(call, parameters, copies, args);
  return true;
}

bool multi_tensor_novograd(py::handle grads, py::handle params, py::handle exp_avgs, py::handle averaged_norms,
                           py::handle steps, py::handle model_params, py::handle found_inf, py::handle inv_scale,
                           py::handle lr, py::handle grad_norms, double beta1, double beta2, float eps,
                           float weight_decay, bool bias_correction, bool grad_averaging, bool reg_inside_moment,
                           bool l2_norm, bool init_zero) {
  Call call{"multi_tensor_novograd"};
  const bool copies = !model_params.is_none();
  TensorLists lists(call, with_copies({{"grads", grads, false}, {"params", params, true},
                                       {"exp_avgs", exp_avgs, true}}, model_params), /*doubles=*/false);
  StepCounts counts(call, lists, {{"steps", steps, true}, {"averaged_norms", averaged_norms, true}});
  StepArguments step(call, lists, found_inf, inv_scale, lr);
  const at::Tensor norms = call.vector(grad_norms, "grad_norms", at::kFloat, lists.size());
  if (!call.direct) return false;
  require_update_kernels<NovoGradElement>(call, lists, copies);
  const GradientArgs gradient = step.gradient();
  const at::Tensor norms_here = norms.to(step.device);
  const StepFactorsArgument factors = counts.count<CountNovoGrad>(
      step.device,
      [&](StepFactors* out) {
        return CountNovoGrad::Args{gradient, norms_here.const_data_ptr<float>(), beta1, beta2, eps,
                                          bias_correction, init_zero, l2_norm, out};
      },
      [&](double) -> StepFactors { call.fail<py::type_error>("steps", "a list of tensors", "a number"); });
  run_update<NovoGradElement>(call, lists, copies,
                              NovoGradArgs{gradient, step.lr(), average(beta1, grad_averaging ? 1.0 - beta1 : 1.0),
                                           weight_decay, reg_inside_moment, factors});
  return true;
}

bool multi_tensor_adagrad(py::handle grads, py::handle params, py::handle sums, py::handle steps,
                          py::handle model_params, py::handle found_inf, py::handle inv_scale, py::handle lr,
                          double lr_decay, float eps, float weight_decay, bool adagrad_w_mode) {
  Call call{"multi_tensor_adagrad"};
  const bool copies = !model_params.is_none();
  TensorLists lists(call, with_copies({{"grads", grads, false}, {"params", params, true}, {"sums", sums, true}},
                                      model_params), /*doubles=*/false);
  StepCounts counts(call, lists, {{"steps", steps, true}});
  StepArguments step(call, lists, found_inf, inv_scale, lr);
  if (!call.direct) return false;
  require_update_kernels<AdagradElement>(call, lists, copies);
  const GradientArgs gradient = step.gradient();
  const StepFactorsArgument factors = counts.count<CountAdagrad>(
      step.device, [&](StepFactors* out) { return CountAdagrad::Args{gradient.found_inf, lr_decay, out}; },
      [&](double number) { return StepFactors{static_cast<float>(1.0 + (number - 1.0) * lr_decay), 1.0f}; });
  run_update<AdagradElement>(call, lists, copies,
                             AdagradArgs{gradient, step.lr(), eps, weight_decay, adagrad_w_mode, factors});
  return true;
}

// Whether all lists hold torch.Tensors and Parameters only, no other subclass and no None, that are dense, of a dtype
// that the update rules take, and on one device.
bool are_plain(const py::args& lists) {
  std::optional<at::Device> device;
  for (const py::handle list : lists) {
    for (const py::handle object : py::reinterpret_borrow<py::list>(list)) {
      if (!THPVariable_CheckExact(object.ptr())) return false;
      const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
      const std::optional<DType> dtype = dtype_tag(tensor.scalar_type());
      if (!dtype || *dtype == DType::kDouble || tensor.layout() != at::kStrided) return false;
      if (tensor.device() != device.value_or(tensor.device())) return false;
      device = tensor.device();
    }
  }
  return true;
}

// For each key the list of what the dicts in `states` have there, None where that is nothing.
std::vector<py::list> state_lists(const py::list& states, const py::args& keys) {
  std::vector<py::list> lists;
  for (size_t k = 0; k < keys.size(); ++k) lists.emplace_back(states.size());
  for (size_t i = 0; i < states.size(); ++i) {
    for (size_t k = 0; k < keys.size(); ++k) {
      PyObject* value = PyDict_GetItemWithError(PyList_GET_ITEM(states.ptr(), i), PyTuple_GET_ITEM(keys.ptr(), k));
      if (!value && PyErr_Occurred()) throw py::error_already_set();
      PyList_SET_ITEM(lists[k].ptr(), i, py::handle(value ? value : Py_None).inc_ref().ptr());
    }
  }
  return lists;
}

}  // namespace

void bind_optimizers(py::module_& m) {
  m.def("are_plain", &are_plain);
  m.def("state_lists", &state_lists);
  m.def("multi_tensor_adam", &multi_tensor_adam);
  m.def("multi_tensor_sgd", &multi_tensor_sgd);
  m.def("multi_tensor_lamb", &multi_tensor_lamb);
  m.def("multi_tensor_novograd", &multi_tensor_novograd);
  m.def("multi_tensor_adagrad", &multi_tensor_adagrad);
}

}  // namespace apex_amp
