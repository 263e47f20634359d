// Goal: no bytes make the reader of anchor manifests crash, read beyond them,
// or accept what the writer would not write. Input: an anchor's MANIFEST of
// FuzzTable().

#include "kedge/tests/fuzz/fuzz_table.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  using namespace kedge;        // NOLINT: the whole file is one function
  using namespace kedge::fuzz;  // NOLINT
  CheckManifestBytes(
      Input(data, size).TakeRest(),
      [](std::span<const std::byte> bytes) {
        return ParseAnchorManifest("MANIFEST", bytes);
      },
      [](const AnchorManifest& m, Sink& sink) {
        sink.AddBytes(m.run.bytes);
        sink.AddBytes(m.table_hash.bytes);
        sink.AddBytes(m.version.manifest_hash.bytes);
        sink.AddBytes(m.digest.bytes);
        sink.Add(m.epoch + m.version.step);
        for (const DataFile& file : m.files) Touch(file, sink);
        sink.AddBytes(m.l61);
        for (const AnchorSlice& slice : m.slices) {
          KEDGE_CHECK(slice.file < m.files.size());
          sink.Add(slice.tensor + slice.slice.begin + slice.slice.end +
                   slice.offset);
        }
        Touch(m.metadata, sink);
      },
      [](const AnchorManifest& m) {
        return CheckAnchorManifest("MANIFEST", m, FuzzTable());
      },
      [](const AnchorManifest& m) {
        return SerializeAnchorManifest(m, FuzzTable());
      });
  return 0;
}
