#ifndef KEDGE_FORMAT_MANIFEST_RULES_H_
#define KEDGE_FORMAT_MANIFEST_RULES_H_

// The rules of manifests and rank fragments as plain structs, so that what is
// written and what was read go through the same ones. Private to format/. The
// rules that need the tensor table are CheckStepManifest and
// CheckAnchorManifest of manifest.h. All errors are kDataLoss, but for
// kUnimplemented where a record's codec is reserved.

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"

namespace kedge::rules {

// Rules that need no table.
absl::Status CheckStepLayout(absl::string_view where,
                             const StepManifest& manifest);
absl::Status CheckAnchorLayout(absl::string_view where,
                               const AnchorManifest& manifest);
absl::Status CheckFragmentLayout(absl::string_view where,
                                 const RankFragment& fragment);

// Rules of a fragment by itself that need the table.
absl::Status CheckFragmentTable(absl::string_view where,
                                const RankFragment& fragment,
                                const TensorTable& table);

// The first record that lies in no single owned range, if there is one. Both
// are ascending.
std::optional<std::size_t> FirstRecordOutside(const RankFragment& fragment);

// `tensor "name"`, for messages.
std::string TensorText(const TensorTable& table, std::uint32_t ordinal);
// "[3, 17)"
std::string RangeText(const UnitRange& range);

}  // namespace kedge::rules

#endif  // KEDGE_FORMAT_MANIFEST_RULES_H_
