#ifndef KEDGE_EXAMPLES_RUN_SHARED_MEMORY_H_
#define KEDGE_EXAMPLES_RUN_SHARED_MEMORY_H_

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace kedge::example {

// For containers whose contents processes forked later share, as the GPUs of a
// node would.
template <typename T>
struct SharedAllocator {
  using value_type = T;
  SharedAllocator() = default;
  template <typename U>
  SharedAllocator(const SharedAllocator<U>&) {}

  T* allocate(std::size_t count) {
    void* const memory =
        mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) {
    munmap(memory, count * sizeof(T));
  }
  template <typename U>
  bool operator==(const SharedAllocator<U>&) const {
    return true;
  }
};

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_RUN_SHARED_MEMORY_H_
