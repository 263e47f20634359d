#ifndef KEDGE_TESTS_SUPPORT_PLAIN_DECODER_PLAIN_DECODER_H_
#define KEDGE_TESTS_SUPPORT_PLAIN_DECODER_PLAIN_DECODER_H_

// A second reader of stores, written from spec/ alone: it includes no header of
// kedge, reads files with the standard library, and prefers plain to fast. It
// reads every golden step, and tests compare kedge's reader with it.
//
// Everything throws std::runtime_error, with a message, on any violation.

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plain_codec.h"

namespace kedge_plain {

using Array16 = std::array<std::uint8_t, 16>;
std::string Hex(const Array16& value);

struct Tensor {
  std::string name;
  std::uint8_t dtype = 0;
  std::vector<std::uint64_t> shape;
  std::uint32_t tied_to = 0xffffffff;

  std::uint64_t element_count() const;
  std::uint64_t byte_count() const;
  std::uint64_t unit_count() const;
};

// A model at one version.
struct Version {
  std::uint64_t step = 0;
  Array16 manifest_hash{};
  Array16 digest{};
  std::vector<Tensor> tensors;     // by ordinal
  std::vector<Bytes> bytes;        // by ordinal; tied ones too
  std::vector<std::uint64_t> l61;  // by ordinal
  std::map<std::string, std::string> metadata;
};

class PlainStore {
 public:
  // Reads STORE and the epoch files.
  explicit PlainStore(std::string path);

  // Steps that exist for readers, ascending. Damaged ones throw.
  std::vector<std::uint64_t> Steps() const;
  bool HasAnchor(std::uint64_t step) const;

  // Every tensor's bytes at `step`, by the chain from the nearest anchor at or
  // below `newest_anchor` (default: any). Checks everything on the way.
  Version Read(std::uint64_t step,
               std::uint64_t newest_anchor = UINT64_MAX) const;

  const Array16& run() const { return run_; }
  std::uint64_t l61_seed() const { return l61_seed_; }

 private:
  struct File;
  struct Step;
  struct Anchor;
  struct Committed;

  std::string Path(const std::string& name) const { return path_ + "/" + name; }
  std::string StepPath(std::uint64_t step) const;
  std::uint32_t ValidEpoch(std::uint64_t step) const;
  Committed ReadCommitted(const std::string& directory,
                          std::uint64_t step) const;
  std::vector<Tensor> ReadTable(const Array16& hash) const;
  Step ReadStep(std::uint64_t step) const;
  Anchor ReadAnchor(const Step& step) const;
  void CheckSlices(const std::string& where, const std::vector<Tensor>& tensors,
                   const std::vector<std::uint32_t>& tensor,
                   const std::vector<std::uint64_t>& begin,
                   const std::vector<std::uint64_t>& count) const;
  void TakeAnchor(const Step& step, const Anchor& anchor,
                  Version* version) const;
  void ApplyDelta(const Step& step, Version* version) const;
  std::uint64_t PieceHash(std::uint64_t step, std::uint32_t kind,
                          const File& file, std::uint32_t piece,
                          const std::uint8_t* bytes, std::uint64_t size) const;
  Bytes ReadDataFile(const std::string& path, const File& file,
                     std::uint32_t kind, std::uint64_t step,
                     std::uint64_t payload_at, std::uint64_t count) const;

  std::string path_;
  Array16 run_{};
  std::uint64_t l61_seed_ = 0;
  Array16 v0_digest_{};
  Array16 v0_table_{};
  std::map<std::uint32_t, std::uint64_t> epochs_;  // epoch -> resume step
};

// The state digest of tensor_table.md.
Array16 StateDigest(const std::vector<Tensor>& tensors,
                    const std::vector<std::uint64_t>& l61);

}  // namespace kedge_plain

#endif  // KEDGE_TESTS_SUPPORT_PLAIN_DECODER_PLAIN_DECODER_H_
