// Goal: no bytes make TensorTable::Parse crash, read beyond them or accept a
// table that TensorTable::Create would not make. Input: a .kdt file.

#include <string>
#include <utility>
#include <vector>

#include "kedge/format/limits.h"
#include "kedge/format/tensor_table.h"
#include "kedge/tests/fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  using namespace kedge;        // NOLINT: the whole file is one function
  using namespace kedge::fuzz;  // NOLINT
  const std::vector<std::byte> bytes = Input(data, size).TakeRest();
  const auto table = TensorTable::Parse("table", bytes);
  std::vector<std::byte> shifted(bytes.size() + 1);
  std::copy(bytes.begin(), bytes.end(), shifted.begin() + 1);
  const auto same = TensorTable::Parse(
      "table", std::span<const std::byte>(shifted).subspan(1));
  KEDGE_CHECK(table.status() == same.status());
  if (!table.ok()) {
    RequireRefusal(table.status());
    return 0;
  }

  Sink sink;
  std::vector<TensorSpec> tensors;
  std::vector<std::pair<std::string, std::string>> ties;
  std::uint64_t total_bytes = 0;
  for (std::uint32_t i = 0; i < table->size(); ++i) {
    const TensorSpec& tensor = (*table)[i];
    KEDGE_CHECK(table->Find(tensor.name).value() == i);
    KEDGE_CHECK(tensor.byte_count() <= kMaxTensorBytes);
    sink.AddBytes(tensor.name);
    sink.AddBytes(tensor.shape);
    const TileGrid grid = tensor.grid();
    KEDGE_CHECK(grid.unit_count() == tensor.unit_count());
    if (tensor.unit_count() > 0) {
      KEDGE_CHECK(grid.TilesOf({0, tensor.unit_count()}).count ==
                  grid.tile_count());
      const TileBox last = grid.Box(grid.tile_count() - 1);
      KEDGE_CHECK(last.unit_count() >= 1 && last.unit_count() <= kTileUnits);
      KEDGE_CHECK(grid.FlatIndex(last, last.unit_count() - 1) ==
                  tensor.unit_count() - 1);
    }
    tensors.push_back(tensor);
    tensors.back().tied_to = kNotTied;
    if (tensor.tied_to == kNotTied) {
      total_bytes += tensor.byte_count();
    } else {
      ties.emplace_back(tensor.name, (*table)[tensor.tied_to].name);
    }
  }
  KEDGE_CHECK(table->total_bytes() == total_bytes);
  KEDGE_CHECK(table->hash() == HashBytes128(bytes));
  KEDGE_CHECK(std::equal(table->bytes().begin(), table->bytes().end(),
                         bytes.begin(), bytes.end()));

  const auto made = TensorTable::Create(std::move(tensors), ties);
  Require(made.status(), "create what was accepted");
  KEDGE_CHECK(std::equal(made->tensors().begin(), made->tensors().end(),
                         table->tensors().begin(), table->tensors().end()));
  const std::vector<std::uint64_t> l61(table->size());
  KEDGE_CHECK(made->StateDigest(l61) == table->StateDigest(l61));
  const auto again = TensorTable::Parse("table", made->bytes());
  Require(again.status(), "parse what was serialized");
  KEDGE_CHECK(again->hash() == made->hash());
  return 0;
}
