// What the two driver files share: plain arguments from ctypes as tables, a status as text.
#pragma once
#include "multi_tensor.h"

namespace apex_amp {

// data[list * tensors + tensor].
inline TensorTable make_table(int lists, int64_t tensors, const int64_t* sizes, const int64_t* index,
                              void* const* data, const uint8_t* dtypes) {
  TensorTable table = {};
  table.tensors = tensors;
  table.sizes = sizes;
  table.index = index;
  for (int list = 0; list < lists; ++list) {
    table.data[list] = data + list * tensors;
    table.dtype[list] = DType(dtypes[list]);
  }
  return table;
}

// Null when all went well.
inline const char* text_of(const Status& status) {
  if (status.code == Status::kOk) return nullptr;
  return status.detail ? status.detail : "unsupported dtype";
}

}  // namespace apex_amp

#define TABLE_PARAMETERS \
  int64_t tensors, const int64_t *sizes, const int64_t *index, void *const *data, const uint8_t *dtypes
#define MAKE_TABLE(lists) make_table(lists, tensors, sizes, index, data, dtypes)
