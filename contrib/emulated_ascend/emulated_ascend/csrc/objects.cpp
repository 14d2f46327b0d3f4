// Creates and destroys the containers of aclnn arguments, and what the wheel asks of operators of the older kind.
#include "objects.h"

#include <cstdio>
#include <cstring>
#include <string>

#include "runtime.h"

using namespace emulated;

namespace {
size_t scalar_bytes(int dtype) {
  switch (dtype) {
    case 0: case 3: case 8: return 4;
    case 1: case 6: case 7: case 27: return 2;
    case 2: case 4: case 12: return 1;
    case 17: return 16;
    default: return 8;
  }
}
template <class Kind>
int destroy(void* container) {
  delete static_cast<Kind*>(container);
  return 0;
}
template <class List, class Value>
void* gather(const void* const* values, uint64_t number) {
  auto* list = new List;
  for (uint64_t i = 0; i < number; i++) {
    auto* value = static_cast<Value*>(const_cast<void*>(values[i]));
    list->values.push_back(*value);
    delete value;
  }
  return list;
}
int copy_shape(const std::vector<int64_t>& shape, int64_t** dims, uint64_t* number) {
  *number = shape.size();
  *dims = new int64_t[shape.size() + 1];
  for (size_t i = 0; i < shape.size(); i++) (*dims)[i] = shape[i];
  return 0;
}
}  // namespace

API void* aclCreateTensor(const int64_t* dims, uint64_t number, int dtype, const int64_t* strides, int64_t offset, int format,
                          const int64_t* storage, uint64_t storage_number, void* data) {
  auto* tensor = new Tensor;
  tensor->dims.assign(dims, dims + number);
  if (strides) tensor->strides.assign(strides, strides + number);
  tensor->storage.assign(storage, storage + storage_number);
  tensor->offset = offset;
  tensor->dtype = dtype;
  tensor->format = format;
  tensor->data = static_cast<char*>(data);
  return tensor;
}
API void* aclCreateScalar(void* value, int dtype) {
  auto* scalar = new Scalar;
  scalar->dtype = dtype;
  memcpy(scalar->bytes, value, scalar_bytes(dtype));
  return scalar;
}
API void* aclCreateIntArray(const int64_t* values, uint64_t number) {
  auto* array = new IntArray;
  array->values.assign(values, values + number);
  return array;
}
API void* aclCreateFloatArray(const float* values, uint64_t number) {
  auto* array = new FloatArray;
  array->values.assign(values, values + number);
  return array;
}
API void* aclCreateBoolArray(const bool* values, uint64_t number) {
  auto* array = new BoolArray;
  array->values.assign(values, values + number);
  return array;
}
API void* aclCreateTensorList(const void* const* values, uint64_t number) { return gather<TensorList, Tensor>(values, number); }
API void* aclCreateScalarList(const void* const* values, uint64_t number) { return gather<ScalarList, Scalar>(values, number); }
API int aclDestroyTensor(void* container) { return destroy<Tensor>(container); }
API int aclDestroyScalar(void* container) { return destroy<Scalar>(container); }
API int aclDestroyIntArray(void* container) { return destroy<IntArray>(container); }
API int aclDestroyFloatArray(void* container) { return destroy<FloatArray>(container); }
API int aclDestroyBoolArray(void* container) { return destroy<BoolArray>(container); }
API int aclDestroyTensorList(void* container) { return destroy<TensorList>(container); }
API int aclDestroyScalarList(void* container) { return destroy<ScalarList>(container); }
API int aclGetViewShape(const void* container, int64_t** dims, uint64_t* number) {
  return copy_shape(static_cast<const Tensor*>(container)->dims, dims, number);
}
API int aclGetStorageShape(const void* container, int64_t** dims, uint64_t* number) {
  return copy_shape(static_cast<const Tensor*>(container)->storage, dims, number);
}
API int aclGetDataType(const void* container, int* dtype) {
  *dtype = static_cast<const Tensor*>(container)->dtype;
  return 0;
}

// ---- operators of the older kind (aclop): described, never run

static int refuse_older(const char* type) {
  std::string text = std::string(type) + " is asked for as an aclop operator, which emulated_ascend does not run";
  say(text);
  fail(kNoKernel, text);  // torch_npu runs nothing of its queue from here on, without an error at later calls
  return 100024;  // ACL_ERROR_OP_NOT_FOUND
}
API int aclopCompileAndExecute(const char* type, ...) { return refuse_older(type); }
API int aclopCompileAndExecuteV2(const char* type, ...) { return refuse_older(type); }
API void* aclCreateTensorDesc(int, int, const int64_t*, int) { return new long(0); }
API size_t aclGetTensorDescNumDims(const void*) { return 0; }
API int aclGetTensorDescDimV2(const void*, size_t, int64_t* size) { return *size = 0; }
API int aclGetTensorDescFormat(const void*) { return 2; }
API int aclGetTensorDescType(const void*) { return 0; }
API void* aclCreateDataBuffer(void*, size_t) { return new long(0); }
API void aclDestroyTensorDesc(void* description) { delete static_cast<long*>(description); }
API int aclDestroyDataBuffer(void* buffer) { return destroy<long>(buffer); }
API void* aclopCreateAttr() { return new long(0); }
API void aclopDestroyAttr(void* attributes) { delete static_cast<long*>(attributes); }
API void aclSetTensorDescName(void*, const char*) {}
#define DONE(name) \
  API int name(...) { return 0; }
DONE(aclSetTensorFormat) DONE(aclSetTensorShape) DONE(aclSetTensorPlaceMent)
DONE(aclopSetAttrBool) DONE(aclopSetAttrDataType) DONE(aclopSetAttrFloat) DONE(aclopSetAttrInt) DONE(aclopSetAttrListBool)
DONE(aclopSetAttrListFloat) DONE(aclopSetAttrListInt) DONE(aclopSetAttrListListInt) DONE(aclopSetAttrString)

// ---- logs and the profiler: nothing is recorded

API void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}
DONE(MsprofRegisterCallback) DONE(MsprofReportAdditionalInfo) DONE(MsprofReportApi) DONE(MsprofReportCompactInfo)
API uint64_t MsprofGetHashId(const char*, size_t) { return 1; }
API uint64_t MsprofSysCycleTime() { return static_cast<uint64_t>(seconds() * 1e9); }
