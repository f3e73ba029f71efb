// Tensors of a compiled graph, as AOTInductor hands them to the kernels. Its stable C interface is declared by hand: no
// PyTorch header is needed.
#pragma once

#include <cstdint>

typedef struct AtenTensorOpaque* Handle;
extern "C" {
int32_t aoti_torch_get_data_ptr(Handle, void**);
int32_t aoti_torch_get_sizes(Handle, int64_t**);
int32_t aoti_torch_get_dim(Handle, int64_t*);
int32_t aoti_torch_get_dtype(Handle, int32_t*);
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_device_type_cpu();
}

namespace paceline [[gnu::visibility("hidden")]] {

template <class T>
T* data(Handle handle) {
  void* pointer = nullptr;
  aoti_torch_get_data_ptr(handle, &pointer);
  return (T*)pointer;
}
// An optional tensor comes as a pointer to its handle, or null.
inline void* maybe(Handle* handle) { return handle ? data<void>(*handle) : nullptr; }
inline const int64_t* sizes(Handle handle) {
  int64_t* found = nullptr;
  aoti_torch_get_sizes(handle, &found);
  return found;
}
inline int32_t dtype_of(Handle handle) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(handle, &dtype);
  return dtype;
}
inline Handle empty(int64_t dim, const int64_t* shape, int32_t dtype) {
  int64_t strides[4] = {1, 1, 1, 1};
  for (int64_t i = dim - 2; i >= 0; i--) strides[i] = strides[i + 1] * shape[i + 1];
  Handle made = nullptr;
  aoti_torch_empty_strided(dim, shape, strides, dtype, aoti_torch_device_type_cpu(), 0, &made);
  return made;
}

}  // namespace paceline
