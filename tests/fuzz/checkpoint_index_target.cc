// Goal: no text makes the reader of a checkpoint's index crash, read beyond it
// or accept a file name that leads out of its directory. Input: the text of a
// model.safetensors.index.json.

#include <algorithm>
#include <vector>

#include "kedge/tests/fuzz/fuzz_input.h"
#include "kedge/tools/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  using namespace kedge;        // NOLINT: the whole file is one function
  using namespace kedge::fuzz;  // NOLINT
  const std::vector<std::byte> bytes = Input(data, size).TakeRest();
  const absl::string_view json(reinterpret_cast<const char*>(bytes.data()),
                               bytes.size());
  const auto index = ParseCheckpointIndex("index", json);
  if (!index.ok()) {
    RequireRefusal(index.status());
    return 0;
  }
  KEDGE_CHECK(std::is_sorted(index->files.begin(), index->files.end()));
  for (const std::string& file : index->files) {
    Require(CheckCheckpointFileName("index", file), "an accepted file name");
    KEDGE_CHECK(file.find('/') == std::string::npos);
    KEDGE_CHECK(file != "." && file != "..");
  }
  std::vector<bool> used(index->files.size());
  for (std::size_t i = 0; i < index->entries.size(); ++i) {
    const CheckpointIndex::Entry& entry = index->entries[i];
    KEDGE_CHECK(entry.file < index->files.size());
    used[entry.file] = true;
    if (i > 0) KEDGE_CHECK(index->entries[i - 1].tensor < entry.tensor);
  }
  KEDGE_CHECK(std::find(used.begin(), used.end(), false) == used.end());
  return 0;
}
