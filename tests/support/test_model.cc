#include "kedge/tests/support/test_model.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kedge/engine/io/piece_io.h"
#include "kedge/format/codec.h"
#include "kedge/format/l61.h"
#include "kedge/format/layout.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

std::uint64_t Product(const std::vector<std::uint64_t>& shape) {
  std::uint64_t product = 1;
  for (const std::uint64_t extent : shape) product *= extent;
  return product;
}

}  // namespace

TestModel::TestModel(std::uint64_t seed, std::uint64_t scale) : random_(seed) {
  const auto add = [&](std::string name, DType dtype,
                       std::vector<std::uint64_t> shape,
                       std::string tied_to = "", std::uint64_t padding = 0) {
    Tensor tensor{std::move(name),    dtype, std::move(shape),
                  std::move(tied_to), {},    0};
    const std::uint64_t bytes = Product(tensor.shape) * ElementBytes(dtype);
    if (padding > 0) {
      const std::uint64_t row = tensor.shape[1] * ElementBytes(dtype);
      tensor.pitch = row + padding;
      tensor.bytes.resize(tensor.pitch * tensor.shape[0]);
    } else if (tensor.tied_to.empty()) {
      tensor.bytes.resize(bytes);
    }
    for (std::byte& byte : tensor.bytes) byte = std::byte(random_());
    tensors_.push_back(std::move(tensor));
  };
  add("embed.weight", DType::kBf16, {40 * scale, 257});
  add("lm_head.weight", DType::kBf16, {40 * scale, 257}, "embed.weight");
  add("mlp.gate.weight", DType::kBf16, {150 * scale, 130}, "", 34);
  add("mlp.up.weight", DType::kF16, {150 * scale, 130});
  add("norm.weight", DType::kBf16, {257});
  add("conv.weight", DType::kF32, {6, 5, 3, 3});
  add("narrow.weight", DType::kBf16, {2000, 3});
  add("router.bias", DType::kF32, {33});
  add("quantised.weight", DType::kF8E4M3, {130, 129});
  add("quantised.weight_scale_inv", DType::kF8E8M0, {2, 2});
  add("steps", DType::kI64, {});
  add("masters", DType::kF64, {3, 70});
  add("mask", DType::kBool, {9});
  add("empty", DType::kF32, {0});
  add("empty.matrix", DType::kI8, {2, 0});
}

void TestModel::Step(double fraction) {
  for (Tensor& tensor : tensors_) {
    if (tensor.bytes.empty()) continue;
    const std::uint64_t unit_bytes = UnitBytes(tensor.dtype);
    const std::uint64_t units = tensor.bytes.size() / unit_bytes;
    const auto changes =
        static_cast<std::uint64_t>(static_cast<double>(units) * fraction);
    for (std::uint64_t i = 0; i < changes + 2; ++i) {
      const std::uint64_t unit = i == 0   ? 0
                                 : i == 1 ? units - 1
                                          : random_() % units;
      std::byte* at = tensor.bytes.data() + unit * unit_bytes;
      std::uint64_t value = 0;
      std::memcpy(&value, at, unit_bytes);
      const std::uint64_t kind = random_() % 100;
      if (kind < 80) {
        value += (random_() & 1) ? 1 : -1;
      } else if (kind < 95) {
        value += random_() % 41 - 20;
      } else {
        value = random_();  // signs, NaNs, zeros, whatever
      }
      std::memcpy(at, &value, unit_bytes);
    }
  }
}

void TestModel::StepOne(const std::string& name, std::uint64_t byte) {
  for (Tensor& tensor : tensors_) {
    if (tensor.name == name) {
      tensor.bytes[byte] =
          std::byte(std::to_integer<int>(tensor.bytes[byte]) + 1);
    }
  }
}

std::vector<TrainerTensor> TestModel::Tensors() const {
  std::vector<TrainerTensor> tensors;
  for (const Tensor& tensor : tensors_) {
    TrainerTensor view;
    view.name = tensor.name;
    view.dtype = tensor.dtype;
    view.shape = tensor.shape;
    view.data = tensor.bytes.data();
    view.tied_to = tensor.tied_to;
    if (tensor.pitch > 0) {
      view.strides_bytes = {static_cast<std::int64_t>(tensor.pitch),
                            ElementBytes(tensor.dtype)};
    }
    if (!tensor.tied_to.empty()) {
      for (const Tensor& owner : tensors_) {
        if (owner.name == tensor.tied_to) view.data = owner.bytes.data();
      }
    }
    tensors.push_back(std::move(view));
  }
  return tensors;
}

ModelBytes TestModel::Bytes() const {
  ModelBytes bytes;
  for (const Tensor& tensor : tensors_) {
    if (tensor.pitch == 0) {
      bytes[tensor.name] = tensor.bytes;
      continue;
    }
    const std::uint64_t row = tensor.shape[1] * ElementBytes(tensor.dtype);
    for (std::uint64_t r = 0; r < tensor.shape[0]; ++r) {
      const std::byte* from = tensor.bytes.data() + r * tensor.pitch;
      bytes[tensor.name].insert(bytes[tensor.name].end(), from, from + row);
    }
  }
  for (const Tensor& tensor : tensors_) {
    if (!tensor.tied_to.empty()) bytes[tensor.name] = bytes[tensor.tied_to];
  }
  return bytes;
}

absl::StatusOr<ModelBytes> ReadModel(
    const Store& store, const std::shared_ptr<const PublishedStep>& step) {
  KEDGE_ASSIGN_OR_RETURN(const Chain chain, store.FindChain(step, nullptr));
  KEDGE_ASSIGN_OR_RETURN(const VersionState state, store.StateAt(step));
  const TensorTable& table = *state.table;
  const L61Key key = L61Key::FromSeed(store.info().l61_seed);
  std::vector<std::vector<std::byte>> tensors(table.size());
  for (std::size_t i = 0; i < table.size(); ++i) {
    tensors[i].resize(table[i].byte_count());
  }
  const AnchorManifest& anchor = chain.anchor->manifest;
  for (std::uint32_t f = 0; f < anchor.files.size(); ++f) {
    const DataFile& file = anchor.files[f];
    KEDGE_ASSIGN_OR_RETURN(
        const std::vector<std::byte> bytes,
        ReadFileOfSize(*store.fs(),
                       JoinPath(chain.anchor->path, DataFileName(file.id)),
                       file.bytes));
    std::vector<const AnchorSlice*> slices;
    for (const AnchorSlice& slice : anchor.slices) {
      if (slice.file == f) slices.push_back(&slice);
    }
    std::sort(slices.begin(), slices.end(), [](const auto* a, const auto* b) {
      return a->offset < b->offset;
    });
    std::uint32_t piece = 0;
    for (const AnchorSlice* slice : slices) {
      const std::uint64_t unit_bytes = UnitBytes(table[slice->tensor].dtype);
      const std::uint64_t count = slice->slice.count() * unit_bytes;
      for (std::uint64_t at = 0; at < count; at += kPieceBytes, ++piece) {
        KEDGE_RETURN_IF_ERROR(CheckPiece(
            DataFileName(file.id), slice->offset + at, file.piece_hashes[piece],
            {anchor.run, anchor.version.step, file.id, piece},
            std::span(bytes).subspan(slice->offset + at,
                                     std::min(kPieceBytes, count - at))));
      }
      std::memcpy(
          tensors[slice->tensor].data() + slice->slice.begin * unit_bytes,
          bytes.data() + slice->offset, count);
    }
  }
  for (const auto& delta : chain.deltas) {
    for (std::uint32_t f = 0; f < delta->manifest.files.size(); ++f) {
      const DataFile& file = delta->manifest.files[f];
      KEDGE_ASSIGN_OR_RETURN(
          const std::vector<std::byte> bytes,
          ReadFileOfSize(*store.fs(),
                         JoinPath(delta->path, DataFileName(file.id)),
                         file.bytes));
      for (std::uint32_t piece = 0; piece < file.piece_hashes.size(); ++piece) {
        const std::uint64_t at = piece * kPieceBytes;
        KEDGE_RETURN_IF_ERROR(CheckPiece(
            DataFileName(file.id), at, file.piece_hashes[piece],
            {delta->manifest.run, delta->id.step, file.id, piece},
            std::span(bytes).subspan(
                at, std::min<std::uint64_t>(kPieceBytes, file.bytes - at))));
      }
      for (const DeltaRecord& record : delta->manifest.records) {
        if (record.file != f) continue;
        const TensorSpec& spec = table[record.tensor];
        const std::uint32_t unit_bytes = UnitBytes(spec.dtype);
        std::byte* data = tensors[record.tensor].data();
        std::uint64_t l61 = 0;
        KEDGE_RETURN_IF_ERROR(VisitRecord(
            std::span(bytes).subspan(record.offset, record.bytes), spec.grid(),
            record.slice, unit_bytes,
            [&](std::uint64_t unit, std::int64_t difference) {
              std::uint64_t value = 0;
              std::memcpy(&value, data + unit * unit_bytes, unit_bytes);
              value += static_cast<std::uint64_t>(difference);
              std::memcpy(data + unit * unit_bytes, &value, unit_bytes);
              l61 = L61Add(l61, L61OfChange(key, unit, unit_bytes, difference));
            }));
        if (l61 != record.l61) {
          return absl::DataLossError(
              absl::StrCat(spec.name, ": L(record) is not the manifest's"));
        }
      }
    }
  }
  ModelBytes model;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const std::uint32_t owner = table[i].tied_to;
    const auto& bytes = tensors[owner == kNotTied ? i : owner];
    if (L61SumScalar(key, 0, bytes) != state.l61[i]) {
      return absl::DataLossError(
          absl::StrCat(table[i].name, ": S is not the manifest's"));
    }
    model[table[i].name] = bytes;
  }
  return model;
}

}  // namespace kedge
