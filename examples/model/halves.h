#ifndef KEDGE_EXAMPLES_MODEL_HALVES_H_
#define KEDGE_EXAMPLES_MODEL_HALVES_H_

// Work cut in two, whatever the number of threads.

#include <thread>

namespace kedge::example {

// Calls half(0) and half(1), one after the other or, with two threads, side by
// side. Returns when both are done. A thread is started each time: tens of
// microseconds, against milliseconds of work.
template <class Half>
void RunHalves(int threads, const Half& half) {
  if (threads < 2) {
    half(0);
    half(1);
    return;
  }
  std::thread other([&half] { half(1); });
  half(0);
  other.join();
}

}  // namespace kedge::example

#endif  // KEDGE_EXAMPLES_MODEL_HALVES_H_
