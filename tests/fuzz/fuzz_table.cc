#include "kedge/tests/fuzz/fuzz_table.h"

#include <string>
#include <utility>
#include <vector>

namespace kedge::fuzz {

const TensorTable& FuzzTable() {
  static const TensorTable* const table = [] {
    const std::vector<std::pair<std::string, std::string>> ties = {{"c", "a"}};
    auto made = TensorTable::Create({{"a", DType::kBf16, {300, 256}},
                                     {"b", DType::kF32, {10}},
                                     {"c", DType::kBf16, {300, 256}},
                                     {"d", DType::kI64, {7}},
                                     {"e", DType::kU8, {0, 3}},
                                     {"f", DType::kF8E4M3, {5, 5}}},
                                    ties);
    Require(made.status(), "the fixed table");
    return new TensorTable(*std::move(made));
  }();
  return *table;
}

void Touch(const DataFile& file, Sink& sink) {
  sink.Add(file.id.rank + file.id.number + file.bytes);
  sink.AddBytes(file.hash.bytes);
  for (const std::uint64_t hash : file.piece_hashes) sink.Add(hash);
}

void Touch(const DeltaRecord& record, Sink& sink) {
  sink.Add(record.tensor + record.slice.begin + record.slice.end + record.file +
           record.offset + record.bytes + record.nnz + record.l61);
  sink.Add(static_cast<std::uint64_t>(record.codec));
}

void Touch(const Metadata& metadata, Sink& sink) {
  for (const auto& [key, value] : metadata) {
    sink.AddBytes(key);
    sink.AddBytes(value);
  }
}

}  // namespace kedge::fuzz
