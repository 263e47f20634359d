#ifndef KEDGE_TOOLS_COMMANDS_H_
#define KEDGE_TOOLS_COMMANDS_H_

// The subcommands of `kedge`, one .cc file each. main.cc fills the options from
// the command line. Each prints its result on stdout, as text or as one JSON
// object, and returns the exit status, or an error for main() to print.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "kedge/engine/io/lease.h"
#include "kedge/format/tensor_table.h"
#include "kedge/writer/store_writer.h"

namespace kedge {

inline constexpr int kExitOk = 0;
inline constexpr int kExitError = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitTimeout = 3;        // wait
inline constexpr int kExitFindings = 4;       // fsck
inline constexpr int kExitCouldNotCheck = 8;  // fsck

struct InitCommand {
  std::string store;
  std::string checkpoint;
  bool json = false;
};
absl::StatusOr<int> Run(const InitCommand& command);

struct PublishCommand {
  std::string store;
  std::string checkpoint;
  std::uint64_t step = 0;
  bool anchor = false;
  bool resume = false;
  bool replace_model = false;
  bool json = false;
};
absl::StatusOr<int> Run(const PublishCommand& command);

struct LsCommand {
  std::string store;
  std::uint64_t lease_ttl_seconds = kDefaultLeaseTtl.count();
  bool json = false;
};
absl::StatusOr<int> Run(const LsCommand& command);

struct ShowCommand {
  std::string store;
  std::uint64_t step = 0;
  std::optional<std::string> tensor;
  bool json = false;
};
absl::StatusOr<int> Run(const ShowCommand& command);

struct MaterializeCommand {
  std::string store;
  std::uint64_t step = 0;
  std::string out;
  bool json = false;
};
absl::StatusOr<int> Run(const MaterializeCommand& command);

struct FsckCommand {
  std::string store;
  bool deep = false;
  std::uint64_t lease_ttl_seconds = kDefaultLeaseTtl.count();
  bool json = false;
};
absl::StatusOr<int> Run(const FsckCommand& command);

struct WaitCommand {
  std::string store;
  std::uint64_t step = 0;
  std::uint64_t timeout_seconds = 0;
  bool json = false;
};
absl::StatusOr<int> Run(const WaitCommand& command);

struct GcCommand {
  std::string store;
  std::uint32_t keep_anchors = 0;
  std::uint64_t grace_seconds = 60;
  std::uint64_t lease_ttl_seconds = kDefaultLeaseTtl.count();
  bool dry_run = false;
  bool json = false;
};
absl::StatusOr<int> Run(const GcCommand& command);

// How the program writes: in few threads and small slices, so that a publish
// stays below 256 MiB beside the mapped checkpoint, whatever the model's size.
WriterOptions ToolWriterOptions(const std::string& store,
                                const TensorTable& table);
// Bytes of old versions that a publish keeps at hand.
inline constexpr std::uint64_t kVersionCacheBytes = std::uint64_t{48} << 20;

// Units (format/dtype.h) of all untied tensors: what nnz is out of.
std::uint64_t UnitCount(const TensorTable& table);

// What `ls` and `gc` say of a lease: "holds v18, needs v18 and later", with a
// word on what is wrong with it.
std::string DescribeLease(const LeaseInfo& lease);

// The step as a runtime error has it: kNotFound says which steps there are.
absl::StatusOr<std::shared_ptr<const PublishedStep>> FindStep(
    const Store& store, std::uint64_t step);

}  // namespace kedge

#endif  // KEDGE_TOOLS_COMMANDS_H_
