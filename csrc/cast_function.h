// The compiled cast callable, its cast state and its weight cache; see cast_function.cpp.
#pragma once
#include <Python.h>

namespace apex_amp {

// Adds the CastFunction types and their controls to the extension module.
// Returns false with a Python error set when that fails.
bool init_cast_function(PyObject* module);

}  // namespace apex_amp
