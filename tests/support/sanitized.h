#ifndef KEDGE_TESTS_SUPPORT_SANITIZED_H_
#define KEDGE_TESTS_SUPPORT_SANITIZED_H_

namespace kedge {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// From one broken operation to the next: every one, or some under sanitizers.
inline constexpr int kFaultStride = kSanitized ? 3 : 1;

// How many of `all` repetitions to run. Sanitizer builds look for another kind
// of fault, which shows early, and are an order of magnitude slower.
constexpr int Rounds(int all) { return kSanitized ? (all + 9) / 10 : all; }

}  // namespace kedge

#endif  // KEDGE_TESTS_SUPPORT_SANITIZED_H_
