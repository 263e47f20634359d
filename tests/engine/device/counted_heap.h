#ifndef KEDGE_TESTS_ENGINE_DEVICE_COUNTED_HEAP_H_
#define KEDGE_TESTS_ENGINE_DEVICE_COUNTED_HEAP_H_

#include <cstdint>

namespace kedge::testing {

// Calls of operator new so far, on any thread of the program.
std::uint64_t HeapAllocations();

}  // namespace kedge::testing

#endif  // KEDGE_TESTS_ENGINE_DEVICE_COUNTED_HEAP_H_
