// From Python lists of tensors to checked tables for the executors, and the runs over them.
//
// A multi-tensor function checks every argument before it writes anything. It does nothing and returns False (None
// from l2norm) when pointers won't do: a tensor lives on a device this build has no kernels for or stands for other
// tensors (FakeTensor, DTensor, functional and batched ones), or a dispatch mode must see the call. multi_tensor.py
// then calls the registered op, and torch's dispatcher finds what to run.
#pragma once
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#ifdef APEX_AMP_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "multi_tensor.h"

namespace apex_amp {

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

inline std::optional<DType> dtype_tag(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf: return DType::kHalf;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kFloat: return DType::kFloat;
    case at::kDouble: return DType::kDouble;
    default: return std::nullopt;
  }
}

inline const char* dtype_name(at::ScalarType dtype) { return torch::getTHPDtype(dtype)->name; }

// Whether a tensor's values are in no memory of its own.
inline bool is_indirect(const at::Tensor& tensor) {
  static constexpr c10::DispatchKeySet keys{c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                            c10::DispatchKey::FuncTorchBatched,
                                            c10::DispatchKey::FuncTorchGradWrapper};
  return tensor.key_set().has_any(keys);
}

inline bool has_kernels(at::Device device) { return device.is_cpu() || (kHasCuda && device.is_cuda()); }

inline void bump_version(const at::Tensor& tensor) {
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

  void require_tensor(PyObject* object, const char* argument, int64_t index = -1) const {
    if (THPVariable_Check(object)) return;
    fail<py::type_error>(index < 0 ? argument : text(argument, "[", index, "]"), "a torch.Tensor",
                         Py_TYPE(object)->tp_name);
  }

  void look_at(const at::Tensor& tensor) { direct = direct && !is_indirect(tensor) && has_kernels(tensor.device()); }

  // Flags, scales and counters: contiguous, of one dtype and a given number of elements.
  const at::Tensor& vector(py::handle object, const char* argument, at::ScalarType dtype, int64_t numel) {
    require_tensor(object.ptr(), argument);
    const at::Tensor& result = THPVariable_Unpack(object.ptr());
    look_at(result);
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

  void resize(int64_t positions) {
    sizes.resize(positions);
    index.resize(positions);
    for (std::vector<void*>& list : data) {
      if (!list.empty()) list.resize(positions);  // the lists that the op has
    }
  }

  TensorTable table() const {
    TensorTable table{static_cast<int64_t>(sizes.size()), sizes.data(), index.data(), {}, {}};
    for (int l = 0; l < kMaxLists; ++l) {
      table.data[l] = data[l].data();
      table.dtype[l] = dtypes[l];
    }
    return table;
  }
};

// Lists that an op walks in step. The constructor checks and groups them; groups() is complete only when the call is
// direct. finish() comes after the executors.
class TensorLists {
 public:
  TensorLists(Call& call, std::vector<ListArgument> arguments, bool doubles)
      : call_(call), arguments_(std::move(arguments)), doubles_(doubles) {
    for (size_t l = 0; l < arguments_.size(); ++l) unpack_list(l);
    for (int64_t i = 0; i < size_; ++i) {
      for (size_t l = 0; l < arguments_.size(); ++l) check_tensor(l, i);
      if (call_.direct && tensor(0, i).numel() != 0) add(i);
      if (i == 0 && add_all_like_first()) break;
    }
  }

  int64_t size() const { return size_; }
  const at::Tensor& tensor(size_t list, int64_t i) const { return THPVariable_Unpack(items_[list][i]); }
  at::Device device() const { return size_ ? tensor(0, 0).device() : at::Device(at::kCPU); }
  bool all_of(int64_t i, at::ScalarType dtype) const {
    for (size_t l = 0; l < arguments_.size(); ++l) {
      if (tensor(l, i).scalar_type() != dtype) return false;
    }
    return true;
  }
  std::string dtype_names(int64_t i) const {
    std::string names;
    for (size_t l = 0; l < arguments_.size(); ++l) {
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
    for (int64_t i = 0; i < size_; ++i) {
      if (tensor(0, i).numel() != 0) add(i);
    }
  }

  // Writes stand-ins back and counts the writes in the tensors' versions.
  void finish() {
    for (auto& [strided, dense] : written_stand_ins_) strided.copy_(dense);
    at::parallel_for(0, size_, kGrainSize, [&](int64_t begin, int64_t end) {
      for (size_t l = 0; l < arguments_.size(); ++l) {
        for (int64_t i = begin; i < end && arguments_[l].written; ++i) bump_version(tensor(l, i));
      }
    });
  }

 private:
  // Positions that are worth another thread: each tensor's object, TensorImpl, storage and version lie in cache lines
  // of their own, so that a walk over thousands mostly waits for memory.
  static constexpr int64_t kGrainSize = 1024;
  static constexpr int64_t kBlock = 32;

  const c10::TensorImpl& impl(size_t l, int64_t i) const { return *tensor(l, i).unsafeGetTensorImpl(); }
  std::string name(size_t list, int64_t i) const { return text(arguments_[list].name, "[", i, "]"); }

  void unpack_list(size_t l) {
    const auto& [name, argument, written] = arguments_[l];
    if (!PyList_Check(argument.ptr()) && !PyTuple_Check(argument.ptr())) {
      call_.fail<py::type_error>(name, "a list of tensors", Py_TYPE(argument.ptr())->tp_name);
    }
    // The tuple keeps the tensors alive while the GIL is released and other threads may change the list.
    held_.push_back(py::reinterpret_steal<py::object>(PySequence_Tuple(argument.ptr())));
    items_[l] = PySequence_Fast_ITEMS(held_[l].ptr());
    const int64_t size = PyTuple_GET_SIZE(held_[l].ptr());
    if (l == 0) size_ = size;
    if (size != size_) {
      call_.fail<py::value_error>(name, text(size_, " tensors like ", arguments_[0].name), text(size));
    }
    for (int64_t i = 0; i < size; ++i) call_.require_tensor(items_[l][i], name, i);
  }

  // The short way for lists of plain tensors: adds all positions if they have contiguous tensors that differ from the
  // first position's, which has been checked, in nothing but a shape; false: each has to be looked at.
  bool add_all_like_first() {
    if (groups_.empty() || !stand_ins_.empty()) return false;
    Group& group = groups_[0];
    group.resize(size_);
    std::iota(group.index.begin(), group.index.end(), 0);
    std::atomic<bool> alike{true};
    at::parallel_for(0, size_, kGrainSize, [&](int64_t begin, int64_t end) {
      // One list at a time, because the shorter a loop is the more of its cache misses overlap; and in blocks, so that
      // the shapes to compare with are still there.
      for (int64_t block = begin; block < end; block += kBlock) {
        for (size_t l = 0; l < arguments_.size(); ++l) {
          if (!fill_like_first(group, l, block, std::min(end, block + kBlock))) return alike.store(false);
        }
      }
    });
    if (!alike) group.resize(1);
    return alike;
  }

  bool fill_like_first(Group& group, size_t l, int64_t begin, int64_t end) const {
    const c10::TensorImpl& first = impl(l, 0);
    for (int64_t i = begin; i < end; ++i) {
      const c10::TensorImpl& tensor = impl(l, i);
      // The keys tell layout, views that negate, and whether the values are in memory of its own.
      if (tensor.key_set() != first.key_set() || tensor.dtype() != first.dtype() ||
          tensor.device() != first.device() || !tensor.is_contiguous() || tensor.sizes() != impl(0, i).sizes() ||
          tensor.numel() == 0) return false;
      // A lazy copy is copied where it is first written, which is no work for several threads.
      if (arguments_[l].written && (c10::impl::cow::is_cow_data_ptr(tensor.unsafe_storage().data_ptr()) ||
                                    (refuses_grad_ && tensor.requires_grad()))) return false;
      if (l == 0) group.sizes[i] = tensor.numel();
      group.data[l][i] = data(l, this->tensor(l, i));
    }
    return true;
  }

  void check_tensor(size_t l, int64_t i) const {
    const at::Tensor& tensor = this->tensor(l, i);
    const at::Tensor& first = this->tensor(0, i);
    call_.look_at(tensor);
    const std::optional<DType> dtype = dtype_tag(tensor.scalar_type());
    if (!dtype || (*dtype == DType::kDouble && !doubles_)) {
      const char* expected = doubles_ ? "float16, bfloat16, float32 or float64" : "float16, bfloat16 or float32";
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
    if (refuses_grad_ && tensor.requires_grad()) {
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
    for (size_t l = 0; l < arguments_.size(); ++l) {
      const at::Tensor& other = tensor(l, i);
      if (other.is_neg()) return false;
      if (contiguous ? !other.is_contiguous() : other.strides() != first.strides()) return false;
    }
    return true;
  }

  Group& group_of(int64_t i) {
    const at::Device device = tensor(0, i).device();
    std::array<DType, kMaxLists> dtypes{};
    for (size_t l = 0; l < arguments_.size(); ++l) dtypes[l] = *dtype_tag(tensor(l, i).scalar_type());
    const auto found = std::find_if(groups_.begin(), groups_.end(), [&](const Group& group) {
      return group.device == device && group.dtypes == dtypes;
    });
    if (found != groups_.end()) return *found;
    Group& group = groups_.emplace_back(Group{device, dtypes, {}, {}, {}});
    group.sizes.reserve(size_);
    group.index.reserve(size_);
    for (size_t l = 0; l < arguments_.size(); ++l) group.data[l].reserve(size_);
    return group;
  }

  void add(int64_t i) {
    Group& group = group_of(i);
    const bool in_place = same_dense_layout(i);
    group.sizes.push_back(tensor(0, i).numel());
    group.index.push_back(i);
    for (size_t l = 0; l < arguments_.size(); ++l) {
      group.data[l].push_back(data(l, in_place ? tensor(l, i) : stand_in(l, i)));
    }
  }

  // A read list gets a void* as well: the executors write through written lists only.
  void* data(size_t l, const at::Tensor& tensor) const {
    return arguments_[l].written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
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
  const std::vector<ListArgument> arguments_;
  const bool doubles_;
  const bool refuses_grad_ = at::GradMode::is_enabled();
  std::vector<py::object> held_;
  std::array<PyObject* const*, kMaxLists> items_{};
  int64_t size_ = 0;
  std::vector<Group> groups_;
  std::vector<at::Tensor> stand_ins_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_stand_ins_;
};

// ---- running the executors ---------------------------------------------------------------------------------------

inline void parallel_for(int64_t begin, int64_t end, int64_t grain_size, void (*body)(void*, int64_t, int64_t),
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
// Executors on its own device raise it in place, others through zeros that fold_back() merges. The version of flags on
// the host moves only when one is raised.
class Flags {
 public:
  explicit Flags(at::Tensor flags) : flags_(std::move(flags)), raised_before_(raised_on_host(flags_)) {}

  float* on(at::Device device) {
    if (!flags_.defined()) return nullptr;
    if (device == flags_.device()) {
      if (device.is_cuda()) bump_version(flags_);
      return flags_.mutable_data_ptr<float>();
    }
    stand_ins_.push_back(at::zeros_like(flags_, flags_.options().device(device)));
    return stand_ins_.back().mutable_data_ptr<float>();
  }

  void fold_back() {
    if (raised_on_host(flags_) != raised_before_) bump_version(flags_);
    for (const at::Tensor& stand_in : stand_ins_) {
      if (stand_in.is_cpu() && raised_on_host(stand_in) == 0) continue;
      flags_.masked_fill_(stand_in.to(flags_.device()).to(at::kBool), 1.0);
    }
  }

 private:
  static int64_t raised_on_host(const at::Tensor& flags) {
    if (!flags.defined() || !flags.is_cpu()) return 0;
    const float* const data = flags.const_data_ptr<float>();
    return std::count_if(data, data + flags.numel(), [](float flag) { return flag != 0.0f; });
  }

  at::Tensor flags_;
  int64_t raised_before_;
  std::vector<at::Tensor> stand_ins_;
};

// Refuses, before anything is written, dtypes that Element has no kernel for.
template <class Element>
void require_kernels(const Call& call, const TensorLists& lists) {
  for (const Group& group : lists.groups()) {
    const auto exists = [](auto...) { return Status{}; };
    using DTypes = typename ElementDTypes<Element>::type;
    if (dispatch_dtypes(group.dtypes.data(), DTypes{}, exists).code == Status::kOk) continue;
    call.fail<py::type_error>(text("dtypes at position ", group.index[0]),
                              "float32 state, and half-precision model_params of float32 params only",
                              lists.dtype_names(group.index[0]));
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

}  // namespace apex_amp
