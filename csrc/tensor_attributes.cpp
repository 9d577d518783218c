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

}  // namespace

void bind_tensor_attributes(py::module_& m) {
  m.def("versions", &versions);
  m.def("get_grads", &get_grads);
  m.def("same_grads", &same_grads);
  m.def("set_grads", &set_grads, py::arg("tensors"), py::arg("grads") = py::none());
  m.def("empty_unless_same_dtype", &empty_unless_same_dtype);
}

}  // namespace apex_amp
