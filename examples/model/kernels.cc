#include "kedge/examples/model/kernels.h"

namespace kedge::example {

extern const Kernels kKernelsBaseline;
#ifdef KEDGE_EXAMPLE_X86_LEVELS
extern const Kernels kKernelsV3;
extern const Kernels kKernelsV4;
#endif

std::vector<const Kernels*> SupportedKernels() {
  std::vector<const Kernels*> supported;
#ifdef KEDGE_EXAMPLE_X86_LEVELS
  // Asked feature by feature because not every compiler knows the level names.
  const bool v3 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") &&
                  __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") &&
                  __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) supported.push_back(&kKernelsV4);
  if (v3) supported.push_back(&kKernelsV3);
#endif
  supported.push_back(&kKernelsBaseline);
  return supported;
}

const Kernels& BestKernels() {
  static const Kernels& best = *SupportedKernels().front();
  return best;
}

}  // namespace kedge::example
