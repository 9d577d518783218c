#include "cast_function.h"

namespace apex_amp {

bool init_cast_function(PyObject*) { return true; }

}  // namespace apex_amp
