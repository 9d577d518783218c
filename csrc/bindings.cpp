// The one pybind11 unit of apex_amp._C: Python lists of tensors in, checked tables for the executors out.
//
// A multi-tensor function checks every argument before it writes anything. It does nothing and returns False (None
// from l2norm) when pointers won't do: a tensor lives on a device this build has no kernels for or stands for other
// tensors (FakeTensor, DTensor, functional and batched ones), or a dispatch mode must see the call. multi_tensor.py
// then calls the registered op, and torch's dispatcher finds what to run.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#ifdef APEX_AMP_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#endif

#include "cast_function.h"
#include "multi_tensor.h"

namespace apex_amp {
namespace {

#ifdef APEX_AMP_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

// ---- arguments and their errors ----------------------------------------------------------------------------------

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

std::optional<DType> dtype_tag(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf: return DType::kHalf;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kFloat: return DType::kFloat;
    case at::kDouble: return DType::kDouble;
    default: return std::nullopt;
  }
}

const char* dtype_name(at::ScalarType dtype) { return torch::getTHPDtype(dtype)->name; }

// Whether a tensor's values are in no memory of its own.
bool is_indirect(const at::Tensor& tensor) {
  static constexpr c10::DispatchKeySet keys{c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                            c10::DispatchKey::FuncTorchBatched,
                                            c10::DispatchKey::FuncTorchGradWrapper};
  return tensor.key_set().has_any(keys);
}

bool has_kernels(at::Device device) { return device.is_cpu() || (kHasCuda && device.is_cuda()); }

void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// A float, or a float32 tensor of one element that is read where it lives.
struct ScalarArgument {
  float value = 0.0f;
  at::Tensor tensor;

  // As an executor on `device` can read it; the tensor is kept alive in `keep`.
  Scalar on(at::Device device, std::vector<at::Tensor>& keep) const {
    if (!tensor.defined()) return {value, nullptr};
    if (device.is_cpu() || tensor.is_cpu()) return {*tensor.cpu().const_data_ptr<float>(), nullptr};
    keep.push_back(tensor.to(device));
    return {0.0f, keep.back().const_data_ptr<float>()};
  }
};

// Unpacks the arguments of one call, with the call's name in every error.
struct Call {
  const char* op;
  // Whether pointers will do, as far as the arguments were seen.
  bool direct = !c10::impl::TorchDispatchModeTLS::any_modes_set();

  template <class Error>
  [[noreturn]] void fail(const std::string& argument, const std::string& expected, const std::string& got) const {
    throw Error(text(op, ": ", argument, ": expected ", expected, ", got ", got));
  }

  const at::Tensor& tensor(py::handle object, const char* argument, int64_t index = -1) {
    if (!THPVariable_Check(object.ptr())) {
      fail<py::type_error>(index < 0 ? argument : text(argument, "[", index, "]"), "a torch.Tensor",
                           Py_TYPE(object.ptr())->tp_name);
    }
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    direct = direct && !is_indirect(tensor) && has_kernels(tensor.device());
    return tensor;
  }

  // Flags, scales and counters: contiguous, of one dtype and a given number of elements.
  const at::Tensor& vector(py::handle object, const char* argument, at::ScalarType dtype, int64_t numel) {
    const at::Tensor& result = tensor(object, argument);
    if (result.scalar_type() != dtype) {
      fail<py::type_error>(argument, text("dtype ", dtype_name(dtype)), dtype_name(result.scalar_type()));
    }
    if (result.layout() != at::kStrided || result.numel() != numel || !result.is_contiguous()) {
      fail<py::value_error>(argument, text("a contiguous tensor of ", numel, " element(s)"),
                            text("shape ", result.sizes()));
    }
    return result;
  }

  at::Tensor optional_vector(py::handle object, const char* argument, at::ScalarType dtype, int64_t numel) {
    return object.is_none() ? at::Tensor() : vector(object, argument, dtype, numel);
  }

  ScalarArgument optional_scalar(py::handle object, const char* argument, float otherwise) {
    return object.is_none() ? ScalarArgument{otherwise, {}} : scalar(object, argument);
  }

  ScalarArgument scalar(py::handle object, const char* argument) {
    if (THPVariable_Check(object.ptr())) return {0.0f, vector(object, argument, at::kFloat, 1)};
    const double value = PyFloat_AsDouble(object.ptr());
    if (value == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      fail<py::type_error>(argument, "a float or a float32 tensor of one element", Py_TYPE(object.ptr())->tp_name);
    }
    return {static_cast<float>(value), {}};
  }
};

const at::Tensor& list_tensor(const char* function, const py::list& list, size_t i) {
  PyObject* const object = i < list.size() ? PyList_GET_ITEM(list.ptr(), i) : Py_None;
  if (!THPVariable_Check(object)) {
    throw py::type_error(text(function, ": [", i, "]: expected a torch.Tensor, got ", Py_TYPE(object)->tp_name));
  }
  return THPVariable_Unpack(object);
}

// ---- lists of tensors --------------------------------------------------------------------------------------------

struct ListArgument {
  const char* name;
  py::handle object;
  bool written;
};

// The positions of the lists whose tensors share one device and one dtype per list.
struct Group {
  at::Device device;
  std::array<DType, kMaxLists> dtypes{};
  std::vector<int64_t> sizes, index;
  std::array<std::vector<void*>, kMaxLists> data;

  TensorTable table() const {
    TensorTable table{static_cast<int64_t>(sizes.size()), sizes.data(), index.data(), {}, {}};
    for (int l = 0; l < kMaxLists; ++l) {
      table.data[l] = data[l].data();
      table.dtype[l] = dtypes[l];
    }
    return table;
  }
};

// Lists that an op walks in step. The constructor checks and groups them, one position after the other because
// thousands of tensors outgrow the caches; groups() is complete only when the call is direct. finish() comes after
// the executors.
class TensorLists {
 public:
  TensorLists(Call& call, std::vector<ListArgument> arguments, bool doubles)
      : call_(call), arguments_(std::move(arguments)) {
    for (const ListArgument& argument : arguments_) unpack_list(argument);
    for (int64_t i = 0; i < size(); ++i) {
      for (size_t l = 0; l < lists_.size(); ++l) {
        lists_[l][i] = &call_.tensor(PyTuple_GET_ITEM(held_[l].ptr(), i), arguments_[l].name, i);
        check_tensor(l, i, doubles);
      }
      if (call_.direct && tensor(0, i).numel() != 0) add_to_group(i);
    }
  }

  int64_t size() const { return static_cast<int64_t>(lists_[0].size()); }
  const at::Tensor& tensor(size_t list, int64_t i) const { return *lists_[list][i]; }
  std::array<DType, kMaxLists> dtypes(int64_t i) const {
    std::array<DType, kMaxLists> dtypes{};
    for (size_t l = 0; l < lists_.size(); ++l) dtypes[l] = *dtype_tag(tensor(l, i).scalar_type());
    return dtypes;
  }
  bool all_of(int64_t i, at::ScalarType dtype) const {
    return std::all_of(lists_.begin(), lists_.end(), [&](const auto& list) { return list[i]->scalar_type() == dtype; });
  }
  std::string dtype_names(int64_t i) const {
    std::string names;
    for (size_t l = 0; l < lists_.size(); ++l) {
      names += text(l ? ", " : "", arguments_[l].name, " ", dtype_name(tensor(l, i).scalar_type()));
    }
    return names;
  }

  const std::vector<Group>& groups() const { return groups_; }

  // Copies again what can't be walked in place, once another op has written it.
  void refresh() {
    if (stand_ins_.empty()) return;
    groups_.clear();
    stand_ins_.clear();
    written_stand_ins_.clear();
    for (int64_t i = 0; i < size(); ++i) {
      if (tensor(0, i).numel() != 0) add_to_group(i);
    }
  }

  // Writes stand-ins back and counts the writes in the tensors' versions.
  void finish() {
    for (auto& [strided, dense] : written_stand_ins_) strided.copy_(dense);
    for (size_t l = 0; l < lists_.size(); ++l) {
      if (!arguments_[l].written) continue;
      for (const at::Tensor* tensor : lists_[l]) bump_version(*tensor);
    }
  }

 private:
  std::string name(size_t list, int64_t i) const { return text(arguments_[list].name, "[", i, "]"); }

  void unpack_list(const ListArgument& argument) {
    PyObject* object = argument.object.ptr();
    if (!PyList_Check(object) && !PyTuple_Check(object)) {
      call_.fail<py::type_error>(argument.name, "a list of tensors", Py_TYPE(object)->tp_name);
    }
    // The tuple keeps the tensors alive while the GIL is released and other threads may change the list.
    held_.push_back(py::reinterpret_steal<py::object>(PySequence_Tuple(object)));
    lists_.emplace_back(PyTuple_GET_SIZE(held_.back().ptr()));
    if (lists_.back().size() != lists_[0].size()) {
      call_.fail<py::value_error>(argument.name, text(lists_[0].size(), " tensors like ", arguments_[0].name),
                                  text(lists_.back().size()));
    }
  }

  void check_tensor(size_t l, int64_t i, bool doubles) const {
    const at::Tensor& tensor = *lists_[l][i];
    const at::Tensor& first = *lists_[0][i];
    const std::optional<DType> dtype = dtype_tag(tensor.scalar_type());
    if (!dtype || (*dtype == DType::kDouble && !doubles)) {
      const char* expected = doubles ? "float16, bfloat16, float32 or float64" : "float16, bfloat16 or float32";
      call_.fail<py::type_error>(name(l, i), expected, dtype_name(tensor.scalar_type()));
    }
    if (tensor.layout() != at::kStrided) {
      call_.fail<py::value_error>(name(l, i), "a dense tensor", text("layout ", tensor.layout()));
    }
    if (l > 0 && tensor.device() != first.device()) {
      call_.fail<py::value_error>(name(l, i), text("device ", first.device(), " like ", name(0, i)),
                                  text(tensor.device()));
    }
    if (is_indirect(tensor)) return;  // its sizes may be symbols; the op it is dispatched to checks them
    if (l > 0 && tensor.sizes() != first.sizes()) {
      call_.fail<py::value_error>(name(l, i), text("shape ", first.sizes(), " like ", name(0, i)),
                                  text(tensor.sizes()));
    }
    if (arguments_[l].written) check_written(tensor, l, i);
  }

  void check_written(const at::Tensor& tensor, size_t l, int64_t i) const {
    if (at::GradMode::is_enabled() && tensor.requires_grad()) {
      call_.fail<py::value_error>(name(l, i), "a tensor that doesn't require grad, or a call under torch.no_grad(),"
                                  " because the op writes it in place", "requires_grad=True");
    }
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      call_.fail<py::value_error>(name(l, i), "elements that don't share memory, because the op writes them",
                                  text("strides ", tensor.strides(), " (an expanded tensor?)"));
    }
  }

  // Whether the tensors at position i can be walked by pointer in step: dense, in the same element order.
  bool same_dense_layout(int64_t i) const {
    const at::Tensor& first = tensor(0, i);
    const bool contiguous = first.is_contiguous();
    if (!contiguous && !first.is_non_overlapping_and_dense()) return false;
    return std::all_of(lists_.begin(), lists_.end(), [&](const auto& list) {
      return !list[i]->is_neg() &&
             (contiguous ? list[i]->is_contiguous() : list[i]->strides() == first.strides());
    });
  }

  Group& group_for(int64_t i) {
    const std::array<DType, kMaxLists> dtypes = this->dtypes(i);
    const at::Device device = tensor(0, i).device();
    const auto found = std::find_if(groups_.rbegin(), groups_.rend(), [&](const Group& group) {
      return group.device == device && group.dtypes == dtypes;
    });
    if (found != groups_.rend()) return *found;
    Group& group = groups_.emplace_back(Group{device, dtypes, {}, {}, {}});
    group.sizes.reserve(size());
    group.index.reserve(size());
    for (size_t l = 0; l < lists_.size(); ++l) group.data[l].reserve(size());
    return group;
  }

  void add_to_group(int64_t i) {
    Group& group = group_for(i);
    const bool in_place = same_dense_layout(i);
    group.sizes.push_back(tensor(0, i).numel());
    group.index.push_back(i);
    for (size_t l = 0; l < lists_.size(); ++l) {
      const at::Tensor& place = in_place ? tensor(l, i) : stand_in(l, i);
      // A read list gets a void* as well: the executors write through written lists only.
      group.data[l].push_back(arguments_[l].written ? place.mutable_data_ptr()
                                                    : const_cast<void*>(place.const_data_ptr()));
    }
  }

  // A contiguous copy, for positions whose tensors are strided or differ in layout.
  const at::Tensor& stand_in(size_t l, int64_t i) {
    const at::NoGradGuard no_grad;
    at::Tensor dense = at::empty_like(tensor(l, i), at::MemoryFormat::Contiguous);
    dense.copy_(tensor(l, i));
    if (arguments_[l].written) written_stand_ins_.emplace_back(tensor(l, i), dense);
    return stand_ins_.emplace_back(std::move(dense));
  }

  Call& call_;
  std::vector<ListArgument> arguments_;
  std::vector<py::object> held_;
  std::vector<std::vector<const at::Tensor*>> lists_;
  std::vector<Group> groups_;
  std::vector<at::Tensor> stand_ins_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_stand_ins_;
};

// ---- running the executors ---------------------------------------------------------------------------------------

void parallel_for(int64_t begin, int64_t end, int64_t grain_size, void (*body)(void*, int64_t, int64_t),
                  void* context) {
  at::parallel_for(begin, end, grain_size, [=](int64_t b, int64_t e) { body(context, b, e); });
}

// Calls cpu() or cuda(stream of the device, made current), without the GIL.
template <class Cpu, class Cuda>
void run_on(const char* op, at::Device device, Cpu cpu, [[maybe_unused]] Cuda cuda) {
  Status status;
  {
    py::gil_scoped_release no_gil;
#ifdef APEX_AMP_CUDA
    if (device.is_cuda()) {
      const c10::cuda::CUDAGuard guard(device);
      status = cuda(static_cast<void*>(c10::cuda::getCurrentCUDAStream().stream()));
    } else {
      status = cpu();
    }
#else
    status = cpu();
#endif
  }
  if (status.code == Status::kCudaError) throw std::runtime_error(text(op, ": CUDA error: ", status.detail));
  if (status.code != Status::kOk) throw py::type_error(text(op, ": no kernel for this combination of dtypes"));
}

#ifdef APEX_AMP_CUDA
#define APEX_AMP_ON_CUDA(call) [&](void* stream) { return call; }
#else
#define APEX_AMP_ON_CUDA(call) nullptr
#endif

// A flags tensor (found_inf or found_inf_per_tensor; undefined: none) that executors on several devices raise.
// A CUDA device's own flags are raised in place; all others through zeros that fold_back() merges, so that the
// version of flags on the host moves only when one is raised.
class Flags {
 public:
  explicit Flags(at::Tensor flags) : flags_(std::move(flags)) {}

  float* on(at::Device device) {
    if (!flags_.defined()) return nullptr;
    if (device.is_cuda() && device == flags_.device()) {
      bump_version(flags_);
      return flags_.mutable_data_ptr<float>();
    }
    stand_ins_.push_back(at::zeros_like(flags_, flags_.options().device(device)));
    return stand_ins_.back().mutable_data_ptr<float>();
  }

  void fold_back() {
    for (const at::Tensor& stand_in : stand_ins_) {
      if (stand_in.is_cpu() && !any(stand_in)) continue;
      flags_.masked_fill_(stand_in.to(flags_.device()).to(at::kBool), 1.0);
    }
  }

 private:
  static bool any(const at::Tensor& flags) {
    const float* data = flags.const_data_ptr<float>();
    return std::any_of(data, data + flags.numel(), [](float flag) { return flag != 0.0f; });
  }

  at::Tensor flags_;
  std::vector<at::Tensor> stand_ins_;
};

// Refuses, before anything is written, dtypes that Element has no kernel for.
template <class Element>
void require_kernels(const Call& call, const TensorLists& lists) {
  std::array<DType, kMaxLists> checked{};
  for (int64_t i = 0; i < lists.size(); ++i) {
    const std::array<DType, kMaxLists> dtypes = lists.dtypes(i);
    if (i > 0 && dtypes == checked) continue;
    checked = dtypes;
    const auto exists = [](auto...) { return Status{}; };
    if (dispatch_dtypes(dtypes.data(), typename ElementDTypes<Element>::type{}, exists).code == Status::kOk) continue;
    call.fail<py::type_error>(text("dtypes at position ", i),
                              "float32 state, and half-precision model_params of float32 params only",
                              lists.dtype_names(i));
  }
}

// Runs an elementwise op over checked lists; `args_on(device, keep)` makes its arguments for one device.
template <class Element, class ArgsOn>
void run_elementwise(const char* op, TensorLists& lists, const at::Tensor& found_inf, const at::Tensor& per_tensor,
                     ArgsOn args_on) {
  const at::NoGradGuard no_grad;
  Flags any_flag(found_inf), tensor_flags(per_tensor);
  std::vector<at::Tensor> keep;
  for (const Group& group : lists.groups()) {
    const TensorTable table = group.table();
    const typename Element::Args args = args_on(group.device, keep);
    const FoundInf found{any_flag.on(group.device), tensor_flags.on(group.device)};
    run_on(op, group.device, [&] { return run_elementwise_cpu<Element>(table, args, found, parallel_for); },
           APEX_AMP_ON_CUDA(run_elementwise_cuda<Element>(table, args, found, stream)));
  }
  lists.finish();
  any_flag.fold_back();
  tensor_flags.fold_back();
}

// ---- the ops -----------------------------------------------------------------------------------------------------

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
  const at::Device device = lists.size() ? lists.tensor(0, 0).device() : at::Device(at::kCPU);
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
  const UpdateScaleArgs args{scale_tensor.mutable_data_ptr<float>(), tracker.mutable_data_ptr<int32_t>(),
                             found_here.const_data_ptr<float>(), static_cast<float>(growth_factor),
                             static_cast<float>(backoff_factor), static_cast<int32_t>(growth_interval),
                             static_cast<float>(min_scale), static_cast<float>(max_scale)};
  run_on(call.op, scale_tensor.device(), [&] { return update_scale_cpu(args); },
         APEX_AMP_ON_CUDA(update_scale_cuda(args, stream)));
  bump_version(scale_tensor);
  bump_version(tracker);
  return true;
}

// ---- the optimizers' steps ---------------------------------------------------------------------------------------
//
// Every list of a step is on one device, and nothing is written before all arguments are known to be right.

// The lists that an update rule walks, with the model's low-precision copies (None: there are none) last.
std::vector<ListArgument> with_copies(std::vector<ListArgument> arguments, py::handle copies) {
  if (!copies.is_none()) arguments.push_back({"model_params", copies, true});
  return arguments;
}

// The arguments that all update rules take alike.
struct StepArguments {
  StepArguments(Call& call, const TensorLists& lists, py::handle found_inf, py::handle inv_scale, py::handle lr)
      : device(lists.size() ? lists.tensor(0, 0).device() : at::Device(at::kCPU)),
        found_inf_(call.optional_scalar(found_inf, "found_inf", 0.0f)),
        inv_scale_(call.optional_scalar(inv_scale, "inv_scale", 1.0f)), lr_(call.scalar(lr, "lr")) {
    for (int64_t i = 0; i < lists.size(); ++i) {
      if (lists.tensor(0, i).device() == device) continue;
      call.fail<py::value_error>(text("grads[", i, "]"), text("device ", device, " like grads[0]"),
                                 text(lists.tensor(0, i).device()));
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
      const at::Device device = updated.tensor(0, i).device();
      if (step.numel() == 1 && step.device() == device && lists_->all_of(i, at::kFloat)) continue;
      call.fail<py::value_error>(text("steps[", i, "]"),
                                 text("one element of float32 on ", device, " like grads[", i, "]"),
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
  const StepFactorsArgument factors = counts.count<CountAdam>(
      step.device,
      [&](StepFactors* out) { return CountAdam::Args{gradient.found_inf, beta1, beta2, bias_correction, out}; },
      [&](double number) { return bias_corrections(beta1, beta2, number, bias_correction); });
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
  const StepFactorsArgument factors = counts.count<CountAdam>(
      step.device,
      [&](StepFactors* out) { return CountAdam::Args{gradient.found_inf, beta1, beta2, bias_correction, out}; },
      [&](double number) { return bias_corrections(beta1, beta2, number, bias_correction); });
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

// ---- attributes of many tensors at once --------------------------------------------------------------------------
//
// A Python loop that only reads `.grad` of every parameter costs as much as the kernel that unscales them all.

py::list versions(const py::list& tensors) {
  py::list result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyList_SET_ITEM(result.ptr(), i, PyLong_FromLongLong(list_tensor("versions", tensors, i)._version()));
  }
  return result;
}

py::list get_grads(const py::list& tensors) {
  py::list result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& grad = list_tensor("get_grads", tensors, i).grad();
    PyList_SET_ITEM(result.ptr(), i, THPVariable_Wrap(grad));  // None where undefined
  }
  return result;
}

// Whether tensors at one position have one gradient, or none, both.
bool same_grads(const py::list& tensors, const py::list& others) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& grad = list_tensor("same_grads", tensors, i).grad();
    if (!grad.is_same(list_tensor("same_grads", others, i).grad())) return false;
  }
  return true;
}

// The caller answers for shapes and devices; dtypes may differ from the tensors'. grads None: all of them.
void set_grads(const py::list& tensors, const std::optional<py::list>& grads) {
  if (grads && grads->size() != tensors.size()) {
    throw py::value_error(text("set_grads: grads: expected ", tensors.size(), " like tensors, got ", grads->size()));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool clear = !grads || PyList_GET_ITEM(grads->ptr(), i) == Py_None;
    list_tensor("set_grads", tensors, i).mutable_grad() = clear ? at::Tensor() : list_tensor("set_grads", *grads, i);
  }
}

// For every tensor itself, or uninitialized memory of its shape and layout where `like` has another dtype.
py::list empty_unless_same_dtype(const py::list& tensors, const py::list& like) {
  py::list result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = list_tensor("empty_unless_same_dtype", tensors, i);
    const at::ScalarType dtype = list_tensor("empty_unless_same_dtype", like, i).scalar_type();
    const bool same = tensor.scalar_type() == dtype;
    PyList_SET_ITEM(result.ptr(), i, THPVariable_Wrap(same ? tensor : at::empty_like(tensor, dtype)));
  }
  return result;
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
  m.def("multi_tensor_adam", &multi_tensor_adam);
  m.def("multi_tensor_sgd", &multi_tensor_sgd);
  m.def("multi_tensor_lamb", &multi_tensor_lamb);
  m.def("multi_tensor_novograd", &multi_tensor_novograd);
  m.def("multi_tensor_adagrad", &multi_tensor_adagrad);
  m.def("versions", &versions);
  m.def("get_grads", &get_grads);
  m.def("same_grads", &same_grads);
  m.def("set_grads", &set_grads, py::arg("tensors"), py::arg("grads") = py::none());
  m.def("empty_unless_same_dtype", &empty_unless_same_dtype);
  m.def("build_info", &build_info);
  if (!init_cast_function(m.ptr())) throw py::error_already_set();
}
