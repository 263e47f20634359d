// Goal: no bytes make the reader of step manifests crash, read beyond them, or
// accept what the writer would not write. Input: a MANIFEST of FuzzTable().

#include "kedge/tests/fuzz/fuzz_table.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  using namespace kedge;        // NOLINT: the whole file is one function
  using namespace kedge::fuzz;  // NOLINT
  CheckManifestBytes(
      Input(data, size).TakeRest(),
      [](std::span<const std::byte> bytes) {
        return ParseStepManifest("MANIFEST", bytes);
      },
      [](const StepManifest& m, Sink& sink) {
        sink.AddBytes(m.run.bytes);
        sink.AddBytes(m.table_hash.bytes);
        sink.AddBytes(m.base.manifest_hash.bytes);
        sink.AddBytes(m.digest_before.bytes);
        sink.AddBytes(m.digest_after.bytes);
        sink.Add(m.epoch + m.step + m.base.step + (m.metadata_changed ? 1 : 0));
        sink.Add(static_cast<std::uint64_t>(m.kind));
        for (const DataFile& file : m.files) Touch(file, sink);
        for (const TensorState& state : m.states) {
          sink.Add(state.tensor + state.l61_before + state.l61_after);
        }
        sink.AddBytes(m.l61);
        for (const DeltaRecord& record : m.records) {
          KEDGE_CHECK(record.file < m.files.size());
          Touch(record, sink);
        }
        Touch(m.metadata, sink);
      },
      [](const StepManifest& m) {
        return CheckStepManifest("MANIFEST", m, FuzzTable());
      },
      [](const StepManifest& m) {
        return SerializeStepManifest(m, FuzzTable());
      });
  return 0;
}
