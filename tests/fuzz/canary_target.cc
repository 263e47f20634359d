// Goal: show that a replay finds a fault behind a mutation, says so by its exit
// status and leaves the input behind. Input: anything; one that does not begin
// with '{' is the planted fault.

#include "kedge/tests/fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  KEDGE_CHECK(size == 0 || data[0] == '{');
  return 0;
}
