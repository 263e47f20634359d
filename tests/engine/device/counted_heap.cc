// A file of its own, so that nobody who sees these operators also sees the
// pointers that they are called with and warns that malloc was not.
#include "kedge/tests/engine/device/counted_heap.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::uint64_t> allocations{0};
}  // namespace

void* operator new(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* const data = std::malloc(bytes == 0 ? 1 : bytes)) return data;
  std::abort();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace kedge::testing {

std::uint64_t HeapAllocations() {
  return allocations.load(std::memory_order_relaxed);
}

}  // namespace kedge::testing
