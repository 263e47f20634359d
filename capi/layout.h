#ifndef KEDGE_CAPI_LAYOUT_H_
#define KEDGE_CAPI_LAYOUT_H_

// What the structs of kedge.h look like to programs that were compiled with
// the first version of this ABI. These numbers never change; a struct that has
// grown since is read and filled as far as the caller's goes.

#include <cstddef>

#include "kedge/capi/kedge.h"

namespace kedge::capi {

// The size that a struct had first. Only structs with a struct_size have one.
template <class T>
inline constexpr std::size_t kFirstSize = 0;

template <>
inline constexpr std::size_t kFirstSize<kedge_coordinator_options> = 40;
template <>
inline constexpr std::size_t kFirstSize<kedge_tensor> = 64;
template <>
inline constexpr std::size_t kFirstSize<kedge_writer_options> = 72;
template <>
inline constexpr std::size_t kFirstSize<kedge_store_options> = 56;
template <>
inline constexpr std::size_t kFirstSize<kedge_publish_options> = 32;
template <>
inline constexpr std::size_t kFirstSize<kedge_publish_result> = 128;
template <>
inline constexpr std::size_t kFirstSize<kedge_parameter> = 56;
template <>
inline constexpr std::size_t kFirstSize<kedge_quantised_tensor> = 32;
template <>
inline constexpr std::size_t kFirstSize<kedge_hook_options> = 104;
template <>
inline constexpr std::size_t kFirstSize<kedge_hook_result> = 56;
template <>
inline constexpr std::size_t kFirstSize<kedge_hook_memory> = 48;
template <>
inline constexpr std::size_t kFirstSize<kedge_target> = 64;
template <>
inline constexpr std::size_t kFirstSize<kedge_weight_set> = 32;
template <>
inline constexpr std::size_t kFirstSize<kedge_reader_options> = 160;
template <>
inline constexpr std::size_t kFirstSize<kedge_update_result> = 152;

}  // namespace kedge::capi

#endif  // KEDGE_CAPI_LAYOUT_H_
