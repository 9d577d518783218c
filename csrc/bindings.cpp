// The one pybind11 unit of apex_amp._C.
#include <torch/csrc/utils/pybind.h>

#include "cast_function.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  if (!apex_amp::init_cast_function(m.ptr())) throw pybind11::error_already_set();
}
