#ifndef KEDGE_TESTS_ENGINE_CUDA_CUDA_TEST_SUPPORT_H_
#define KEDGE_TESTS_ENGINE_CUDA_CUDA_TEST_SUPPORT_H_

// Memory of a real GPU for the kernels' own tests.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace kedge::testing {

#define KEDGE_CUDA_MUST(call)                                    \
  do {                                                           \
    const cudaError_t must_error = (call);                       \
    ASSERT_EQ(must_error, cudaSuccess)                           \
        << #call << ": " << cudaGetErrorName(must_error) << ", " \
        << cudaGetErrorString(must_error);                       \
  } while (false)

inline bool HasGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// Bytes on the device; freed with the object.
class GpuBytes {
 public:
  GpuBytes() = default;
  explicit GpuBytes(std::size_t size) : size_(size) {
    EXPECT_EQ(cudaMalloc(&data_, size == 0 ? 1 : size), cudaSuccess);
  }
  GpuBytes(GpuBytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  GpuBytes& operator=(GpuBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~GpuBytes() { cudaFree(data_); }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::byte* data() const { return as<std::byte>(); }
  std::size_t size() const { return size_; }
  void Upload(const void* from, std::size_t bytes) {
    EXPECT_EQ(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  void Download(void* to, std::size_t bytes) const {
    EXPECT_EQ(cudaMemcpy(to, data_, bytes, cudaMemcpyDeviceToHost),
              cudaSuccess);
  }
  void Fill(int value) {
    EXPECT_EQ(cudaMemset(data_, value, size_), cudaSuccess);
  }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

template <typename T>
GpuBytes ToGpu(const std::vector<T>& values) {
  GpuBytes bytes(values.size() * sizeof(T));
  bytes.Upload(values.data(), values.size() * sizeof(T));
  return bytes;
}

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_ENGINE_CUDA_CUDA_TEST_SUPPORT_H_
