#ifndef KEDGE_TESTS_FUZZ_FUZZ_TABLE_H_
#define KEDGE_TESTS_FUZZ_FUZZ_TABLE_H_

// The model that fuzzed manifests are checked against.

#include "kedge/format/manifest.h"
#include "kedge/format/tensor_table.h"
#include "kedge/tests/fuzz/fuzz_input.h"

namespace kedge::fuzz {

// The tensors of tests/format/manifest_samples.h, SmallTable(), from which the
// seeds are made.
const TensorTable& FuzzTable();

void Touch(const DataFile& file, Sink& sink);
void Touch(const DeltaRecord& record, Sink& sink);
void Touch(const Metadata& metadata, Sink& sink);

// What must hold for any bytes of a step or anchor manifest: the same verdict
// at any alignment; accepted bytes are served whole, serialized again and read
// back as the same.
//
// parse(bytes) -> StatusOr<M>, touch(M, Sink), check(M) -> Status,
// serialize(M) -> StatusOr<vector<byte>>
template <class Parse, class TouchAll, class Check, class Serialize>
void CheckManifestBytes(std::span<const std::byte> bytes, const Parse& parse,
                        const TouchAll& touch, const Check& check,
                        const Serialize& serialize) {
  const auto manifest = parse(bytes);
  // One byte off, FlatBuffers are read from a copy.
  std::vector<std::byte> shifted(bytes.size() + 1);
  std::copy(bytes.begin(), bytes.end(), shifted.begin() + 1);
  const auto same = parse(std::span<const std::byte>(shifted).subspan(1));
  KEDGE_CHECK(manifest.status() == same.status());
  if (!manifest.ok()) {
    RequireRefusal(manifest.status());
    return;
  }
  Sink sink;
  touch(*manifest, sink);
  const absl::Status verdict = check(*manifest);
  const auto written = serialize(*manifest);
  if (!verdict.ok()) {
    RequireRefusal(verdict);
    KEDGE_CHECK(absl::IsInvalidArgument(written.status()));
    return;
  }
  Require(written.status(), "serialize what was accepted");
  const auto again = parse(*written);
  Require(again.status(), "parse what was serialized");
  Require(check(*again), "check what was serialized");
  const auto twice = serialize(*again);
  Require(twice.status(), "serialize again");
  KEDGE_CHECK(*twice == *written);
}

}  // namespace kedge::fuzz

#endif  // KEDGE_TESTS_FUZZ_FUZZ_TABLE_H_
