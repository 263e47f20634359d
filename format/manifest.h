#ifndef KEDGE_FORMAT_MANIFEST_H_
#define KEDGE_FORMAT_MANIFEST_H_

// What a step directory and an anchor directory hold. See
// spec/step_manifest.md, spec/anchor_manifest.md, spec/rank_fragment.md.
//
// On disk each is a FlatBuffer of scalar columns; here they are plain structs.
// Serialize* checks the same rules as Parse* (a bad manifest is never written)
// and is deterministic. Parse* takes untrusted bytes: the FlatBuffers verifier
// under tight limits, then every rule of the page; kDataLoss names field and
// row, kUnimplemented a newer format.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kedge/format/codec.h"
#include "kedge/format/hash.h"
#include "kedge/format/tensor_table.h"

namespace kedge {

// A version's identity, complete: never the number alone.
struct VersionId {
  std::uint64_t step = 0;
  Hash128 manifest_hash;

  friend auto operator<=>(const VersionId&, const VersionId&) = default;
};
std::string ToString(const VersionId& version);  // "v19 (0123abcd...)"

// One data file of the directory. Its name is DataFileName(id).
struct DataFile {
  FileId id;
  std::uint64_t bytes = 0;
  Hash128 hash;  // HashOfPieces(piece_hashes)
  std::vector<std::uint64_t> piece_hashes;
};

// Free-form text that travels with a version: user keys, and the safetensors
// headers that `kedge materialize` gives back. At most kMaxMetadataBytes.
using Metadata = std::map<std::string, std::string>;

// One slice's changes: where they lie and what they say.
struct DeltaRecord {
  std::uint32_t tensor = 0;  // ordinal; never a tied one
  UnitRange slice;           // non-empty; units (format/dtype.h)
  std::uint32_t file = 0;    // index into StepManifest::files
  std::uint64_t offset = 0;  // in the file; a multiple of kRecordAlignment
  std::uint32_t bytes = 0;   // without padding
  Codec codec = Codec::kR2;
  std::uint64_t nnz = 0;  // >= 1
  std::uint64_t l61 = 0;  // L(record)
};

// S of one tensor before and after the step. For every tensor with a record,
// its ties included, ascending by ordinal. after = before + sum of the records'
// l61.
struct TensorState {
  std::uint32_t tensor = 0;
  std::uint64_t l61_before = 0;
  std::uint64_t l61_after = 0;
};

enum class StepKind : std::uint8_t {
  kDelta = 1,  // base + records
  // No delta: S of every tensor, to be had from an anchor alone. v0, and a step
  // whose table differs from its base's.
  kRoot = 2,
};

// MANIFEST of step_N.
struct StepManifest {
  RunId run;
  std::uint32_t epoch = 0;
  std::uint64_t step = 0;
  StepKind kind = StepKind::kDelta;
  Hash128 table_hash;
  // kDelta: base.step < step. kRoot: the version before it, or all zero at v0.
  VersionId base;
  Hash128 digest_before;  // state digest of base; zero for kRoot
  Hash128 digest_after;
  std::vector<DataFile> files;       // ascending by id
  std::vector<TensorState> states;   // kDelta
  std::vector<std::uint64_t> l61;    // kRoot: S of every tensor, in table order
  std::vector<DeltaRecord> records;  // ascending by (tensor, slice.begin)
  // Whether this version's metadata differ from its base's; if so all of them
  // stand here.
  bool metadata_changed = false;
  Metadata metadata;
};

// MANIFEST of step_N/anchor.
struct AnchorSlice {
  std::uint32_t tensor = 0;  // ordinal; never a tied one
  UnitRange slice;           // units; non-empty
  std::uint32_t file = 0;    // index into AnchorManifest::files
  std::uint64_t offset = 0;  // a multiple of kSliceAlignment, from 4096 on
};

struct AnchorManifest {
  RunId run;
  std::uint32_t epoch = 0;  // of the writer that added the anchor
  VersionId version;        // whose bytes these are
  Hash128 table_hash;
  Hash128 digest;
  std::vector<DataFile> files;     // ascending by id
  std::vector<std::uint64_t> l61;  // S of every tensor, in table order
  // Ascending by (tensor, slice.begin): every unit of every untied tensor
  // exactly once. A slice's pieces are its bytes in runs of kPieceBytes; a
  // file's piece_hashes are those of its slices in offset order.
  std::vector<AnchorSlice> slices;
  Metadata metadata;  // all of the version's
};

// One rank's part of a step, which the committing rank merges.
struct RankFragment {
  RunId run;
  std::uint32_t epoch = 0;
  std::uint64_t step = 0;
  std::uint64_t attempt = 0;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  Hash128 table_hash;
  VersionId base;
  std::vector<DataFile> files;       // of this rank alone
  std::vector<DeltaRecord> records;  // DeltaRecord::file indexes files
  // What this rank read of each tensor it owns a part of, changed or not: the
  // ranges that it vouches for. Merging proves that they cover the table once.
  struct Owned {
    std::uint32_t tensor = 0;
    UnitRange slice;
  };
  std::vector<Owned> owned;  // ascending by (tensor, slice.begin)
};

// Limits and layout rules that need no table are checked by all of these; those
// that need one (ordinals, ranges, coverage, sums) when `table` is given.
absl::StatusOr<std::vector<std::byte>> SerializeStepManifest(
    const StepManifest& manifest, const TensorTable& table);
absl::StatusOr<StepManifest> ParseStepManifest(
    absl::string_view where, std::span<const std::byte> bytes);
// Every rule that needs the table. Call after Parse with the table whose hash
// the manifest names.
absl::Status CheckStepManifest(absl::string_view where,
                               const StepManifest& manifest,
                               const TensorTable& table);

absl::StatusOr<std::vector<std::byte>> SerializeAnchorManifest(
    const AnchorManifest& manifest, const TensorTable& table);
absl::StatusOr<AnchorManifest> ParseAnchorManifest(
    absl::string_view where, std::span<const std::byte> bytes);
absl::Status CheckAnchorManifest(absl::string_view where,
                                 const AnchorManifest& manifest,
                                 const TensorTable& table);

absl::StatusOr<std::vector<std::byte>> SerializeRankFragment(
    const RankFragment& fragment, const TensorTable& table);
absl::StatusOr<RankFragment> ParseRankFragment(
    absl::string_view where, std::span<const std::byte> bytes);

// Merges the fragments of one attempt into the manifest of a step. `l61_before`
// is S of every tensor at the base, in table order.
//
// Errors: kFailedPrecondition if the fragments disagree (run, epoch, step,
// attempt, world size, table, base), a rank is missing or there twice, owned
// ranges leave a gap or overlap, or a record lies outside its rank's ranges.
// All name the tensor and the ranks.
absl::StatusOr<StepManifest> MergeFragments(
    std::span<const RankFragment> fragments, const TensorTable& table,
    std::span<const std::uint64_t> l61_before);

// How many pieces a file of `bytes` (segments) has.
std::uint64_t PieceCount(std::uint64_t bytes);

}  // namespace kedge

#endif  // KEDGE_FORMAT_MANIFEST_H_
