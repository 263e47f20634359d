// Numbers and layouts that programs are compiled with. A member that moves, or
// a number that is used for something else, does not compile.

#include "kedge/capi/layout.h"

#include <cstddef>
#include <cstdint>

#include "kedge/engine/device/kernel_tasks.h"
#include "kedge/format/dtype.h"
#include "kedge/reader/follower.h"

namespace kedge::capi {
namespace {

static_assert(sizeof(void*) == 8 && sizeof(std::size_t) == 8,
              "kedge needs 64-bit addresses");

static_assert(sizeof(kedge_version_id) == 24);
static_assert(sizeof(kedge_range) == 16);
static_assert(sizeof(kedge_metadata) == 16);
static_assert(sizeof(kedge_named_bytes) == 16);

// As long as no struct has grown; one that has keeps its first size.
#define KEDGE_NOT_GROWN(type) static_assert(sizeof(type) == kFirstSize<type>)
KEDGE_NOT_GROWN(kedge_coordinator_options);
KEDGE_NOT_GROWN(kedge_tensor);
KEDGE_NOT_GROWN(kedge_writer_options);
KEDGE_NOT_GROWN(kedge_store_options);
KEDGE_NOT_GROWN(kedge_publish_options);
KEDGE_NOT_GROWN(kedge_publish_result);
KEDGE_NOT_GROWN(kedge_parameter);
KEDGE_NOT_GROWN(kedge_quantised_tensor);
KEDGE_NOT_GROWN(kedge_hook_options);
KEDGE_NOT_GROWN(kedge_hook_result);
KEDGE_NOT_GROWN(kedge_hook_memory);
KEDGE_NOT_GROWN(kedge_target);
KEDGE_NOT_GROWN(kedge_weight_set);
KEDGE_NOT_GROWN(kedge_reader_options);
KEDGE_NOT_GROWN(kedge_update_result);
#undef KEDGE_NOT_GROWN

// The last member of the first version, and one in the middle of each.
static_assert(offsetof(kedge_coordinator_options, deadline_ms) == 32);
static_assert(offsetof(kedge_tensor, data) == 32);
static_assert(offsetof(kedge_tensor, shard) == 56);
static_assert(offsetof(kedge_writer_options, slice_units) == 40);
static_assert(offsetof(kedge_writer_options, trash_grace_seconds) == 64);
static_assert(offsetof(kedge_store_options, metadata) == 32);
static_assert(offsetof(kedge_store_options, external_v0) == 48);
static_assert(offsetof(kedge_publish_options, metadata_count) == 24);
static_assert(offsetof(kedge_publish_result, nnz) == 32);
static_assert(offsetof(kedge_publish_result, anchor_status) == 96);
static_assert(offsetof(kedge_publish_result, warning_count) == 120);
static_assert(offsetof(kedge_parameter, frozen) == 48);
static_assert(offsetof(kedge_quantised_tensor, floor) == 28);
static_assert(offsetof(kedge_hook_options, quantised_count) == 72);
static_assert(offsetof(kedge_hook_options, deadline_ms) == 96);
static_assert(offsetof(kedge_hook_result, guard_bytes) == 48);
static_assert(offsetof(kedge_hook_memory, residual_count) == 40);
static_assert(offsetof(kedge_target, data) == 48);
static_assert(offsetof(kedge_target, strides_bytes) == 56);
static_assert(offsetof(kedge_weight_set, target_count) == 24);
static_assert(offsetof(kedge_reader_options, directory_interval_ms) == 64);
static_assert(offsetof(kedge_reader_options, user) == 152);
static_assert(offsetof(kedge_update_result, deltas) == 40);
static_assert(offsetof(kedge_update_result, warning_count) == 144);

// Numbers that are those of the library.
template <class Enum>
constexpr bool Is(std::int32_t number, Enum value) {
  return number == static_cast<std::int32_t>(value);
}
static_assert(Is(KEDGE_F64, DType::kF64) && Is(KEDGE_F32, DType::kF32) &&
              Is(KEDGE_F16, DType::kF16) && Is(KEDGE_BF16, DType::kBf16));
static_assert(Is(KEDGE_F8_E4M3, DType::kF8E4M3) &&
              Is(KEDGE_F8_E5M2, DType::kF8E5M2) &&
              Is(KEDGE_F8_E8M0, DType::kF8E8M0));
static_assert(Is(KEDGE_I64, DType::kI64) && Is(KEDGE_I32, DType::kI32) &&
              Is(KEDGE_I16, DType::kI16) && Is(KEDGE_I8, DType::kI8));
static_assert(Is(KEDGE_U64, DType::kU64) && Is(KEDGE_U32, DType::kU32) &&
              Is(KEDGE_U16, DType::kU16) && Is(KEDGE_U8, DType::kU8) &&
              Is(KEDGE_BOOL, DType::kBool) && Is(KEDGE_BOOL, kMaxDType));
static_assert(Is(KEDGE_SCALE_EXACT, ScaleKind::kExact) &&
              Is(KEDGE_SCALE_POWER_OF_TWO, ScaleKind::kPowerOfTwo));
static_assert(Is(KEDGE_READ_AUTO, ReadMode::kAuto) &&
              Is(KEDGE_READ_MAP, ReadMode::kMap) &&
              Is(KEDGE_READ_READ, ReadMode::kRead));
static_assert(Is(KEDGE_READER_EMPTY, FollowerState::kEmpty) &&
              Is(KEDGE_READER_READY, FollowerState::kReady) &&
              Is(KEDGE_READER_UPDATING, FollowerState::kUpdating) &&
              Is(KEDGE_READER_POISONED, FollowerState::kPoisoned) &&
              Is(KEDGE_READER_SUPERSEDED, FollowerState::kSuperseded));

}  // namespace
}  // namespace kedge::capi
