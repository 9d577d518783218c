// Attributes of tensors, mostly of many at once, as functions of apex_amp._C: a Python loop that only reads `.grad` of
// every parameter costs as much as the kernel that unscales them all.
#include "bindings.h"
#include "tensor_lists.h"

#include <string.h>

namespace apex_amp {
namespace {

// A Python list of tensors, and of None where `optional`.
class Tensors {
 public:
  Tensors(const char* function, const py::list& list, bool optional = false)
      : size_(list.size()), items_(PySequence_Fast_ITEMS(list.ptr())) {
    for (size_t i = 0; i < size_; ++i) {
      if (THPVariable_Check(items_[i]) || (optional && is_none(i))) continue;
      throw py::type_error(text(function, ": [", i, "]: expected a torch.Tensor, got ", Py_TYPE(items_[i])->tp_name));
    }
  }

  size_t size() const { return size_; }
  bool is_none(size_t i) const { return items_[i] == Py_None; }
  const at::Tensor& operator[](size_t i) const { return THPVariable_Unpack(items_[i]); }

 private:
  size_t size_;
  PyObject* const* items_;
};

// Lists that are walked in step must be equally long.
void require_size(const char* function, const Tensors& tensors, size_t size) {
  if (tensors.size() == size) return;
  throw py::value_error(text(function, ": expected lists of one length, got ", size, " and ", tensors.size()));
}

PyObject* wrap(const at::Tensor& tensor) { return THPVariable_Wrap(tensor); }  // None where undefined

py::list versions(const py::list& list) {
  const Tensors tensors("versions", list);
  py::list result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyList_SET_ITEM(result.ptr(), i, PyLong_FromLongLong(tensors[i]._version()));
  }
  return result;
}

py::list get_grads(const py::list& list) {
  const Tensors tensors("get_grads", list);
  py::list result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) PyList_SET_ITEM(result.ptr(), i, wrap(tensors[i].grad()));
  return result;
}

// The gradients of tensors, which then have none.
py::list take_grads(const py::list& list) {
  const Tensors tensors("take_grads", list);
  py::list result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& grad = tensors[i].mutable_grad();
    PyList_SET_ITEM(result.ptr(), i, wrap(grad));
    grad.reset();
  }
  return result;
}

// The gradients of `from`, which are those of `to` as well afterwards.
py::list share_grads(const py::list& from, const py::list& to) {
  const Tensors tensors("share_grads", from), others("share_grads", to);
  require_size("share_grads", others, tensors.size());
  py::list result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& grad = tensors[i].grad();
    PyList_SET_ITEM(result.ptr(), i, wrap(grad));
    others[i].mutable_grad() = grad;
  }
  return result;
}

// Whether tensors at one position have one gradient, or none, both.
bool same_grads(const py::list& list, const py::list& other_list) {
  const Tensors tensors("same_grads", list), others("same_grads", other_list);
  require_size("same_grads", others, tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].grad().is_same(others[i].grad())) return false;
  }
  return true;
}

// The caller answers for shapes and devices; dtypes may differ from the tensors'. grads None: all of them.
void set_grads(const py::list& list, const std::optional<py::list>& grad_list) {
  const Tensors tensors("set_grads", list), grads("set_grads", grad_list ? *grad_list : list, /*optional=*/true);
  require_size("set_grads", grads, tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool clear = !grad_list || grads.is_none(i);
    tensors[i].mutable_grad() = clear ? at::Tensor() : grads[i];
  }
}

// Whether the multi-tensor ops read it: dense, in FP32 or less, and without a graph.
bool kernels_take(const at::Tensor& tensor) {
  const std::optional<DType> dtype = dtype_tag(tensor.scalar_type());
  return dtype && *dtype != DType::kDouble && tensor.layout() == at::kStrided && !tensor.requires_grad();
}

// Whether the multi-tensor ops read every gradient that there is, and nothing was there earlier.
bool are_first(const py::list& grad_list, const py::list& earlier_list) {
  const Tensors grads("are_first", grad_list, /*optional=*/true), earlier("are_first", earlier_list, true);
  require_size("are_first", earlier, grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!earlier.is_none(i) || (!grads.is_none(i) && !kernels_take(grads[i]))) return false;
  }
  return true;
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

// at::empty_like(tensor, dtype). Small ones on a CPU, where all that uses memory holds its tensor, stay in `spares`
// at i for calls to come.
py::object empty_like(const at::Tensor& tensor, at::ScalarType dtype, py::list& spares, size_t i) {
  while (spares.size() <= i) spares.append(py::none());
  if (is_free(PyList_GET_ITEM(spares.ptr(), i), tensor, dtype)) return spares[i];
  const auto made = py::reinterpret_steal<py::object>(wrap(at::empty_like(tensor, dtype)));
  const bool keep = tensor.is_cpu() && !is_indirect(tensor) && tensor.numel() <= kSmallTensor;
  spares[i] = keep ? made : py::none();
  return made;
}

// What is to be done with gradients, by position: to be scaled, for nothing was there earlier; to be added to what
// was; of these two kinds, but not for the multi-tensor ops; and only there earlier. With the first kind go tensors of
// the holders' dtypes to scale them into, the gradient itself where that is its own. None stands for no gradient.
py::tuple sort_grads(const py::list& grad_list, const py::list& earlier_list, const py::list& holder_list,
                     py::list spares) {
  const Tensors grads("sort_grads", grad_list, /*optional=*/true), earlier("sort_grads", earlier_list, true);
  const Tensors holders("sort_grads", holder_list);
  require_size("sort_grads", earlier, grads.size());
  require_size("sort_grads", holders, grads.size());
  std::vector<size_t> to_scale, to_add, others, kept;
  py::list results;
  for (size_t i = 0; i < grads.size(); ++i) {
    const bool none = grads.is_none(i), first = earlier.is_none(i);
    if (none && first) continue;
    const bool direct = !none && kernels_take(grads[i]) && (first || kernels_take(earlier[i]));
    (none ? kept : !direct ? others : first ? to_scale : to_add).push_back(i);
    if (!direct || !first) continue;
    const at::ScalarType dtype = holders[i].scalar_type();
    results.append(grads[i].scalar_type() == dtype ? py::object(grad_list[i]) : empty_like(grads[i], dtype, spares, i));
  }
  const auto positions = [&](const std::vector<size_t>& chosen) -> py::object {
    if (chosen.size() != grads.size()) return py::cast(chosen);
    return py::reinterpret_steal<py::object>(PyObject_CallFunction((PyObject*)&PyRange_Type, "n", chosen.size()));
  };
  return py::make_tuple(positions(to_scale), results, positions(to_add), positions(others), positions(kept));
}

// Whether `object` is a list of the same objects; none of them is looked at.
bool same_objects(const py::object& object, const py::list& list) {
  if (!PyList_Check(object.ptr()) || py::len(object) != list.size()) return false;
  PyObject* const* const items = PySequence_Fast_ITEMS(list.ptr());
  return std::equal(items, items + list.size(), PySequence_Fast_ITEMS(object.ptr()));
}

// ---- pairs of tensors, and in a bytearray the versions {first's, second's} at which each pair was equal last -------

using Versions = std::array<int64_t, 2>;

// Calls visit(i, versions of pair i now, bytes of those seen last) for all pairs, or for those at `positions`.
template <class Visit>
void for_each_pair(const char* function, const py::list& first_list, const py::list& second_list,
                   const py::object& seen, const std::optional<std::vector<size_t>>& positions, Visit visit) {
  const Tensors firsts(function, first_list), seconds(function, second_list);
  require_size(function, seconds, firsts.size());
  if (!PyByteArray_Check(seen.ptr()) || py::len(seen) != firsts.size() * sizeof(Versions)) {
    throw py::value_error(text(function, ": expected a bytearray of ", sizeof(Versions), " bytes a pair"));
  }
  char* const bytes = PyByteArray_AS_STRING(seen.ptr());
  const auto visit_pair = [&](size_t i) {
    visit(i, Versions{firsts[i]._version(), seconds[i]._version()}, bytes + i * sizeof(Versions));
  };
  if (!positions) {
    for (size_t i = 0; i < firsts.size(); ++i) visit_pair(i);
    return;
  }
  for (const size_t i : *positions) visit_pair(i);
}

// Where the first was written since then, and where only the second was.
std::pair<std::vector<size_t>, std::vector<size_t>> written_pairs(
    const py::list& firsts, const py::list& seconds, const py::object& seen,
    const std::optional<std::vector<size_t>>& positions) {
  std::vector<size_t> by_first, by_second;
  const auto compare = [&](size_t i, const Versions& now, const char* bytes) {
    Versions last;
    memcpy(&last, bytes, sizeof(last));
    if (now[0] != last[0]) {
      by_first.push_back(i);
    } else if (now[1] != last[1]) {
      by_second.push_back(i);
    }
  };
  for_each_pair("written_pairs", firsts, seconds, seen, positions, compare);
  return {by_first, by_second};
}

// Takes the pairs for equal now.
void note_equal(const py::list& firsts, const py::list& seconds, const py::object& seen,
                const std::optional<std::vector<size_t>>& positions) {
  for_each_pair("note_equal", firsts, seconds, seen, positions,
                [](size_t, const Versions& now, char* bytes) { memcpy(bytes, &now, sizeof(now)); });
}

// The number that a CPU tensor of one float32 element holds: a load, where Tensor.item() is a dispatched operator.
float host_value(py::handle object) {
  Call call{"host_value"};
  const at::Tensor& tensor = call.vector(object, "tensor", at::kFloat, 1);
  if (is_indirect(tensor) || !tensor.is_cpu()) {
    call.fail<py::value_error>("tensor", "memory of its own on the CPU", text(tensor.device()));
  }
  return *tensor.const_data_ptr<float>();
}

}  // namespace

void bind_tensor_attributes(py::module_& m) {
  m.def("versions", &versions);
  m.def("get_grads", &get_grads);
  m.def("take_grads", &take_grads);
  m.def("share_grads", &share_grads);
  m.def("same_grads", &same_grads);
  m.def("set_grads", &set_grads, py::arg("tensors"), py::arg("grads") = py::none());
  m.def("are_first", &are_first);
  m.def("sort_grads", &sort_grads);
  m.def("same_objects", &same_objects);
  m.def("written_pairs", &written_pairs);
  m.def("note_equal", &note_equal);
  m.def("host_value", &host_value);
}

}  // namespace apex_amp
