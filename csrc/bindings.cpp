// The module apex_amp._C, and its multi-tensor ops.
#include "bindings.h"
#include "cast_function.h"
#include "tensor_lists.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/version.h>

#ifdef APEX_AMP_CUDA
#include <cuda.h>
#endif

namespace apex_amp {
namespace {

bool scale_lists(Call& call, TensorLists& lists, py::handle found_inf, const char* scale_name, py::handle scale,
                 py::handle found_inf_per_tensor) {
  const at::Tensor found = call.vector(found_inf, "found_inf", at::kFloat, 1);
  const at::Tensor flags =
      call.optional_vector(found_inf_per_tensor, "found_inf_per_tensor", at::kFloat, lists.size());
  const ScalarArgument factor = call.scalar(scale, scale_name);
  if (!call.direct) return false;
  run_elementwise<ScaleElement>(call.op, lists, found, flags, [&](at::Device device, auto& keep) {
    return ScaleElement::Args{factor.on(device, keep)};
  });
  return true;
}

bool multi_tensor_scale(py::handle src, py::handle dst, py::handle found_inf, py::handle scale,
                        py::handle found_inf_per_tensor) {
  Call call{"multi_tensor_scale"};
  TensorLists lists(call, {{"src", src, false}, {"dst", dst, true}}, /*doubles=*/true);
  return scale_lists(call, lists, found_inf, "scale", scale, found_inf_per_tensor);
}

bool multi_tensor_unscale_(py::handle grads, py::handle found_inf, py::handle inv_scale,
                           py::handle found_inf_per_tensor) {
  Call call{"multi_tensor_unscale_"};
  TensorLists lists(call, {{"grads", grads, false}, {"grads", grads, true}}, /*doubles=*/true);
  return scale_lists(call, lists, found_inf, "inv_scale", inv_scale, found_inf_per_tensor);
}

uint32_t check_mask(const Call& call, const std::string& check) {
  if (check == "x") return AxpbyElement::kCheckX;
  if (check == "y") return AxpbyElement::kCheckY;
  if (check == "both") return AxpbyElement::kCheckBoth;
  call.fail<py::value_error>("check", "\"x\", \"y\" or \"both\"", "\"" + check + "\"");
}

bool multi_tensor_axpby(py::handle x, py::handle y, py::handle out, py::handle found_inf, py::handle a, py::handle b,
                        const std::string& check, py::handle found_inf_per_tensor) {
  Call call{"multi_tensor_axpby"};
  TensorLists lists(call, {{"x", x, false}, {"y", y, false}, {"out", out, true}}, /*doubles=*/false);
  const at::Tensor found = call.vector(found_inf, "found_inf", at::kFloat, 1);
  const at::Tensor flags =
      call.optional_vector(found_inf_per_tensor, "found_inf_per_tensor", at::kFloat, lists.size());
  const ScalarArgument factor_a = call.scalar(a, "a"), factor_b = call.scalar(b, "b");
  const uint32_t mask = check_mask(call, check);
  if (!call.direct) return false;
  run_elementwise<AxpbyElement>(call.op, lists, found, flags, [&](at::Device device, auto& keep) {
    return AxpbyElement::Args{factor_a.on(device, keep), factor_b.on(device, keep), mask};
  });
  return true;
}

bool multi_tensor_copy(py::handle src, py::handle dst) {
  Call call{"multi_tensor_copy"};
  TensorLists lists(call, {{"src", src, false}, {"dst", dst, true}}, /*doubles=*/false);
  if (!call.direct) return false;
  run_elementwise<CopyElement>(call.op, lists, {}, {}, [](at::Device, auto&) { return CopyElement::Args{}; });
  return true;
}

bool multi_tensor_check(py::handle tensors, py::handle found_inf, py::handle found_inf_per_tensor) {
  Call call{"multi_tensor_check"};
  TensorLists lists(call, {{"tensors", tensors, false}}, /*doubles=*/false);
  const at::Tensor found = call.vector(found_inf, "found_inf", at::kFloat, 1);
  const at::Tensor flags =
      call.optional_vector(found_inf_per_tensor, "found_inf_per_tensor", at::kFloat, lists.size());
  if (!call.direct) return false;
  run_elementwise<CheckElement>(call.op, lists, found, flags, [](at::Device, auto&) { return CheckElement::Args{}; });
  return true;
}

// Sums of squares per tensor, in double on the first tensor's device.
at::Tensor square_sums(const char* op, TensorLists& lists) {
  const at::Device device = lists.device();
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  at::Tensor all = at::zeros({lists.size()}, options.device(device));
  for (const Group& group : lists.groups()) {
    const TensorTable table = group.table();
    const at::Tensor scratch = at::empty({norm_scratch_size(table)}, options.device(group.device));
    const bool same_device = group.device == device;
    const at::Tensor sums = same_device ? all : at::zeros({lists.size()}, options.device(group.device));
    double* const scratch_data = scratch.mutable_data_ptr<double>();
    double* const sums_data = sums.mutable_data_ptr<double>();
    run_on(op, group.device, [&] { return square_sums_cpu(table, scratch_data, sums_data, parallel_for); },
           APEX_AMP_ON_CUDA(square_sums_cuda(table, scratch_data, sums_data, stream)));
    if (!same_device) all.add_(sums.to(device));  // exact: a tensor's sum is zero everywhere but on its device
  }
  return all;
}

py::object multi_tensor_l2norm(py::handle tensors, bool per_tensor) {
  Call call{"multi_tensor_l2norm"};
  TensorLists lists(call, {{"tensors", tensors, false}}, /*doubles=*/true);
  if (!call.direct) return py::none();
  const at::NoGradGuard no_grad;
  const at::Tensor sums = square_sums(call.op, lists);
  const at::TensorOptions options = sums.options().dtype(at::kFloat);
  const at::Tensor total = at::empty({}, options);
  const at::Tensor norms = per_tensor ? at::empty({lists.size()}, options) : at::Tensor();
  const double* const sums_data = sums.const_data_ptr<double>();
  float* const total_data = total.mutable_data_ptr<float>();
  float* const norms_data = per_tensor ? norms.mutable_data_ptr<float>() : nullptr;
  run_on(call.op, sums.device(), [&] { return finish_norms_cpu(sums_data, lists.size(), total_data, norms_data); },
         APEX_AMP_ON_CUDA(finish_norms_cuda(sums_data, lists.size(), total_data, norms_data, stream)));
  if (per_tensor) return py::make_tuple(total, norms);
  return py::cast(total);
}

bool update_scale_(py::handle scale, py::handle growth_tracker, py::handle found_inf, double growth_factor,
                   double backoff_factor, int64_t growth_interval, double min_scale, double max_scale) {
  Call call{"update_scale_"};
  const at::Tensor scale_tensor = call.vector(scale, "scale", at::kFloat, 1);
  const at::Tensor tracker = call.vector(growth_tracker, "growth_tracker", at::kInt, 1);
  const at::Tensor found = call.vector(found_inf, "found_inf", at::kFloat, 1);
  if (tracker.device() != scale_tensor.device()) {
    call.fail<py::value_error>("growth_tracker", text("device ", scale_tensor.device(), " like scale"),
                               text(tracker.device()));
  }
  if (growth_interval < 1 || growth_interval > INT32_MAX) {
    call.fail<py::value_error>("growth_interval", "a number from 1 to 2**31 - 1", text(growth_interval));
  }
  if (!(min_scale <= max_scale)) {
    call.fail<py::value_error>("min_scale", text("at most max_scale = ", max_scale), text(min_scale));
  }
  if (!call.direct) return false;
  const at::NoGradGuard no_grad;
  const at::Tensor found_here = found.to(scale_tensor.device());
  const bool on_host = scale_tensor.is_cpu();
  const float before = on_host ? *scale_tensor.const_data_ptr<float>() : 0.0f;
  const UpdateScaleArgs args{scale_tensor.mutable_data_ptr<float>(), tracker.mutable_data_ptr<int32_t>(),
                             found_here.const_data_ptr<float>(), static_cast<float>(growth_factor),
                             static_cast<float>(backoff_factor), static_cast<int32_t>(growth_interval),
                             static_cast<float>(min_scale), static_cast<float>(max_scale)};
  run_on(call.op, scale_tensor.device(), [&] { return update_scale_cpu(args); },
         APEX_AMP_ON_CUDA(update_scale_cuda(args, stream)));
  if (!on_host || *scale_tensor.const_data_ptr<float>() != before) bump_version(scale_tensor);
  bump_version(tracker);
  return true;
}

// What this build is: see the keys.
py::dict build_info() {
  py::dict info;
  info["cuda"] = kHasCuda;
#ifdef APEX_AMP_CUDA
  info["cuda_version"] = text(CUDA_VERSION / 1000, ".", CUDA_VERSION % 1000 / 10);
  info["cuda_architectures"] = APEX_AMP_CUDA_ARCHITECTURES;
#else
  info["cuda_version"] = py::none();
  info["cuda_architectures"] = py::none();
#endif
  info["torch_version"] = TORCH_VERSION;
  info["cpu_isa"] = cpu_isa();
  return info;
}

}  // namespace
}  // namespace apex_amp

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace apex_amp;
  m.def("multi_tensor_scale", &multi_tensor_scale, py::arg("src"), py::arg("dst"), py::arg("found_inf"),
        py::arg("scale"), py::arg("found_inf_per_tensor") = py::none());
  m.def("multi_tensor_unscale_", &multi_tensor_unscale_, py::arg("grads"), py::arg("found_inf"),
        py::arg("inv_scale"), py::arg("found_inf_per_tensor") = py::none());
  m.def("multi_tensor_axpby", &multi_tensor_axpby, py::arg("x"), py::arg("y"), py::arg("out"), py::arg("found_inf"),
        py::arg("a"), py::arg("b"), py::arg("check") = "x", py::arg("found_inf_per_tensor") = py::none());
  m.def("multi_tensor_copy", &multi_tensor_copy);
  m.def("multi_tensor_l2norm", &multi_tensor_l2norm);
  m.def("multi_tensor_check", &multi_tensor_check);
  m.def("update_scale_", &update_scale_);
  m.def("build_info", &build_info);
  bind_optimizers(m);
  bind_tensor_attributes(m);
  if (!init_cast_function(m.ptr())) throw py::error_already_set();
}
