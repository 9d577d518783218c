// CastFunction: a callable that stands in front of a torch function and brings tensor arguments to the
// dtype its policy asks for. With nothing to cast it hands the caller's argument vector on unchanged.
//
// Two pieces of state decide: what a thread's innermost CastScope says, else the process default.
// The weight cache holds casts of leaf float parameters; every rule that keeps it from serving a stale
// cast is in `cached_cast`. All state but the process default is guarded by the GIL or thread-local.
#include "cast_function.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_to_copy.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <structmember.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace apex_amp {
namespace {

using at::ScalarType;

// ---------------------------------------------------------------------------------------------
// Cast state

// What casts aim at: kOff, or the level's low-precision type. kUnset: nothing decided at this place.
enum CastType : int8_t { kUnset = -1, kOff = 0, kHalf = 1, kBFloat16 = 2 };

constexpr std::array<ScalarType, 3> kScalarTypes = {ScalarType::Undefined, ScalarType::Half, ScalarType::BFloat16};

std::atomic<int8_t> default_cast_type{kOff};
constexpr uint32_t kNoDevices = 0, kAllDevices = 0xffffffffu;  // a bit per c10::DeviceType
std::atomic<uint32_t> cast_devices{kAllDevices};

// What a CastScope sets for its thread, and puts back.
struct Scoped {
  int8_t scope = kUnset;       // the type it casts to
  bool held = false;           // it is an explicit off, which forwards inside it do not lift
  bool uncached = false;       // it casts parameters anew at each use
  bool region = false;         // it is a region of the native face, whose casts leave with the outermost one
  uint32_t devices = 0;        // a bit per c10::DeviceType that it casts; 0: those of the process
  uint32_t other_devices = 0;  // those among them whose casts go to the other low-precision type
};

struct CastScope;

struct ThreadState : Scoped {  // of the innermost CastScope
  CastScope* innermost = nullptr;  // of those entered and not left; owned
  bool has_bounded_entries = false;  // this forward put entries into the cache that must leave with it
  int32_t forward_depth = 0;
  uint64_t forward = 0;  // serial number of the outermost forward of an initialized model; 0 outside one
  // The torch.autocast regions that code being traced has entered, by c10::DeviceType, and what held outside them.
  std::array<uint8_t, 32> traced_autocasts{};
  int32_t all_traced_autocasts = 0;
  Scoped entry;
};

// initial-exec: one %fs-relative load instead of a call to __tls_get_addr.
__attribute__((tls_model("initial-exec"))) thread_local ThreadState thread_state;

uint64_t last_forward = 0;

inline CastType cast_type_of(const Scoped& scoped) {
  const int8_t scope = scoped.scope;
  return static_cast<CastType>(scope == kUnset ? default_cast_type.load(std::memory_order_relaxed) : scope);
}

inline uint32_t devices_of(const Scoped& scoped) {
  return scoped.devices ? scoped.devices : cast_devices.load(std::memory_order_relaxed);
}

inline CastType current_cast_type() { return cast_type_of(thread_state); }
inline uint32_t current_devices() { return devices_of(thread_state); }

inline int8_t other_type(int8_t cast_type) { return cast_type == kHalf ? kBFloat16 : kHalf; }

// What casts on one device type aim at.
inline int8_t cast_type_on(uint32_t device) {
  const CastType cast_type = current_cast_type();
  if (cast_type == kOff || !(current_devices() & device)) return kOff;
  return thread_state.other_devices & device ? other_type(cast_type) : cast_type;
}

// The present state, but with casts to `cast_type` on one device type; on the others, what is cast now still is.
Scoped scoped_on(uint32_t device, int8_t cast_type) {
  Scoped next = thread_state;
  const CastType outer = current_cast_type();
  const uint32_t elsewhere = outer == kOff ? kNoDevices : current_devices() & ~device;
  const uint32_t others = next.other_devices & elsewhere;
  if (cast_type == kOff) {
    next.scope = elsewhere ? outer : kOff;
    next.devices = elsewhere;
    next.other_devices = others;
  } else {
    next.scope = cast_type;
    next.devices = device | elsewhere;
    next.other_devices = outer == cast_type ? others : elsewhere & ~others;
  }
  return next;
}

PyObject* dtype_object(int8_t cast_type) {
  if (cast_type <= kOff) Py_RETURN_NONE;
  return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(kScalarTypes[cast_type])));
}

// torch.float16, torch.bfloat16 or None; false with an error set for anything else.
bool parse_cast_type(PyObject* object, int8_t* cast_type) {
  *cast_type = kOff;
  if (object == Py_None) return true;
  if (THPDtype_Check(object)) {
    const auto type = reinterpret_cast<THPDtype*>(object)->scalar_type;
    if (type == ScalarType::Half) *cast_type = kHalf;
    if (type == ScalarType::BFloat16) *cast_type = kBFloat16;
  }
  if (*cast_type != kOff) return true;
  PyErr_Format(PyExc_ValueError, "cast type must be torch.float16, torch.bfloat16 or None, got %R", object);
  return false;
}

// "cpu", "cuda", ... as a bit; false with an error set for anything else.
bool parse_device_type(PyObject* object, uint32_t* device) {
  const char* name = PyUnicode_AsUTF8(object);
  if (name == nullptr) return false;
  try {
    *device = 1u << static_cast<unsigned>(c10::Device(name).type());
    return true;
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    return false;
  }
}

// ---------------------------------------------------------------------------------------------
// Tensors among the arguments

// Kinds of tensor an argument list holds. A zero-dimensional double does not count: torch's own
// promotion ignores it too.
enum Kind : unsigned { kHalfKind = 1, kBFloat16Kind = 2, kFloatKind = 4, kDoubleKind = 8, kSparseKind = 16 };
constexpr unsigned kLowKinds = kHalfKind | kBFloat16Kind;
constexpr unsigned kCastKinds = kLowKinds | kFloatKind;

inline bool is_tensor(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (THPVariable_CheckTypeExact(type)) return true;
  if (type == &PyLong_Type || type == &PyFloat_Type || type == &PyTuple_Type || type == &PyList_Type ||
      object == Py_None || type == &PyBool_Type || type == &PyUnicode_Type) {
    return false;
  }
  return PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

inline bool is_sequence(PyObject* object) { return PyTuple_CheckExact(object) || PyList_CheckExact(object); }

inline unsigned tensor_kind(PyObject* object) {
  const c10::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
  unsigned kind = 0;
  switch (c10::typeMetaToScalarType(impl->dtype())) {
    case ScalarType::Half: kind = kHalfKind; break;
    case ScalarType::BFloat16: kind = kBFloat16Kind; break;
    case ScalarType::Float: kind = kFloatKind; break;
    case ScalarType::Double: return impl->dim() > 0 ? kDoubleKind : 0;
    default: return 0;
  }
  const auto device = static_cast<unsigned>(impl->device().type());
  if (!((current_devices() >> device) & 1u)) return 0;
  if (C10_UNLIKELY(impl->key_set().has_any(c10::sparse_ks | c10::sparse_csr_ks))) kind |= kSparseKind;
  return kind;
}

unsigned argument_kinds(PyObject* object) {
  if (is_tensor(object)) return tensor_kind(object);
  if (!is_sequence(object)) return 0;
  unsigned kinds = 0;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    kinds |= argument_kinds(PySequence_Fast_GET_ITEM(object, i));
  }
  return kinds;
}

// Whether the argument has a tensor on one of `devices`, a bit per c10::DeviceType.
bool is_on(PyObject* object, uint32_t devices) {
  if (is_tensor(object)) return devices >> static_cast<unsigned>(THPVariable_Unpack(object).device().type()) & 1u;
  if (!is_sequence(object)) return false;
  PyObject** items = PySequence_Fast_ITEMS(object);
  return std::any_of(items, items + PySequence_Fast_GET_SIZE(object),
                     [devices](PyObject* item) { return is_on(item, devices); });
}

inline unsigned kinds_other_than(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return kFloatKind | kBFloat16Kind;
    case ScalarType::BFloat16: return kFloatKind | kHalfKind;
    default: return kLowKinds;
  }
}

// ---------------------------------------------------------------------------------------------
// Weight cache

// A cast depends on the grad mode it was made in: without grad it has no graph, in inference mode it
// can't be saved for backward.
enum Mode : uint8_t { kNoGrad, kGrad, kInference };

inline Mode current_mode() {
  if (c10::GradMode::is_enabled()) return kGrad;
  return c10::InferenceMode::is_enabled() ? kInference : kNoGrad;
}

struct CacheKey {
  const c10::TensorImpl* impl;
  ScalarType type;
  Mode mode;
  bool operator==(const CacheKey& other) const {
    return impl == other.impl && type == other.type && mode == other.mode;
  }
};

struct CacheKeyHash {
  size_t operator()(const CacheKey& key) const {
    return (reinterpret_cast<size_t>(key.impl) >> 4) * 31 + static_cast<size_t>(key.type) * 4 + key.mode;
  }
};

struct CacheEntry {
  // Held weakly: the addresses can't be used again while the entry lives, and nothing is kept alive.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> source;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint64_t forward;   // the outermost forward it was made in
  uint32_t version;
  bool bounded;       // dies with that forward
  PyObject* cast;     // owned
};

using WeightCache = std::unordered_map<CacheKey, CacheEntry, CacheKeyHash>;

WeightCache& weight_cache() {
  static auto* cache = new WeightCache;  // outlives every thread and the interpreter's teardown
  return *cache;
}

struct Counters {
  int64_t casts = 0;
  int64_t cache_hits = 0;
} counters;

// Releasing a cast runs arbitrary code (it may free a graph), so entries leave the map first.
template <typename Predicate>
void drop_entries(const Predicate& drop) {
  auto& cache = weight_cache();
  std::vector<PyObject*> casts;
  casts.reserve(cache.size());
  for (auto entry = cache.begin(); entry != cache.end();) {
    if (drop(entry->first, entry->second)) {
      casts.push_back(entry->second.cast);
      entry = cache.erase(entry);
    } else {
      ++entry;
    }
  }
  for (PyObject* cast : casts) Py_DECREF(cast);
}

// Forgets every cast of the storage behind `tensor`, which is about to be exposed to untracked writes.
void drop_casts_of(const at::Tensor& tensor) {
  if (weight_cache().empty() || !tensor.defined() || !tensor.has_storage()) return;
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  drop_entries([storage](const CacheKey&, const CacheEntry& entry) {
    return entry.storage._unsafe_get_target() == storage;
  });
}

// Whether somebody else may write the tensor's memory without moving its version counter. Memory that torch did not
// allocate itself, as numpy's or another process's, cannot be resized.
inline bool shares_storage(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  return storage.use_count() > 1 || storage.nbytes() > tensor.nbytes() || !storage.resizable();
}

bool is_plain(const c10::TensorImpl* impl) {
  constexpr c10::DispatchKeySet special({
      c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
      c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched,
      c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
      c10::DispatchKey::NestedTensor});
  return !impl->key_set().has_any(special);
}

// Whether anything watches or transforms operators in this thread: a dispatch mode, functorch, jit.trace.
bool is_transformed() {
  constexpr c10::DispatchKeySet transforms({
      c10::DispatchKey::Tracer, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
      c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::Functionalize, c10::DispatchKey::Python,
      c10::DispatchKey::PythonTLSSnapshot});
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms);
}

bool is_cacheable(const at::Tensor& tensor) {
  return tensor.is_leaf() && tensor.scalar_type() == ScalarType::Float && !tensor.is_inference() &&
         tensor.has_storage();
}

at::Tensor copy_as(const at::Tensor& tensor, ScalarType type) {
  const auto copy = [&] { return at::_to_copy(tensor, type, {}, {}, {}, false, {}); };
  const bool tracked = c10::GradMode::is_enabled() && tensor.requires_grad();
  if (tracked || tensor._fw_grad(/*level=*/0).defined()) return copy();
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  return copy();
}

constexpr int64_t kSmallCast = 32768;  // elements; below this a CPU cast is quicker than letting the GIL go

// A cast that no mode or transform watches: straight to the operator that copies.
at::Tensor to_type(const at::Tensor& tensor, ScalarType type) {
  ++counters.casts;
  if (tensor.is_cpu() && tensor.numel() < kSmallCast) return copy_as(tensor, type);
  pybind11::gil_scoped_release no_gil;
  return copy_as(tensor, type);
}

// The cast of a tensor that requires grad; of a leaf, made at most once per iteration. New reference.
//
// An entry serves only the tensor object, version and storage it was made from. Writes that move no
// version counter need another holder of the storage, so an entry whose storage is shared, when it was
// made or now, serves only the outermost forward that made it; so does one made without grad, where
// whole evaluations pass between two clears.
PyObject* cached_cast(const at::Tensor& tensor, ScalarType type) {
  const CacheKey key{tensor.unsafeGetTensorImpl(), type, current_mode()};
  const uint64_t forward = thread_state.forward;
  auto& cache = weight_cache();
  const auto found = cache.find(key);
  if (found != cache.end()) {
    const CacheEntry& entry = found->second;
    const auto& storage = tensor.storage();
    const bool lasting = !entry.bounded && !thread_state.region && storage.use_count() == 1;
    if (entry.version == static_cast<uint32_t>(tensor._version()) &&
        entry.storage._unsafe_get_target() == storage.unsafeGetStorageImpl() &&
        (lasting || (forward != 0 && entry.forward == forward))) {
      ++counters.cache_hits;
      return Py_NewRef(entry.cast);
    }
    PyObject* stale = entry.cast;
    cache.erase(found);
    Py_DECREF(stale);
  }

  const bool cacheable = is_cacheable(tensor);
  const bool bounded = key.mode != kGrad || thread_state.region || (cacheable && shares_storage(tensor));
  if (!cacheable || (bounded && forward == 0)) return THPVariable_Wrap(to_type(tensor, type));
  // Filled in before the cast, during which other threads may write.
  CacheEntry entry{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr()),
                   tensor.storage().getWeakStorageImpl(), forward, static_cast<uint32_t>(tensor._version()), bounded,
                   nullptr};
  PyObject* cast = entry.cast = THPVariable_Wrap(to_type(tensor, type));
  if (cast != nullptr && cache.emplace(key, std::move(entry)).second) {
    Py_INCREF(cast);
    thread_state.has_bounded_entries |= bounded;
  }
  return cast;
}

// ---------------------------------------------------------------------------------------------
// Casting arguments

struct Names {  // interned attribute and argument names
  PyObject *out, *to, *torch_function, *dtype;
  PyObject* only_dtype;  // ("dtype",)
} names;

// Whether a tensor subclass overrides torch functions itself, so that only its own `.to` keeps its type.
bool overrides_torch_function(PyObject* tensor) {
  static PyObject* disabled = PyObject_GetAttrString(PyImport_AddModule("torch._C"), "_disabled_torch_function_impl");
  PyObject* implementation = PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(tensor)), names.torch_function);
  if (implementation == nullptr) {
    PyErr_Clear();
    return false;
  }
  Py_DECREF(implementation);
  return implementation != disabled;
}

PyObject* cast_tensor(PyObject* object, ScalarType type) {
  if (!THPVariable_CheckExact(object) && overrides_torch_function(object)) {
    return PyObject_CallMethodOneArg(object, names.to, reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!is_plain(tensor.unsafeGetTensorImpl()) || is_transformed()) {
    ++counters.casts;
    return THPVariable_Wrap(tensor.to(type));
  }
  if (tensor.requires_grad() && !thread_state.uncached) return cached_cast(tensor, type);
  return THPVariable_Wrap(to_type(tensor, type));
}

// The argument with every tensor of `from` kinds cast to `type`; itself when there is none. New reference.
PyObject* cast_argument(PyObject* object, unsigned from, ScalarType type) {
  if (is_tensor(object)) return tensor_kind(object) & from ? cast_tensor(object, type) : Py_NewRef(object);
  if (!is_sequence(object) || !(argument_kinds(object) & from)) return Py_NewRef(object);
  // A tuple is filled even where the argument is a list: nobody sees it half-made, and a list that
  // another thread shortens meanwhile can't be overrun.
  PyObject* items = PySequence_Tuple(object);
  if (items == nullptr) return nullptr;
  const Py_ssize_t size = PyTuple_GET_SIZE(items);
  PyObject* result = PyTuple_CheckExact(object) ? PyTuple_New(size) : PyList_New(size);
  for (Py_ssize_t i = 0; result != nullptr && i < size; ++i) {
    PyObject* item = cast_argument(PyTuple_GET_ITEM(items, i), from, type);
    if (item == nullptr) {
      Py_CLEAR(result);
    } else if (PyTuple_CheckExact(object)) {
      PyTuple_SET_ITEM(result, i, item);
    } else {
      PyList_SET_ITEM(result, i, item);
    }
  }
  Py_DECREF(items);
  return result;
}

// ---------------------------------------------------------------------------------------------
// CastFunction

enum Policy : uint8_t {
  kLowPrecision,     // to the cast type
  kFp32,             // half types to float
  kFp32ByDtype,      // as kFp32, by the function's own `dtype` argument where that does it
  kPromote,          // to float where the arguments differ, or hold a number that half types cannot
  kPromoteByKernel,  // as kPromote, but kernels read mixed types as they are
  kPromoteRest,      // where the arguments differ, all but the first to float: kernels read that one as it is
  kMatchSelf,        // in-place methods: the other arguments to the type of the first
  kFp32InPlace,      // refuse a half first argument, else as kFp32
  kBanned,           // refuse any half argument
  kFillInPlace,      // as kMatchSelf, and saturate a number that does not fit the first argument
  kUntrackedWrite,   // exposes the memory of the first argument: forget its casts
};

constexpr std::array<const char*, 11> kPolicyNames = {
    "low_precision", "fp32",          "fp32_by_dtype", "promote",       "promote_by_kernel", "promote_rest",
    "match_self",    "fp32_in_place", "banned",        "fill_in_place", "untracked_write"};

struct CastFunction {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* original;
  PyCFunctionWithKeywords implementation;  // of an original that takes a tuple and a dict, as torch's builtins do
  PyObject* receiver;                      // borrowed: what a builtin function's `implementation` is bound to
  PyObject* dict;
  PyObject* weakrefs;
  PyObject* location;  // "module:qualified.name", what it pickles as; or None
  PyObject* message;   // what a refusal says; or None
  int8_t cast_type;    // a fixed target for kLowPrecision; kUnset: the current cast type
  uint8_t policy;
};

PyTypeObject* function_type = nullptr;  // for originals that do not bind (builtins)
PyTypeObject* method_type = nullptr;    // for originals that have __get__

PyObject* mode_hook = nullptr;      // called while a dispatch mode is on; names the scopes entered in traced code
PyObject* observer = nullptr;       // called with (function, arguments, result, casts, cache hits) after a call
PyObject* saturate_hook = nullptr;  // called with (function name, number, dtype) when a number is saturated

struct Arguments {
  PyObject* const* values;
  Py_ssize_t positional;
  Py_ssize_t count;
  PyObject* keywords;  // tuple of names or null
  Py_ssize_t out;      // index of `out=`, or -1
  bool has_dtype;      // `dtype=` is given

  Arguments(PyObject* const* args, size_t nargsf, PyObject* kwnames)
      : values(args), positional(PyVectorcall_NARGS(nargsf)),
        count(positional + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0)), keywords(kwnames), out(-1), has_dtype(false) {
    for (Py_ssize_t i = positional; i < count; ++i) {
      PyObject* name = PyTuple_GET_ITEM(kwnames, i - positional);
      if (name == names.out || PyUnicode_Compare(name, names.out) == 0) out = i;
      if (name == names.dtype || PyUnicode_Compare(name, names.dtype) == 0) has_dtype = args[i] != Py_None;
    }
  }

  unsigned kinds() const {
    unsigned kinds = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (i != out) kinds |= argument_kinds(values[i]);
    }
    return kinds;
  }

  bool any_on(uint32_t devices) const {
    return std::any_of(values, values + count, [devices](PyObject* value) { return is_on(value, devices); });
  }

  bool any_zero_dim() const {
    return std::any_of(values, values + count,
                       [](PyObject* value) { return is_tensor(value) && THPVariable_Unpack(value).dim() == 0; });
  }
};

ScalarType kind_type(unsigned kind) {
  return kind & kHalfKind ? ScalarType::Half : kind & kBFloat16Kind ? ScalarType::BFloat16 : ScalarType::Float;
}

double largest(unsigned kinds) {
  return kinds & kHalfKind ? std::numeric_limits<at::Half>::max() : std::numeric_limits<at::BFloat16>::max();
}

// A finite Python number beyond what the half types among `kinds` can hold.
bool exceeds(PyObject* object, unsigned kinds) {
  if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object)) return false;
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    return true;
  }
  return std::isfinite(value) && std::abs(value) > largest(kinds);
}

bool any_exceeds(const Arguments& arguments, unsigned kinds) {
  return std::any_of(arguments.values, arguments.values + arguments.count,
                     [kinds](PyObject* value) { return exceeds(value, kinds); });
}

PyObject* refuse(const CastFunction* self) {
  PyErr_SetObject(PyExc_NotImplementedError, self->message);
  return nullptr;
}

// A builtin is called straight: what that saves is what the CastFunction in front of it costs.
PyObject* call_implementation(const CastFunction* self, PyObject* const* args, Py_ssize_t nargs) {
  const bool is_method = Py_TYPE(self) == method_type;
  PyObject* positional = PyTuple_New(nargs - is_method);
  if (positional == nullptr) return nullptr;
  for (Py_ssize_t i = is_method; i < nargs; ++i) PyTuple_SET_ITEM(positional, i - is_method, Py_NewRef(args[i]));
  PyObject* result = self->implementation(is_method ? args[0] : self->receiver, positional, nullptr);
  Py_DECREF(positional);
  return result;
}

inline PyObject* call_original(const CastFunction* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  if (self->implementation && kwnames == nullptr) {
    const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    const bool is_method = Py_TYPE(self) == method_type;
    if (!is_method || (nargs > 0 && PyObject_TypeCheck(args[0], PyDescr_TYPE(self->original)))) {
      return call_implementation(self, args, nargs);
    }
  }
  return PyObject_Vectorcall(self->original, args, nargsf, kwnames);
}

// Calls the original with `replace(i, value)` (a new reference, null on error) in place of each argument.
template <typename Replace>
PyObject* call_with(const CastFunction* self, const Arguments& arguments, const Replace& replace) {
  constexpr Py_ssize_t kOnStack = 16;
  PyObject* stack[kOnStack];
  std::vector<PyObject*> heap;
  PyObject** values = stack;
  if (arguments.count + 1 > kOnStack) {
    heap.resize(arguments.count + 1);
    values = heap.data();
  }
  ++values;  // the slot before the arguments belongs to the callee
  Py_ssize_t done = 0;
  for (; done < arguments.count; ++done) {
    values[done] = replace(done, arguments.values[done]);
    if (values[done] == nullptr) break;
  }
  PyObject* result = nullptr;
  if (done == arguments.count) {
    result = call_original(self, values, arguments.positional | PY_VECTORCALL_ARGUMENTS_OFFSET, arguments.keywords);
  }
  for (Py_ssize_t i = 0; i < done; ++i) Py_DECREF(values[i]);
  return result;
}

PyObject* call_saturated(const CastFunction* self, const Arguments& arguments, unsigned kinds) {
  const double limit = largest(kinds);
  return call_with(self, arguments, [&](Py_ssize_t, PyObject* value) -> PyObject* {
    if (!exceeds(value, kinds)) return Py_NewRef(value);
    PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(kind_type(kinds)));
    PyObject* told = PyObject_CallFunctionObjArgs(saturate_hook, self->original, value, dtype, nullptr);
    if (told == nullptr) return nullptr;
    Py_DECREF(told);
    const double number = PyFloat_AsDouble(value);
    return PyFloat_FromDouble(std::copysign(limit, number));
  });
}

// softmax(x, dim) as softmax(x, dim, dtype=torch.float32), which converts as it reads.
PyObject* call_with_float_dtype(const CastFunction* self, PyObject* const* args, Py_ssize_t nargs) {
  PyObject* values[] = {nullptr, args[0], nullptr, nullptr};
  if (nargs == 2) values[2] = args[1];
  values[nargs + 1] = reinterpret_cast<PyObject*>(torch::getTHPDtype(ScalarType::Float));
  return PyObject_Vectorcall(self->original, values + 1, nargs | PY_VECTORCALL_ARGUMENTS_OFFSET, names.only_dtype);
}

// The policy's decision and the call. `cast_type` is the current one, not kOff.
PyObject* call_cast(const CastFunction* self, PyObject* const* args, size_t nargsf, PyObject* kwnames,
                    int8_t cast_type) {
  const Arguments arguments(args, nargsf, kwnames);
  const unsigned kinds = arguments.kinds();
  if (!(kinds & kCastKinds) || (kinds & kDoubleKind)) return call_original(self, args, nargsf, kwnames);

  ScalarType target = ScalarType::Float;
  Py_ssize_t first = 0;  // arguments before it keep their type
  switch (self->policy) {
    case kLowPrecision:
      // Sparse kernels have no half types; a result that has a place already decides the type.
      if (!(kinds & kSparseKind)) {
        const bool other = thread_state.other_devices && arguments.any_on(thread_state.other_devices);
        if (C10_UNLIKELY(other)) cast_type = other_type(cast_type);
        target = kScalarTypes[self->cast_type == kUnset ? cast_type : self->cast_type];
      }
      if (arguments.out >= 0) {
        const unsigned out = argument_kinds(args[arguments.out]);
        if (!(out & kCastKinds)) return call_original(self, args, nargsf, kwnames);
        target = kind_type(out);
      }
      break;
    case kFp32ByDtype:
      if (kinds & kLowKinds && arguments.count == arguments.positional && arguments.count <= 2) {
        return call_with_float_dtype(self, args, arguments.count);
      }
      [[fallthrough]];
    case kFp32:
      if (arguments.has_dtype) return call_original(self, args, nargsf, kwnames);  // the caller decides
      break;
    case kPromote:
    case kPromoteByKernel: {
      const unsigned present = kinds & kCastKinds;
      bool differ = present & (present - 1);
      // torch leaves zero-dimensional tensors out of its own promotion.
      if (differ && self->policy == kPromoteByKernel) differ = arguments.any_zero_dim();
      const bool fits = !(present & kLowKinds) || !any_exceeds(arguments, present);
      if (!differ && fits) return call_original(self, args, nargsf, kwnames);
      break;
    }
    case kPromoteRest: {
      const unsigned present = kinds & kCastKinds;
      if (!(present & (present - 1))) return call_original(self, args, nargsf, kwnames);
      first = 1;
      break;
    }
    case kFillInPlace: {
      const unsigned own = arguments.positional ? argument_kinds(args[0]) & kLowKinds : 0;
      if (own && any_exceeds(arguments, own)) return call_saturated(self, arguments, own);
      [[fallthrough]];
    }
    case kMatchSelf: {
      const unsigned own = arguments.positional ? argument_kinds(args[0]) & kCastKinds : 0;
      if (!own) return call_original(self, args, nargsf, kwnames);
      target = kind_type(own);
      first = 1;
      break;
    }
    case kFp32InPlace:
      if (arguments.positional && argument_kinds(args[0]) & kLowKinds) return refuse(self);
      break;
    case kBanned:
      if (kinds & kLowKinds) return refuse(self);
      break;
  }
  const unsigned from = kinds_other_than(target);
  if (!(kinds & from)) return call_original(self, args, nargsf, kwnames);
  return call_with(self, arguments, [&](Py_ssize_t i, PyObject* value) {
    return i < first || i == arguments.out ? Py_NewRef(value) : cast_argument(value, from, target);
  });
}

inline PyObject* dispatch(const CastFunction* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  const int8_t cast_type = current_cast_type();
  if (cast_type == kOff) return call_original(self, args, nargsf, kwnames);
  try {  // without the buffer for warnings that HANDLE_TH_ERRORS sets up: the original brings its own
    return call_cast(self, args, nargsf, kwnames, cast_type);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Applies scopes that the mode hook names, outermost first: (cast type, device type or None for all) each.
bool apply_scopes(PyObject* scopes) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(scopes); ++i) {
    PyObject *cast_type_object, *device_object;
    int8_t cast_type;
    uint32_t device = kAllDevices;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(scopes, i), "OO", &cast_type_object, &device_object) ||
        !parse_cast_type(cast_type_object, &cast_type) ||
        (device_object != Py_None && !parse_device_type(device_object, &device))) {
      return false;
    }
    Scoped next;
    next.scope = cast_type;
    static_cast<Scoped&>(thread_state) = device_object == Py_None ? next : scoped_on(device, cast_type);
  }
  return true;
}

PyObject* dispatch_in_mode(const CastFunction* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  PyObject* scopes = PyObject_CallNoArgs(mode_hook);
  if (scopes == nullptr) return nullptr;
  Scoped& current = thread_state;
  const Scoped outer = current;
  PyObject* result = apply_scopes(scopes) ? dispatch(self, args, nargsf, kwnames) : nullptr;
  current = outer;
  Py_DECREF(scopes);
  return result;
}

PyObject* dispatch_checked(const CastFunction* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  const bool in_mode = mode_hook != nullptr && c10::impl::TorchDispatchModeTLS::any_modes_set();
  return in_mode ? dispatch_in_mode(self, args, nargsf, kwnames) : dispatch(self, args, nargsf, kwnames);
}

// The call, and its report to the observer, which does not see the CastFunctions called inside.
PyObject* call_observed(const CastFunction* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  struct Unobserved {
    PyObject* told = std::exchange(observer, nullptr);
    ~Unobserved() { observer = told; }
  } inside;
  const Counters before = counters;
  PyObject* result = dispatch_checked(self, args, nargsf, kwnames);
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf) + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0);
  PyObject* arguments = result ? PyTuple_New(count) : nullptr;
  if (arguments) {
    for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(arguments, i, Py_NewRef(args[i]));
    PyObject* answer = PyObject_CallFunction(inside.told, "OOOLL", self, arguments, result,
                                             static_cast<long long>(counters.casts - before.casts),
                                             static_cast<long long>(counters.cache_hits - before.cache_hits));
    if (answer == nullptr) Py_CLEAR(result);
    Py_XDECREF(answer);
    Py_DECREF(arguments);
  }
  return result;
}

PyObject* CastFunction_vectorcall(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  const auto* self = reinterpret_cast<CastFunction*>(object);
  if (C10_UNLIKELY(observer != nullptr)) return call_observed(self, args, nargsf, kwnames);
  if (C10_UNLIKELY(mode_hook != nullptr)) return dispatch_checked(self, args, nargsf, kwnames);
  return dispatch(self, args, nargsf, kwnames);
}

PyObject* untracked_write_vectorcall(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  const auto* self = reinterpret_cast<CastFunction*>(object);
  if (PyVectorcall_NARGS(nargsf) && is_tensor(args[0])) drop_casts_of(THPVariable_Unpack(args[0]));
  return call_original(self, args, nargsf, kwnames);
}

int CastFunction_traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<CastFunction*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->original);
  Py_VISIT(self->dict);
  return 0;
}

int CastFunction_clear(PyObject* object) {
  auto* self = reinterpret_cast<CastFunction*>(object);
  Py_CLEAR(self->original);
  Py_CLEAR(self->dict);
  return 0;
}

void CastFunction_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<CastFunction*>(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (self->weakrefs) PyObject_ClearWeakRefs(object);
  CastFunction_clear(object);
  Py_CLEAR(self->location);
  Py_CLEAR(self->message);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* CastFunction_bind(PyObject* object, PyObject* instance, PyObject*) {
  return instance == nullptr || instance == Py_None ? Py_NewRef(object) : PyMethod_New(object, instance);
}

PyObject* CastFunction_repr(PyObject* object) {
  auto* self = reinterpret_cast<CastFunction*>(object);
  return PyUnicode_FromFormat("<apex_amp %s cast of %R>", kPolicyNames[self->policy], self->original);
}

// Equal to the original, so that tables keyed by torch functions go on finding them.
PyObject* CastFunction_compare(PyObject* left, PyObject* right, int operation) {
  if (operation != Py_EQ && operation != Py_NE) Py_RETURN_NOTIMPLEMENTED;
  const auto unwrap = [](PyObject* object) {
    const bool is_cast = Py_TYPE(object) == function_type || Py_TYPE(object) == method_type;
    return is_cast ? reinterpret_cast<CastFunction*>(object)->original : object;
  };
  return PyObject_RichCompare(unwrap(left), unwrap(right), operation);
}

Py_hash_t CastFunction_hash(PyObject* object) {
  return PyObject_Hash(reinterpret_cast<CastFunction*>(object)->original);
}

// Pickles as the place it sits in, through the standard library alone: the pickle loads without apex_amp.
PyObject* CastFunction_reduce(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<CastFunction*>(object);
  if (self->location == Py_None) {
    return PyErr_Format(PyExc_TypeError, "can't pickle %R: no module holds it by name", object);
  }
  PyObject* pkgutil = PyImport_ImportModule("pkgutil");
  if (pkgutil == nullptr) return nullptr;
  PyObject* resolve_name = PyObject_GetAttrString(pkgutil, "resolve_name");
  Py_DECREF(pkgutil);
  if (resolve_name == nullptr) return nullptr;
  return Py_BuildValue("(N(O))", resolve_name, self->location);
}

PyObject* CastFunction_copy(PyObject* object, PyObject*) { return Py_NewRef(object); }

bool copy_metadata(PyObject* original, PyObject* dict) {
  PyObject* attributes = PyObject_GetAttrString(original, "__dict__");
  if (attributes == nullptr) {
    PyErr_Clear();
  } else {
    const int failed = PyDict_Update(dict, attributes);
    Py_DECREF(attributes);
    if (failed) return false;
  }
  for (const char* name : {"__module__", "__name__", "__qualname__", "__doc__", "__annotations__"}) {
    PyObject* value = PyObject_GetAttrString(original, name);
    if (value == nullptr) {
      PyErr_Clear();
      continue;
    }
    const int failed = PyDict_SetItemString(dict, name, value);
    Py_DECREF(value);
    if (failed) return false;
  }
  return PyDict_SetItemString(dict, "__wrapped__", original) == 0;
}

void find_implementation(CastFunction* self) {
  const PyMethodDef* method = nullptr;
  if (PyCFunction_CheckExact(self->original)) {
    method = reinterpret_cast<PyCFunctionObject*>(self->original)->m_ml;
    self->receiver = PyCFunction_GET_SELF(self->original);
  } else if (Py_IS_TYPE(self->original, &PyMethodDescr_Type)) {
    method = reinterpret_cast<PyMethodDescrObject*>(self->original)->d_method;
  }
  if (method == nullptr || (method->ml_flags & ~METH_STATIC) != (METH_VARARGS | METH_KEYWORDS)) return;
  self->implementation = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void*>(method->ml_meth));
}

int parse_policy(const char* name) {
  for (size_t i = 0; i < kPolicyNames.size(); ++i) {
    if (std::strcmp(name, kPolicyNames[i]) == 0) return static_cast<int>(i);
  }
  PyErr_Format(PyExc_ValueError, "unknown cast policy %s", name);
  return -1;
}

PyObject* make_cast_function(PyObject*, PyObject* args, PyObject* kwargs) {
  const char* keywords[] = {"original", "policy", "location", "cast_type", "message", nullptr};
  PyObject *original, *location = Py_None, *cast_type = Py_None, *message = Py_None;
  const char* policy_name;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Os|OOO", const_cast<char**>(keywords), &original, &policy_name,
                                   &location, &cast_type, &message)) {
    return nullptr;
  }
  const int policy = parse_policy(policy_name);
  int8_t fixed = kUnset;
  if (policy < 0 || (cast_type != Py_None && !parse_cast_type(cast_type, &fixed))) return nullptr;

  const bool binds = Py_TYPE(original)->tp_descr_get != nullptr && !PyMethod_Check(original);
  PyTypeObject* type = binds ? method_type : function_type;
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) return nullptr;
  auto* self = reinterpret_cast<CastFunction*>(object);
  self->vectorcall = policy == kUntrackedWrite ? untracked_write_vectorcall : CastFunction_vectorcall;
  self->original = Py_NewRef(original);
  find_implementation(self);
  self->location = Py_NewRef(location);
  self->message = Py_NewRef(message);
  self->cast_type = fixed;
  self->policy = static_cast<uint8_t>(policy);
  self->dict = PyDict_New();
  if (self->dict == nullptr || !copy_metadata(original, self->dict)) Py_CLEAR(object);
  return object;
}

PyObject* CastFunction_policy(PyObject* object, void*) {
  return PyUnicode_FromString(kPolicyNames[reinterpret_cast<CastFunction*>(object)->policy]);
}

PyObject* CastFunction_cast_type(PyObject* object, void*) {
  return dtype_object(reinterpret_cast<CastFunction*>(object)->cast_type);
}

PyMemberDef function_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CastFunction, vectorcall), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(CastFunction, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CastFunction, weakrefs), READONLY, nullptr},
    {"message", T_OBJECT, offsetof(CastFunction, message), READONLY, nullptr},
    {"location", T_OBJECT, offsetof(CastFunction, location), READONLY, nullptr},
    {nullptr}};
PyMethodDef function_methods[] = {{"__reduce__", CastFunction_reduce, METH_NOARGS, nullptr},
                                  {"__copy__", CastFunction_copy, METH_NOARGS, nullptr},
                                  {"__deepcopy__", CastFunction_copy, METH_O, nullptr},
                                  {nullptr}};
PyGetSetDef function_getset[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                                 {"policy", CastFunction_policy, nullptr, nullptr, nullptr},
                                 {"cast_type", CastFunction_cast_type, nullptr, nullptr, nullptr},
                                 {nullptr}};

PyType_Slot function_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(CastFunction_dealloc)},
                                {Py_tp_traverse, reinterpret_cast<void*>(CastFunction_traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(CastFunction_clear)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_repr, reinterpret_cast<void*>(CastFunction_repr)},
                                {Py_tp_richcompare, reinterpret_cast<void*>(CastFunction_compare)},
                                {Py_tp_hash, reinterpret_cast<void*>(CastFunction_hash)},
                                {Py_tp_members, function_members},
                                {Py_tp_methods, function_methods},
                                {Py_tp_getset, function_getset},
                                {0, nullptr},   // Py_tp_descr_get in the binding type
                                {0, nullptr}};

PyTypeObject* make_function_type(const char* name, bool binds) {
  if (binds) function_slots[10] = {Py_tp_descr_get, reinterpret_cast<void*>(CastFunction_bind)};
  unsigned flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                   Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  if (binds) flags |= Py_TPFLAGS_METHOD_DESCRIPTOR;
  PyType_Spec spec{name, sizeof(CastFunction), 0, flags, function_slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// ---------------------------------------------------------------------------------------------
// CastScope

struct CastScope {
  PyObject_HEAD
  Scoped inner;
  Scoped outer;
  CastScope* around;  // the one entered before it
  bool forward;
  bool entered;
  uint8_t traced;   // 1 + the c10::DeviceType, for a torch.autocast region of code being traced; else 0
  uint32_t pauses;  // a bit per c10::DeviceType whose torch.autocast pauses inside
  uint32_t paused;  // those that were on
};

PyTypeObject* scope_type = nullptr;

void enter_forward() {
  auto& state = thread_state;
  if (state.forward_depth++ == 0) state.forward = ++last_forward;
}

void leave_forward() {
  auto& state = thread_state;
  if (--state.forward_depth != 0) return;
  const uint64_t forward = std::exchange(state.forward, 0);
  if (!std::exchange(state.has_bounded_entries, false)) return;
  drop_entries([forward](const CacheKey&, const CacheEntry& entry) {
    return entry.bounded && entry.forward == forward;
  });
}

// The innermost region decides, so a torch.autocast around a scope pauses inside it.
constexpr std::array<at::DeviceType, 4> kAutocastDevices = {at::kCUDA, at::kCPU, at::kXPU, at::kMPS};

inline uint32_t device_bit(at::DeviceType type) { return 1u << static_cast<unsigned>(type); }

uint32_t pause_autocast(uint32_t devices) {
  // torch excludes the dispatch key of every device type that has no region.
  if (c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset)) return kNoDevices;
  uint32_t paused = kNoDevices;
  for (const at::DeviceType type : kAutocastDevices) {
    if (!(devices & device_bit(type)) || !at::autocast::is_autocast_enabled(type)) continue;
    at::autocast::set_autocast_enabled(type, false);
    paused |= device_bit(type);
  }
  return paused;
}

void resume_autocast(uint32_t paused) {
  for (const at::DeviceType type : kAutocastDevices) {
    if (paused & device_bit(type)) at::autocast::set_autocast_enabled(type, true);
  }
}

PyObject* CastScope_enter(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<CastScope*>(object);
  if (self->entered) {
    PyErr_SetString(PyExc_RuntimeError, "this cast scope is entered already; make a new one for each with statement");
    return nullptr;
  }
  self->entered = true;
  if (self->forward) enter_forward();
  Scoped& current = thread_state;
  self->outer = current;
  self->around = std::exchange(thread_state.innermost, self);
  Py_INCREF(self);
  if (self->traced) {
    if (thread_state.all_traced_autocasts++ == 0) thread_state.entry = current;
    ++thread_state.traced_autocasts[self->traced - 1];
  }
  const bool stays_off = self->forward && !self->inner.region && current.held;
  if (!stays_off) current = self->inner;
  self->paused = pause_autocast(self->pauses);
  Py_RETURN_NONE;
}

// Takes a scope off the thread's list. Interleaved generators leave theirs out of order: then those inside
// stay in force, and what this one would put back is put back by the next inside. False: not of this thread.
bool unlink(CastScope* self) {
  auto& state = thread_state;
  if (state.innermost == self) {
    state.innermost = self->around;
    static_cast<Scoped&>(state) = self->outer;
    return true;
  }
  CastScope* inside = state.innermost;
  while (inside != nullptr && inside->around != self) inside = inside->around;
  if (inside == nullptr) return false;
  inside->around = self->around;
  inside->outer = self->outer;
  return true;
}

PyObject* CastScope_exit(PyObject* object, PyObject* const*, Py_ssize_t) {
  auto* self = reinterpret_cast<CastScope*>(object);
  if (!self->entered || !unlink(self)) {
    PyErr_SetString(PyExc_RuntimeError, "this cast scope was not entered in the thread that leaves it");
    return nullptr;
  }
  self->entered = false;
  if (self->paused) resume_autocast(self->paused);
  if (self->traced) {
    --thread_state.all_traced_autocasts;
    --thread_state.traced_autocasts[self->traced - 1];
  }
  if (self->forward) leave_forward();
  Py_DECREF(self);
  Py_RETURN_NONE;
}

// A scope is a decorator too: the function runs in a scope of its own at each call.
PyObject* CastScope_call(PyObject* object, PyObject* args, PyObject* kwargs) {
  const char* keywords[] = {"function", nullptr};
  PyObject* function;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", const_cast<char**>(keywords), &function)) return nullptr;
  const auto* self = reinterpret_cast<CastScope*>(object);
  PyObject* module = PyImport_ImportModule("apex_amp.amp.cast_state");
  if (module == nullptr) return nullptr;
  PyObject* decorated = PyObject_CallMethod(module, "run_in_scope", "ONi", function, dtype_object(self->inner.scope),
                                            static_cast<int>(self->forward));
  Py_DECREF(module);
  return decorated;
}

PyMethodDef scope_methods[] = {
    {"__enter__", CastScope_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(CastScope_exit)), METH_FASTCALL, nullptr},
    {nullptr}};
PyType_Slot scope_slots[] = {{Py_tp_methods, scope_methods},
                             {Py_tp_call, reinterpret_cast<void*>(CastScope_call)},
                             {0, nullptr}};
PyType_Spec scope_spec = {"apex_amp._C.CastScope", sizeof(CastScope), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                          scope_slots};

PyObject* make_scope(const Scoped& inner, bool forward, uint32_t pauses) {
  PyObject* object = scope_type->tp_alloc(scope_type, 0);
  if (object == nullptr) return nullptr;
  auto* self = reinterpret_cast<CastScope*>(object);
  self->inner = inner;
  self->forward = forward;
  self->pauses = pauses;
  return object;
}

PyObject* cast_scope(PyObject*, PyObject* args, PyObject* kwargs) {
  const char* keywords[] = {"cast_type", "forward", nullptr};
  PyObject* object;
  int forward = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p", const_cast<char**>(keywords), &object, &forward)) {
    return nullptr;
  }
  Scoped inner;
  if (!parse_cast_type(object, &inner.scope)) return nullptr;
  inner.held = inner.scope == kOff && !forward;
  return make_scope(inner, forward != 0, kAllDevices);
}

// A region of the native face: a scope for tensors of one device type, and a forward to the weight cache.
PyObject* region_scope(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  int8_t cast_type;
  uint32_t device;
  if (nargs != 3) {
    PyErr_Format(PyExc_TypeError, "region_scope takes cast_type, device_type and cached, got %zd arguments", nargs);
    return nullptr;
  }
  if (!parse_cast_type(args[0], &cast_type) || !parse_device_type(args[1], &device)) return nullptr;
  if (cast_type == kOff && !(current_devices() & device)) return make_scope(thread_state, true, device);
  Scoped inner = scoped_on(device, cast_type);
  inner.held = inner.scope == kOff;
  inner.uncached = !PyObject_IsTrue(args[2]);
  inner.region = true;
  return make_scope(inner, true, device);
}

// Inside a torch.autocast for a device type its casts are torch's, or none: autocast_scope(device_type, traced).
PyObject* autocast_scope(PyObject*, PyObject* args) {
  PyObject* device_type;
  int traced;
  uint32_t device;
  if (!PyArg_ParseTuple(args, "Op", &device_type, &traced) || !parse_device_type(device_type, &device)) return nullptr;
  Scoped inner = thread_state;
  if (cast_type_on(device) != kOff) {
    inner = scoped_on(device, kOff);
    inner.held = false;
  }
  PyObject* scope = make_scope(inner, false, kNoDevices);
  if (scope != nullptr && traced) reinterpret_cast<CastScope*>(scope)->traced = 1 + std::countr_zero(device);
  return scope;
}

// The calling thread's present state as an object, and the scope that brings it back, in any thread.
PyObject* scope_token(PyObject*, PyObject*) {
  Scoped now = thread_state;
  now.scope = current_cast_type();
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&now), sizeof(now));
}

PyObject* resume_scope(PyObject*, PyObject* token) {
  Scoped inner;
  if (!PyBytes_Check(token) || PyBytes_GET_SIZE(token) != sizeof(inner)) {
    PyErr_SetString(PyExc_TypeError, "resume_scope needs what scope_token returned");
    return nullptr;
  }
  std::memcpy(&inner, PyBytes_AS_STRING(token), sizeof(inner));
  return make_scope(inner, false, inner.scope == kOff && !inner.held ? kNoDevices : kAllDevices);
}

// The calling thread's cast state as attributes, which torch.compile can read and guard. In code being traced they
// say what held at its entry.
const Scoped& entry_state() { return thread_state.all_traced_autocasts ? thread_state.entry : thread_state; }

PyObject* CastState_cast_type(PyObject*, void*) { return dtype_object(cast_type_of(entry_state())); }

PyObject* CastState_held(PyObject*, void*) { return PyBool_FromLong(entry_state().held); }

// The device types that are cast, as a tuple of their names; None: all.
PyObject* CastState_devices(PyObject*, void*) {
  const uint32_t devices = devices_of(entry_state());
  if (devices == kAllDevices) Py_RETURN_NONE;
  PyObject* names = PyList_New(0);
  for (unsigned i = 0; names != nullptr && i < 32; ++i) {
    if (!(devices >> i & 1u)) continue;
    PyObject* name = PyUnicode_FromString(c10::DeviceTypeName(static_cast<at::DeviceType>(i), true).c_str());
    if (name == nullptr || PyList_Append(names, name) < 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  PyObject* result = names ? PyList_AsTuple(names) : nullptr;
  Py_XDECREF(names);
  return result;
}

PyGetSetDef state_getset[] = {{"cast_type", CastState_cast_type, nullptr, nullptr, nullptr},
                              {"held", CastState_held, nullptr, nullptr, nullptr},
                              {"devices", CastState_devices, nullptr, nullptr, nullptr},
                              {nullptr}};
PyType_Slot state_slots[] = {{Py_tp_getset, state_getset}, {0, nullptr}};
PyType_Spec state_spec = {"apex_amp._C.CastState", sizeof(PyObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, state_slots};

// ---------------------------------------------------------------------------------------------
// Controls

PyObject* get_cast_type(PyObject*, PyObject*) { return dtype_object(current_cast_type()); }

PyObject* get_default_cast_type(PyObject*, PyObject*) { return dtype_object(default_cast_type.load()); }

PyObject* set_default_cast_type(PyObject*, PyObject* object) {
  int8_t cast_type;
  if (!parse_cast_type(object, &cast_type)) return nullptr;
  default_cast_type.store(cast_type, std::memory_order_relaxed);
  Py_RETURN_NONE;
}

PyObject* cast_type_of_device(PyObject*, PyObject* device_type) {
  uint32_t device;
  return parse_device_type(device_type, &device) ? dtype_object(cast_type_on(device)) : nullptr;
}

// How many torch.autocast regions for `device_type`, or for those cast at its entry (None), traced code has entered.
PyObject* traced_autocasts(PyObject*, PyObject* device_type) {
  uint32_t devices = devices_of(entry_state());
  if (device_type != Py_None && !parse_device_type(device_type, &devices)) return nullptr;
  long count = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (devices >> i & 1u) count += thread_state.traced_autocasts[i];
  }
  return PyLong_FromLong(count);
}

PyObject* set_cast_devices(PyObject*, PyObject* device_types) {
  HANDLE_TH_ERRORS
  uint32_t mask = 0;
  for (pybind11::handle type : pybind11::reinterpret_borrow<pybind11::iterable>(device_types)) {
    mask |= 1u << static_cast<unsigned>(c10::Device(type.cast<std::string>()).type());
  }
  cast_devices.store(mask, std::memory_order_relaxed);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* clear_weight_cache(PyObject*, PyObject*) {
  drop_entries([](const CacheKey&, const CacheEntry&) { return true; });
  Py_RETURN_NONE;
}

PyObject* drop_cached_casts(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (is_tensor(tensor)) drop_casts_of(THPVariable_Unpack(tensor));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* cast_counters(PyObject*, PyObject*) {
  return Py_BuildValue("{s:L,s:L,s:n}", "casts", static_cast<long long>(counters.casts), "cache_hits",
                       static_cast<long long>(counters.cache_hits), "cache_entries",
                       static_cast<Py_ssize_t>(weight_cache().size()));
}

// The items of a list that are instances of a class: a scan of the whole heap, too slow in Python.
PyObject* instances_in(PyObject*, PyObject* args) {
  PyObject *items, *type;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &items, &PyType_Type, &type)) return nullptr;
  PyObject* found = PyList_New(0);
  for (Py_ssize_t i = 0; found != nullptr && i < PyList_GET_SIZE(items); ++i) {
    PyObject* item = PyList_GET_ITEM(items, i);
    if (PyType_IsSubtype(Py_TYPE(item), reinterpret_cast<PyTypeObject*>(type)) && PyList_Append(found, item) < 0) {
      Py_CLEAR(found);
    }
  }
  return found;
}

template <PyObject** hook>
PyObject* set_hook(PyObject*, PyObject* value) {
  PyObject* old = std::exchange(*hook, value == Py_None ? nullptr : Py_NewRef(value));
  Py_XDECREF(old);
  Py_RETURN_NONE;
}

PyCFunction with_keywords(PyCFunctionWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef module_functions[] = {
    {"cast_function", with_keywords(make_cast_function), METH_VARARGS | METH_KEYWORDS,
     "cast_function(original, policy, location=None, cast_type=None, message=None): a callable that casts "
     "tensor arguments by `policy` and calls `original`."},
    {"cast_scope", with_keywords(cast_scope), METH_VARARGS | METH_KEYWORDS,
     "cast_scope(cast_type, forward=False): context manager; see apex_amp.amp.cast_state."},
    {"region_scope", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(region_scope)), METH_FASTCALL,
     "region_scope(cast_type, device_type, cached): context manager; see apex_amp.amp.autocast."},
    {"autocast_scope", autocast_scope, METH_VARARGS, nullptr},
    {"cast_type_on", cast_type_of_device, METH_O, nullptr},
    {"current_cast_type", get_cast_type, METH_NOARGS, nullptr},
    {"default_cast_type", get_default_cast_type, METH_NOARGS, nullptr},
    {"set_default_cast_type", set_default_cast_type, METH_O, nullptr},
    {"scope_token", scope_token, METH_NOARGS, nullptr},
    {"resume_scope", resume_scope, METH_O, nullptr},
    {"traced_autocasts", traced_autocasts, METH_O, nullptr},
    {"set_cast_devices", set_cast_devices, METH_O, nullptr},
    {"clear_weight_cache", clear_weight_cache, METH_NOARGS, nullptr},
    {"drop_cached_casts", drop_cached_casts, METH_O, nullptr},
    {"cast_counters", cast_counters, METH_NOARGS, nullptr},
    {"instances_in", instances_in, METH_VARARGS, nullptr},
    {"set_mode_hook", set_hook<&mode_hook>, METH_O, nullptr},
    {"set_cast_observer", set_hook<&observer>, METH_O, nullptr},
    {"set_saturate_hook", set_hook<&saturate_hook>, METH_O, nullptr},
    {nullptr}};

}  // namespace

bool init_cast_function(PyObject* module) {
  names = {PyUnicode_InternFromString("out"), PyUnicode_InternFromString("to"),
           PyUnicode_InternFromString("__torch_function__"), PyUnicode_InternFromString("dtype"), nullptr};
  names.only_dtype = PyTuple_Pack(1, names.dtype);
  function_type = make_function_type("apex_amp._C.CastFunction", false);
  method_type = make_function_type("apex_amp._C.CastMethod", true);
  scope_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&scope_spec));
  PyObject* state_type = PyType_FromSpec(&state_spec);
  return function_type && method_type && scope_type && state_type && PyModule_AddType(module, function_type) == 0 &&
         PyModule_AddType(module, method_type) == 0 && PyModule_AddType(module, scope_type) == 0 &&
         PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(state_type)) == 0 &&
         PyModule_AddFunctions(module, module_functions) == 0;
}

}  // namespace apex_amp
