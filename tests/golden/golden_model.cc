#include "golden_model.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kedge/format/hash.h"
#include "kedge/format/l61.h"
#include "kedge/format/status.h"
#include "kedge/writer/snapshot_writer.h"

namespace kedge {
namespace {

// A fixed sequence of 64-bit numbers.
class Sequence {
 public:
  explicit Sequence(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Next() { return SplitMix64(state_ += 0x9e3779b97f4a7c15u); }
  std::uint64_t Below(std::uint64_t n) { return Next() % n; }

 private:
  std::uint64_t state_;
};

using Tensors = std::map<std::string, GoldenTensor>;

void Add(Tensors* tensors, Sequence* sequence, const std::string& name,
         DType dtype, std::vector<std::uint64_t> shape) {
  GoldenTensor& tensor = (*tensors)[name];
  tensor.dtype = dtype;
  std::uint64_t bytes = ElementBytes(dtype);
  for (const std::uint64_t extent : shape) bytes *= extent;
  tensor.shape = std::move(shape);
  tensor.bytes.resize(bytes);
  for (std::byte& byte : tensor.bytes) {
    byte = static_cast<std::byte>(sequence->Next());
  }
}

void Tie(Tensors* tensors, const std::string& name, const std::string& owner) {
  GoldenTensor tensor = (*tensors)[owner];
  tensor.bytes.clear();
  tensor.tied_to = owner;
  (*tensors)[name] = std::move(tensor);
}

std::uint64_t Unit(const GoldenTensor& tensor, std::uint64_t index) {
  const std::uint32_t unit_bytes = UnitBytes(tensor.dtype);
  std::uint64_t value = 0;
  std::memcpy(&value, tensor.bytes.data() + index * unit_bytes, unit_bytes);
  return value;
}
void SetUnit(GoldenTensor* tensor, std::uint64_t index, std::uint64_t value) {
  const std::uint32_t unit_bytes = UnitBytes(tensor->dtype);
  std::memcpy(tensor->bytes.data() + index * unit_bytes, &value, unit_bytes);
}
std::uint64_t UnitCount(const GoldenTensor& tensor) {
  return tensor.bytes.size() / UnitBytes(tensor.dtype);
}

// Moves about one unit in `every` by up to `range` either way.
void Perturb(GoldenTensor* tensor, Sequence* sequence, std::uint64_t every,
             std::uint64_t range) {
  for (std::uint64_t i = 0; i < UnitCount(*tensor); ++i) {
    if (sequence->Below(every) != 0) continue;
    const std::uint64_t by = 1 + sequence->Below(range);
    const std::uint64_t value = Unit(*tensor, i);
    SetUnit(tensor, i, sequence->Below(2) == 0 ? value + by : value - by);
  }
}

Tensors FirstModel(Sequence* sequence) {
  Tensors t;
  Add(&t, sequence, "bf16.matrix", DType::kBf16, {10, 150});
  Add(&t, sequence, "bool.mask", DType::kBool, {3, 5});
  for (std::byte& byte : t["bool.mask"].bytes) byte &= std::byte{1};
  Add(&t, sequence, "empty", DType::kF32, {2, 0});
  Add(&t, sequence, "f16.vector", DType::kF16, {97});
  Add(&t, sequence, "f32.scalar", DType::kF32, {});
  Add(&t, sequence, "f64.cube", DType::kF64, {2, 3, 5});
  Add(&t, sequence, "f8_e4m3.weight", DType::kF8E4M3, {130, 7});
  Add(&t, sequence, "f8_e5m2.weight", DType::kF8E5M2, {1, 1});
  Add(&t, sequence, "f8_e8m0.scale", DType::kF8E8M0, {2, 1, 2});
  Add(&t, sequence, "i16", DType::kI16, {31});
  Add(&t, sequence, "i32", DType::kI32, {4, 4});
  Add(&t, sequence, "i64.step", DType::kI64, {});
  Add(&t, sequence, "i8", DType::kI8, {129});
  Tie(&t, "tied.head", "bf16.matrix");
  Add(&t, sequence, "u16", DType::kU16, {2, 2, 2, 2, 2});
  Add(&t, sequence, "u32", DType::kU32, {300});
  Add(&t, sequence, "u64", DType::kU64, {7});
  Add(&t, sequence, "u8.opaque", DType::kU8, {1000});
  Add(&t, sequence, "\xc3\xa9t\xc3\xa9/weight \"x\"", DType::kBf16, {3});
  return t;
}

Tensors SecondModel(Sequence* sequence) {
  Tensors t;
  Add(&t, sequence, "f8.matrix", DType::kF8E4M3, {132, 130});
  Add(&t, sequence, "f64", DType::kF64, {64});
  Tie(&t, "tied", "f64");
  return t;
}

WriterOptions Options(const std::string& path) {
  WriterOptions options;
  options.store_path = path;
  // One thread each: the order of records in a segment is otherwise free.
  options.io_threads = 1;
  options.encode_threads = 1;
  options.anchor_file_bytes = std::uint64_t{32} << 10;  // several files
  return options;
}

std::vector<TrainerTensor> TensorsOf(const Tensors& tensors) {
  std::vector<TrainerTensor> result;
  for (const auto& [name, tensor] : tensors) {
    TrainerTensor entry;
    entry.name = name;
    entry.dtype = tensor.dtype;
    entry.shape = tensor.shape;
    entry.tied_to = tensor.tied_to;
    const GoldenTensor& owner =
        tensor.tied_to.empty() ? tensor : tensors.at(tensor.tied_to);
    entry.data = owner.bytes.data();
    result.push_back(std::move(entry));
  }
  return result;
}

}  // namespace

std::vector<GoldenVersion> GoldenVersions() {
  Sequence sequence(20);
  std::vector<GoldenVersion> versions;
  const auto next = [&versions](std::uint64_t step) -> GoldenVersion& {
    if (!versions.empty()) versions.push_back(versions.back());
    if (versions.empty()) versions.emplace_back();
    GoldenVersion& version = versions.back();
    version.step = step;
    version.root = false;
    version.anchor = false;
    return version;
  };

  GoldenVersion& v0 = next(0);
  v0.root = true;
  v0.anchor = true;
  v0.tensors = FirstModel(&sequence);
  v0.metadata = {{"format", "pt"}, {"note", "v0"}};

  // A sparse step over every dtype.
  GoldenVersion& v1 = next(1);
  v1.epoch = 1;
  for (auto& [name, tensor] : v1.tensors) {
    if (name != "bool.mask") Perturb(&tensor, &sequence, 12, 3);
  }
  v1.tensors["bool.mask"].bytes[4] ^= std::byte{1};
  SetUnit(&v1.tensors["i64.step"], 0, 1);

  // An empty delta; the metadata change.
  GoldenVersion& v2 = next(2);
  v2.metadata = {{"note", ""}, {"\xc3\xbc", "umlaut"}};

  // v3 is never published. Dense tiles, the largest differences, NaN payloads,
  // -0.0 for 0.0.
  GoldenVersion& v4 = next(4);
  Perturb(&v4.tensors["bf16.matrix"], &sequence, 1, 40);
  GoldenTensor& matrix = v4.tensors["bf16.matrix"];
  SetUnit(&matrix, 0, 0x7fc1);
  SetUnit(&matrix, 1, 0xffff);
  SetUnit(&matrix, 2, 0x8000);
  SetUnit(&matrix, 3, 0x0000);
  Perturb(&v4.tensors["u8.opaque"], &sequence, 1, 2);
  for (const std::uint64_t i : {std::uint64_t{5}, std::uint64_t{6}}) {
    GoldenTensor& u32 = v4.tensors["u32"];
    SetUnit(&u32, i, Unit(u32, i) < 0x80000000u ? 0xffffffffu : 0);
  }
  Perturb(&v4.tensors["f64.cube"], &sequence, 2, 1u << 30);

  // A second epoch. Only the tied storage changes, in one unit.
  GoldenVersion& v5 = next(5);
  v5.epoch = 2;
  GoldenTensor& tied = v5.tensors["bf16.matrix"];
  SetUnit(&tied, 1499, Unit(tied, 1499) + 1);

  // Another model: a root.
  GoldenVersion& v6 = next(6);
  v6.root = true;
  v6.anchor = true;
  v6.tensors = SecondModel(&sequence);
  v6.metadata = {};

  // Four tiles in one record; an anchor of its own.
  GoldenVersion& v7 = next(7);
  v7.anchor = true;
  Perturb(&v7.tensors["f8.matrix"], &sequence, 60, 2);
  Perturb(&v7.tensors["f64"], &sequence, 3, 1000);

  GoldenVersion& v8 = next(8);
  Perturb(&v8.tensors["f8.matrix"], &sequence, 90, 5);
  return versions;
}

absl::Status WriteGoldenStore(const std::string& path) {
  const WriterOptions options = Options(path);
  // What the writer has bound: its addresses stay.
  Tensors live;
  std::unique_ptr<SnapshotWriter> writer;
  std::uint32_t epoch = 1;
  for (const GoldenVersion& version : GoldenVersions()) {
    if (writer == nullptr) {
      live = version.tensors;
      InitOptions init;
      init.run = RunId{{'k', 'e', 'd', 'g', 'e', ' ', 'g', 'o', 'l', 'd', 'e',
                        'n', ' ', 'v', '1', '.'}};
      init.l61_seed = 0x6b65646765763031;
      init.created_unix_seconds = 1'800'000'000;
      init.metadata = version.metadata;
      KEDGE_ASSIGN_OR_RETURN(
          writer, SnapshotWriter::Create(options, init, TensorsOf(live)));
      continue;
    }
    if (version.epoch != epoch) {
      writer = nullptr;
      KEDGE_ASSIGN_OR_RETURN(writer,
                             SnapshotWriter::Open(options, TensorsOf(live)));
      epoch = version.epoch;
    }
    if (version.root) {
      Tensors replaced = version.tensors;
      std::swap(live, replaced);
      const auto result = writer->ReplaceTensors(version.step, TensorsOf(live),
                                                 version.metadata);
      if (!result.ok()) return result.status();
      continue;
    }
    for (auto& [name, tensor] : live) {
      const GoldenTensor& to = version.tensors.at(name);
      std::copy(to.bytes.begin(), to.bytes.end(), tensor.bytes.begin());
    }
    PublishOptions publish;
    publish.anchor = version.anchor;
    publish.metadata = &version.metadata;
    const auto result = writer->Publish(version.step, publish);
    if (!result.ok()) return result.status();
    if (!result->anchor_status.ok()) return result->anchor_status;
    if (!result->warnings.empty()) {
      return absl::InternalError(absl::StrJoin(result->warnings, "; "));
    }
  }
  return absl::OkStatus();
}

std::string GoldenText() {
  std::string text;
  for (const GoldenVersion& version : GoldenVersions()) {
    absl::StrAppend(&text, "version ", version.step, " epoch ", version.epoch,
                    version.root ? " root" : "",
                    version.anchor ? " anchor" : "", "\n");
    for (const auto& [name, tensor] : version.tensors) {
      const GoldenTensor& owner =
          tensor.tied_to.empty() ? tensor : version.tensors.at(tensor.tied_to);
      absl::StrAppend(&text, "tensor ", DTypeName(tensor.dtype), " [",
                      absl::StrJoin(tensor.shape, ","), "] ",
                      ToHex(HashBytes128(owner.bytes)), " ", name, "\n");
    }
    for (const auto& [key, value] : version.metadata) {
      absl::StrAppend(&text, "metadata ", key, "=", value, "\n");
    }
  }
  return text;
}

}  // namespace kedge
