#include "kedge/reader/weight_exchange.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/limits.h"
#include "kedge/format/status.h"

namespace kedge {
namespace {

static_assert(std::endian::native == std::endian::little);

class Output {
 public:
  void Put(std::uint64_t value) {
    // Most values are small: seven bits a byte, the lowest first.
    while (value >= 0x80) {
      bytes_.push_back(static_cast<std::byte>(value | 0x80));
      value >>= 7;
    }
    bytes_.push_back(static_cast<std::byte>(value));
  }
  void Put(const std::string& text) {
    Put(text.size());
    const auto* data = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), data, data + text.size());
  }
  template <typename T>
  void Put(const std::vector<T>& values) {
    Put(values.size());
    for (const T value : values) Put(static_cast<std::uint64_t>(value));
  }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : bytes_(bytes) {}

  bool ok() const { return ok_; }
  bool at_end() const { return bytes_.empty(); }
  std::uint64_t Get() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (bytes_.empty()) break;
      const auto byte = std::to_integer<std::uint64_t>(bytes_.front());
      bytes_ = bytes_.subspan(1);
      value |= (byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    ok_ = false;
    return 0;
  }
  std::string GetText() {
    const std::uint64_t size = Get();
    if (size > bytes_.size() || size > kMaxNameBytes) {
      ok_ = false;
      return "";
    }
    std::string text(reinterpret_cast<const char*>(bytes_.data()), size);
    bytes_ = bytes_.subspan(size);
    return text;
  }
  template <typename T>
  void GetList(std::vector<T>* values) {
    const std::uint64_t count = Get();
    if (count > kMaxRank) ok_ = false;
    for (std::uint64_t i = 0; i < count && ok_; ++i) {
      values->push_back(static_cast<T>(Get()));
    }
  }

 private:
  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

}  // namespace

std::vector<std::byte> SerializeWeightSets(
    const std::vector<const WeightSet*>& sets) {
  Output output;
  output.Put(sets.size());
  for (const WeightSet* set : sets) {
    // A name is for messages: a long one is cut.
    output.Put(set->name().substr(0, 64));
    output.Put(set->targets().size());
    for (const TensorTarget& target : set->targets()) {
      output.Put(target.name.substr(0, kMaxNameBytes));
      output.Put(static_cast<std::uint64_t>(target.dtype));
      output.Put(target.shape);
      output.Put(target.begin);
      output.Put(target.extent);
      output.Put(reinterpret_cast<std::uintptr_t>(target.data));
      output.Put(target.strides_bytes);
    }
  }
  return output.Take();
}

absl::StatusOr<std::vector<std::unique_ptr<const WeightSet>>> ParseWeightSets(
    std::span<const std::byte> bytes) {
  const auto invalid = [] {
    return absl::InvalidArgumentError(
        "the description of a rank's weight sets cannot be read; do all ranks "
        "run the same version of kedge, and does `reduce` return the sum?");
  };
  Input input(bytes);
  std::vector<std::unique_ptr<const WeightSet>> sets;
  const std::uint64_t set_count = input.Get();
  for (std::uint64_t s = 0; s < set_count && input.ok(); ++s) {
    auto set = std::make_unique<WeightSet>(input.GetText());
    const std::uint64_t target_count = input.Get();
    for (std::uint64_t t = 0; t < target_count && input.ok(); ++t) {
      TensorTarget target;
      target.name = input.GetText();
      const std::uint64_t dtype = input.Get();
      if (dtype > 0xff) return invalid();
      target.dtype = static_cast<DType>(dtype);
      input.GetList(&target.shape);
      input.GetList(&target.begin);
      input.GetList(&target.extent);
      target.data =
          reinterpret_cast<void*>(static_cast<std::uintptr_t>(input.Get()));
      input.GetList(&target.strides_bytes);
      if (!input.ok()) return invalid();
      KEDGE_RETURN_IF_ERROR(set->Add(std::move(target)));
    }
    sets.push_back(std::move(set));
  }
  if (!input.ok() || !input.at_end()) return invalid();
  return sets;
}

}  // namespace kedge
