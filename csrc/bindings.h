// What each unit of apex_amp._C adds to the module.
#pragma once
#include <pybind11/pybind11.h>

namespace apex_amp {

void bind_optimizers(pybind11::module_& m);
void bind_tensor_attributes(pybind11::module_& m);

}  // namespace apex_amp
