// Attributes of many tensors at once, as functions of apex_amp._C: a Python loop that only reads `.grad` of every
// parameter costs as much as the kernel that unscales them all.
#include "bindings.h"
#include "tensor_lists.h"

namespace apex_amp {
namespace {

const at::Tensor& list_tensor(const char* function, const py::list& list, size_t i) {
  PyObject* const object = i < list.size() ? PyList_GET_ITEM(list.ptr(), i) : Py_None;
  if (!THPVariable_Check(object)) {
    throw py::type_error(text(function, ": [", i, "]: expected a torch.Tensor, got ", Py_TYPE(object)->tp_name));
  }
  return THPVariable_Unpack(object);
}

at::Tensor optional_tensor(const char* function, const py::list& list, size_t i) {
  const bool none = i < list.size() && PyList_GET_ITEM(list.ptr(), i) == Py_None;
  return none ? at::Tensor() : list_tensor(function, list, i);
}

int64_t version(const char* function, const py::list& list, size_t i) {
  return list_tensor(function, list, i)._version();
}

py::list versions(const py::list& tensors) {
  py::list result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyList_SET_ITEM(result.ptr(), i, PyLong_FromLongLong(version("versions", tensors, i)));
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

// The gradients of `tensors`, which those of `others` become.
py::list share_grads(const py::list& tensors, const py::list& others) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    list_tensor("share_grads", others, i).mutable_grad() = list_tensor("share_grads", tensors, i).grad();
  }
  return get_grads(tensors);
}

// The same, and the tensors have none any more.
py::list take_grads(const py::list& tensors) {
  py::list result = get_grads(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (PyList_GET_ITEM(result.ptr(), i) != Py_None) list_tensor("take_grads", tensors, i).mutable_grad().reset();
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

// Whether the multi-tensor ops read it: dense, in FP32 or less, and without a graph.
bool kernels_take(const at::Tensor& tensor) {
  const std::optional<DType> dtype = dtype_tag(tensor.scalar_type());
  return dtype && *dtype != DType::kDouble && tensor.layout() == at::kStrided && !tensor.requires_grad();
}

// The positions of gradients to be scaled, for nothing was there earlier; to be added to what was; of the same two
// kinds, but not for the multi-tensor ops; and of those that only were there earlier. None stands for no gradient.
py::tuple sort_grads(const py::list& grads, const py::list& earlier) {
  std::array<py::list, 4> positions;
  auto& [to_scale, to_add, others, kept] = positions;
  for (size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor grad = optional_tensor("sort_grads", grads, i), before = optional_tensor("sort_grads", earlier, i);
    if (!grad.defined() && !before.defined()) continue;
    const bool direct = grad.defined() && kernels_take(grad) && (!before.defined() || kernels_take(before));
    (!grad.defined() ? kept : !direct ? others : before.defined() ? to_add : to_scale).append(i);
  }
  return py::make_tuple(to_scale, to_add, others, kept);
}

// A tensor of up to so many elements costs more to make and free than to fill.
constexpr int64_t kSmallTensor = 4096;

// Whether `spare` can be written in place of a new at::empty_like(tensor, dtype): it is such a tensor, and nothing but
// the list that it is in knows of it or of its memory.
bool is_free(PyObject* spare, const at::Tensor& tensor, at::ScalarType dtype) {
  if (!THPVariable_CheckExact(spare) || Py_REFCNT(spare) != 1) return false;
  const at::Tensor& free = THPVariable_Unpack(spare);
  return free.use_count() == 1 && free.storage().use_count() == 1 && free.scalar_type() == dtype &&
         free.sizes() == tensor.sizes() && free.strides() == tensor.strides() && !free.requires_grad() &&
         free.is_inference() == tensor.is_inference();
}

// For every tensor itself, or uninitialized memory of its shape and layout where `like` has another dtype. The small
// ones of these on a CPU, where all that uses memory holds its tensor, stay in `spares` for calls to come.
py::list empty_unless_same_dtype(const py::list& tensors, const py::list& like, py::list spares) {
  py::list result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = list_tensor("empty_unless_same_dtype", tensors, i);
    const at::ScalarType dtype = list_tensor("empty_unless_same_dtype", like, i).scalar_type();
    if (tensor.scalar_type() == dtype) {
      PyList_SET_ITEM(result.ptr(), i, THPVariable_Wrap(tensor));
      continue;
    }
    while (spares.size() <= i) spares.append(py::none());
    py::object empty;
    if (is_free(PyList_GET_ITEM(spares.ptr(), i), tensor, dtype)) {
      empty = spares[i];
    } else {
      empty = py::reinterpret_steal<py::object>(THPVariable_Wrap(at::empty_like(tensor, dtype)));
      const bool keep = tensor.is_cpu() && !is_indirect(tensor) && tensor.numel() <= kSmallTensor;
      spares[i] = keep ? empty : py::none();
    }
    PyList_SET_ITEM(result.ptr(), i, empty.release().ptr());
  }
  return result;
}

// ---- pairs of tensors and the versions [first's, second's] at which they were equal last ----------------------------

// Where the first was written since then, and where only the second was.
std::pair<std::vector<size_t>, std::vector<size_t>> written_pairs(const py::list& firsts, const py::list& seconds,
                                                                  const py::list& seen) {
  std::vector<size_t> by_first, by_second;
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto versions = py::reinterpret_borrow<py::list>(PyList_GET_ITEM(seen.ptr(), i));
    const auto seen_version = [&](size_t which) { return PyLong_AsLongLong(PyList_GET_ITEM(versions.ptr(), which)); };
    if (version("written_pairs", firsts, i) != seen_version(0)) {
      by_first.push_back(i);
    } else if (version("written_pairs", seconds, i) != seen_version(1)) {
      by_second.push_back(i);
    }
  }
  return {by_first, by_second};
}

// Takes them for equal now.
void note_equal(const py::list& firsts, const py::list& seconds, const py::list& seen) {
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto versions = py::reinterpret_borrow<py::list>(PyList_GET_ITEM(seen.ptr(), i));
    versions[0] = version("note_equal", firsts, i);
    versions[1] = version("note_equal", seconds, i);
  }
}

}  // namespace

void bind_tensor_attributes(py::module_& m) {
  m.def("versions", &versions);
  m.def("get_grads", &get_grads);
  m.def("take_grads", &take_grads);
  m.def("share_grads", &share_grads);
  m.def("sort_grads", &sort_grads);
  m.def("written_pairs", &written_pairs);
  m.def("note_equal", &note_equal);
  m.def("same_grads", &same_grads);
  m.def("set_grads", &set_grads, py::arg("tensors"), py::arg("grads") = py::none());
  m.def("empty_unless_same_dtype", &empty_unless_same_dtype);
}

}  // namespace apex_amp
