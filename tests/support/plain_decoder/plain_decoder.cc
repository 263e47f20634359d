#include "plain_decoder.h"

#define XXH_INLINE_ALL
#include <flatbuffers/flatbuffers.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "anchor_manifest_generated.h"
#include "step_manifest_generated.h"
#include "tensor_table_generated.h"

namespace kedge_plain {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kP = (std::uint64_t{1} << 61) - 1;
constexpr std::uint64_t kPiece = std::uint64_t{1} << 23;
constexpr std::uint32_t kNone = 0xffffffff;

[[noreturn]] void Fail(const std::string& where, const std::string& what) {
  throw std::runtime_error(where + ": " + what);
}
void Require(bool holds, const std::string& where, const std::string& what) {
  if (!holds) Fail(where, what);
}
std::string Str(std::uint64_t value) { return std::to_string(value); }

std::string Digits(std::uint64_t value, std::size_t digits) {
  std::string text = Str(value);
  return std::string(digits - std::min(digits, text.size()), '0') + text;
}
bool AllDigits(const std::string& text, std::size_t digits) {
  return text.size() == digits &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return c >= '0' && c <= '9'; });
}

Bytes ReadFile(const std::string& path, std::uint64_t most) {
  Require(fs::symlink_status(path).type() == fs::file_type::regular, path,
          "no regular file");
  const std::uint64_t size = fs::file_size(path);
  Require(size <= most, path, Str(size) + " bytes, at most " + Str(most));
  std::ifstream in(path, std::ios::binary);
  Bytes bytes(size);
  in.read(reinterpret_cast<char*>(bytes.data()),
          static_cast<std::streamsize>(size));
  Require(static_cast<std::uint64_t>(in.gcount()) == size, path, "short read");
  return bytes;
}

std::uint64_t Little(const Bytes& bytes, std::size_t at, int size) {
  std::uint64_t value = 0;
  for (int i = 0; i < size; ++i) {
    value |= static_cast<std::uint64_t>(bytes.at(at + i)) << (8 * i);
  }
  return value;
}
Array16 Sixteen(const Bytes& bytes, std::size_t at) {
  Array16 value;
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), 16,
              value.begin());
  return value;
}
Array16 Sixteen(const kedge::fbs::Bytes16& value) {
  Array16 result;
  std::memcpy(result.data(), &value, 16);
  return result;
}

std::uint64_t Hash64(const std::uint8_t* data, std::size_t size,
                     std::uint64_t seed = 0) {
  return XXH3_64bits_withSeed(data, size, seed);
}
Array16 Hash128(const Bytes& bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical,
                           XXH3_128bits(bytes.data(), bytes.size()));
  Array16 result;
  std::memcpy(result.data(), canonical.digest, 16);
  return result;
}

void Put(std::uint64_t value, int size, Bytes* out) {
  for (int i = 0; i < size; ++i) {
    out->push_back(static_cast<std::uint8_t>(value >> (8 * i)));
  }
}

// What STORE, HEAD, COMMIT, epoch files and headers of data files share.
void CheckFixed(const std::string& where, const Bytes& bytes, std::size_t size,
                const char* magic) {
  Require(bytes.size() == size, where, Str(bytes.size()) + " bytes");
  Require(std::memcmp(bytes.data(), magic, 4) == 0, where, "magic");
  Require(Little(bytes, size - 8, 8) == Hash64(bytes.data(), size - 8), where,
          "hash");
  Require(Little(bytes, 4, 2) != 0, where, "min_reader 0");
  Require(Little(bytes, 4, 2) <= 1, where, "needs a newer reader");
}
void CheckZero(const std::string& where, const Bytes& bytes, std::uint64_t from,
               std::uint64_t to) {
  for (std::uint64_t i = from; i < to; ++i) {
    Require(bytes.at(i) == 0, where, "byte " + Str(i) + " is not zero");
  }
}

bool IsUtf8(const std::string& text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = [&](std::size_t k) -> std::uint32_t {
      return i + k < text.size() ? static_cast<std::uint8_t>(text[i + k]) : 0;
    };
    const std::uint32_t lead = byte(0);
    std::size_t length = 1;
    std::uint32_t code = lead;
    if (lead >= 0x80) {
      length = lead >> 5 == 6    ? 2
               : lead >> 4 == 14 ? 3
               : lead >> 3 == 30 ? 4
                                 : 0;
      if (length == 0) return false;
      code = lead & (0x7fu >> length);
      for (std::size_t k = 1; k < length; ++k) {
        if (byte(k) >> 6 != 2) return false;
        code = code << 6 | (byte(k) & 0x3f);
      }
      static constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
      if (code < kLeast[length] || code > 0x10ffff ||
          (code >= 0xd800 && code < 0xe000)) {
        return false;
      }
    }
    i += length;
  }
  return true;
}

// A verified FlatBuffer's root. The vector has the alignment of new.
template <typename Root>
const Root* RootOf(const std::string& where, const Bytes& bytes,
                   const char* identifier) {
  Require(
      bytes.size() >= 8 && std::memcmp(bytes.data() + 4, identifier, 4) == 0,
      where, "file identifier");
  flatbuffers::Verifier verifier(bytes.data(), bytes.size(), 1, 1);
  Require(verifier.VerifyBuffer<Root>(identifier), where, "structure");
  const Root* root = flatbuffers::GetRoot<Root>(bytes.data());
  Require(root->min_reader() != 0, where, "min_reader 0");
  Require(root->min_reader() <= 1, where, "needs a newer reader");
  return root;
}

// The verifier does not look whether 8-byte elements are aligned: values are
// copied out.
template <typename T, typename U = T>
std::vector<U> Column(const flatbuffers::Vector<T>* column) {
  std::vector<U> values;
  if (column == nullptr) return values;
  values.reserve(column->size());
  for (std::size_t i = 0; i < column->size(); ++i) {
    T value;
    std::memcpy(&value, column->Data() + i * sizeof(T), sizeof(T));
    values.push_back(static_cast<U>(value));
  }
  return values;
}
std::vector<Array16> Column(
    const flatbuffers::Vector<const kedge::fbs::Bytes16*>* column) {
  std::vector<Array16> values;
  if (column == nullptr) return values;
  for (const kedge::fbs::Bytes16* value : *column) {
    values.push_back(Sixteen(*value));
  }
  return values;
}
// One value of two columns. `zero_if_absent`: a missing column means zeros.
template <typename Narrow, typename Wide>
std::vector<std::uint64_t> Either(const std::string& where,
                                  const flatbuffers::Vector<Narrow>* narrow,
                                  const flatbuffers::Vector<Wide>* wide,
                                  std::size_t rows, bool zero_if_absent) {
  auto values = Column<Narrow, std::uint64_t>(narrow);
  const auto other = Column<Wide, std::uint64_t>(wide);
  Require(values.empty() || other.empty(), where, "two widths of one value");
  if (values.empty()) values = other;
  if (values.empty() && zero_if_absent) values.assign(rows, 0);
  Require(values.size() == rows, where, "rows of a column");
  return values;
}

std::map<std::string, std::string> Metadata(
    const std::string& where, const flatbuffers::Vector<std::uint32_t>* end,
    const flatbuffers::Vector<std::uint8_t>* pool) {
  const auto ends = Column(end);
  const auto text = Column<std::uint8_t, char>(pool);
  Require(ends.size() % 2 == 0 && ends.size() <= 200000, where, "metadata");
  Require(text.size() <= std::uint64_t{1} << 26, where, "metadata bytes");
  std::vector<std::string> texts;
  std::size_t at = 0;
  for (const std::uint32_t e : ends) {
    Require(e >= at && e <= text.size(), where, "metadata_end");
    texts.emplace_back(text.data() + at, e - at);
    Require(IsUtf8(texts.back()), where, "metadata is not UTF-8");
    at = e;
  }
  Require(at == text.size(), where, "metadata bytes left over");
  std::map<std::string, std::string> metadata;
  for (std::size_t i = 0; i < texts.size(); i += 2) {
    Require(i == 0 || texts[i - 2] < texts[i], where, "metadata keys");
    metadata[texts[i]] = texts[i + 1];
  }
  return metadata;
}

void CheckResidues(const std::string& where,
                   const std::vector<std::uint64_t>& values) {
  for (const std::uint64_t value : values) {
    Require(value < kP, where, "a residue of 2^61 - 1 or more");
  }
}

void CheckAllL61(const std::string& where, const std::vector<Tensor>& tensors,
                 const std::vector<std::uint64_t>& l61) {
  Require(l61.size() == tensors.size(), where, "rows of l61");
  CheckResidues(where, l61);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].tied_to != kNone) {
      Require(l61[i] == l61[tensors[i].tied_to], where, "S of a tie");
    }
    if (tensors[i].byte_count() == 0) {
      Require(l61[i] == 0, where, "S of an empty tensor");
    }
  }
}

std::uint64_t CeilDiv(std::uint64_t x, std::uint64_t y) {
  return x / y + (x % y != 0 ? 1 : 0);
}
std::uint64_t RoundUp(std::uint64_t x, std::uint64_t y) {
  return CeilDiv(x, y) * y;
}

std::uint32_t UnitBytes(const Tensor& tensor) {
  return std::min<std::uint32_t>(4, ElementBytes(tensor.dtype));
}

}  // namespace

struct PlainStore::File {
  std::uint32_t rank = 0;
  std::uint32_t number = 0;
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> pieces;
};

struct PlainStore::Committed {
  std::uint32_t epoch = 0;
  Array16 hash{};
  Bytes manifest;
};

struct PlainStore::Step {
  struct Record {
    std::uint32_t tensor = 0;
    std::uint64_t begin = 0;
    std::uint64_t count = 0;
    std::uint64_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t nnz = 0;
    std::uint64_t l61 = 0;
  };
  struct State {
    std::uint32_t tensor = 0;
    std::uint64_t before = 0;
    std::uint64_t after = 0;
  };
  std::uint64_t step = 0;
  Array16 hash{};
  bool root = false;
  Array16 table{};
  std::vector<Tensor> tensors;
  std::uint64_t base_step = 0;
  Array16 base_hash{};
  Array16 digest_before{};
  Array16 digest_after{};
  std::vector<File> files;
  std::vector<State> states;
  std::vector<std::uint64_t> l61;
  std::vector<Record> records;
  bool metadata_changed = false;
  std::map<std::string, std::string> metadata;
};

struct PlainStore::Anchor {
  struct Slice {
    std::uint32_t tensor = 0;
    std::uint64_t begin = 0;
    std::uint64_t count = 0;
    std::uint64_t file = 0;
    std::uint64_t offset = 0;
  };
  std::vector<File> files;
  std::vector<std::uint64_t> l61;
  std::vector<Slice> slices;
  std::map<std::string, std::string> metadata;
};

std::string Hex(const Array16& value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : value) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::uint64_t Tensor::element_count() const {
  std::uint64_t count = 1;
  for (const std::uint64_t d : shape) count *= d;
  return count;
}
std::uint64_t Tensor::byte_count() const {
  return element_count() * ElementBytes(dtype);
}
std::uint64_t Tensor::unit_count() const {
  return byte_count() / UnitBytes(*this);
}

Array16 StateDigest(const std::vector<Tensor>& tensors,
                    const std::vector<std::uint64_t>& l61) {
  Bytes input;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Put(tensors[i].name.size(), 4, &input);
    input.insert(input.end(), tensors[i].name.begin(), tensors[i].name.end());
    Put(tensors[i].dtype, 1, &input);
    Put(tensors[i].byte_count(), 8, &input);
    Put(l61.at(i), 8, &input);
  }
  return Hash128(input);
}

PlainStore::PlainStore(std::string path) : path_(std::move(path)) {
  const std::string where = Path("STORE");
  const Bytes store = ReadFile(where, 96);
  CheckFixed(where, store, 96, "KDST");
  run_ = Sixteen(store, 8);
  l61_seed_ = Little(store, 24, 8);
  Require(Little(store, 32, 4) == 1, where, "commit mode");
  Require(Little(store, 36, 4) <= 1, where, "external v0");
  v0_digest_ = Sixteen(store, 40);
  v0_table_ = Sixteen(store, 56);
  CheckZero(where, store, 80, 88);
  for (const auto& entry : fs::directory_iterator(Path("epochs"))) {
    const std::string name = entry.path().filename().string();
    if (!AllDigits(name, 8)) continue;
    const std::string file = entry.path().string();
    const Bytes epoch = ReadFile(file, 64);
    CheckFixed(file, epoch, 64, "KDEP");
    Require(Sixteen(epoch, 8) == run_, file, "run");
    Require(Little(epoch, 24, 8) <= 99999999, file, "resume step");
    const auto number = static_cast<std::uint32_t>(Little(epoch, 32, 4));
    Require(number >= 1 && Digits(number, 8) == name, file, "epoch");
    CheckZero(file, epoch, 36, 40);
    epochs_[number] = Little(epoch, 24, 8);
  }
}

std::string PlainStore::StepPath(std::uint64_t step) const {
  return Path("step_" + Digits(step, 8));
}

std::uint32_t PlainStore::ValidEpoch(std::uint64_t step) const {
  std::uint32_t valid = 0;
  for (const auto& [epoch, resume] : epochs_) {
    if (resume < step) valid = epoch;  // the map ascends
  }
  return valid;
}

std::vector<std::uint64_t> PlainStore::Steps() const {
  std::vector<std::uint64_t> steps;
  for (const auto& entry : fs::directory_iterator(path_)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("step_", 0) != 0 || !AllDigits(name.substr(5), 8)) continue;
    if (!fs::exists(entry.path() / "COMMIT")) continue;
    const std::uint64_t step = std::stoull(name.substr(5));
    if (ReadCommitted(entry.path().string(), step).epoch != ValidEpoch(step)) {
      continue;  // void
    }
    ReadStep(step);
    steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

bool PlainStore::HasAnchor(std::uint64_t step) const {
  return fs::exists(StepPath(step) + "/anchor/COMMIT");
}

PlainStore::Committed PlainStore::ReadCommitted(const std::string& directory,
                                                std::uint64_t step) const {
  const std::string where = directory + "/COMMIT";
  const Bytes commit = ReadFile(where, 64);
  CheckFixed(where, commit, 64, "KDCM");
  Require(Sixteen(commit, 8) == run_, where, "run");
  Require(Little(commit, 24, 8) == step && step <= 99999999, where, "step");
  Committed committed;
  committed.epoch = static_cast<std::uint32_t>(Little(commit, 32, 4));
  Require(committed.epoch <= 99999999 && (committed.epoch >= 1 || step == 0),
          where, "epoch");
  const std::uint64_t size = Little(commit, 36, 4);
  Require(size >= 1 && size <= std::uint64_t{1} << 28, where, "manifest_bytes");
  committed.hash = Sixteen(commit, 40);
  const std::string manifest = directory + "/MANIFEST";
  committed.manifest = ReadFile(manifest, size);
  Require(committed.manifest.size() == size, manifest, "size");
  Require(Hash128(committed.manifest) == committed.hash, manifest, "XXH3-128");
  return committed;
}

std::vector<Tensor> PlainStore::ReadTable(const Array16& hash) const {
  const std::string where = Path("tensors-" + Hex(hash) + ".kdt");
  const Bytes bytes = ReadFile(where, std::uint64_t{1} << 28);
  Require(Hash128(bytes) == hash, where, "XXH3-128");
  const auto* root = RootOf<kedge::fbs::TensorTable>(where, bytes, "KDTT");
  const auto name_end = Column(root->name_end());
  const auto names = Column<std::uint8_t, char>(root->names());
  const auto dtype = Column(root->dtype());
  const auto rank = Column(root->rank());
  const auto shape = Column(root->shape());
  auto tied_to = Column(root->tied_to());
  const std::size_t n = name_end.size();
  if (tied_to.empty()) tied_to.assign(n, kNone);
  Require(n <= 1000000 && dtype.size() == n && rank.size() == n &&
              tied_to.size() == n,
          where, "rows");
  std::vector<Tensor> tensors;
  std::size_t name_at = 0;
  std::size_t shape_at = 0;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < n; ++i) {
    Tensor tensor;
    Require(name_end[i] > name_at && name_end[i] <= names.size() &&
                name_end[i] - name_at <= 4096,
            where, "name_end");
    tensor.name.assign(names.data() + name_at, name_end[i] - name_at);
    name_at = name_end[i];
    Require(IsUtf8(tensor.name) && tensor.name.find('\0') == std::string::npos,
            where, "a name");
    Require(i == 0 || tensors.back().name < tensor.name, where,
            "order of names");
    tensor.dtype = dtype[i];
    Require(tensor.dtype >= 1 && tensor.dtype <= 16, where, "dtype");
    Require(rank[i] <= 32 && rank[i] <= shape.size() - shape_at, where, "rank");
    unsigned __int128 bytes_of = ElementBytes(tensor.dtype);
    bool empty = false;
    for (std::size_t k = 0; k < rank[i]; ++k) {
      const std::uint64_t d = shape[shape_at++];
      Require(d <= std::uint64_t{1} << 45, where, "dimension");
      if (d == 0) empty = true;
      if (d != 0 && bytes_of <= std::uint64_t{1} << 45) bytes_of *= d;
      tensor.shape.push_back(d);
    }
    Require(empty || bytes_of <= std::uint64_t{1} << 45, where,
            "bytes of a tensor");
    tensor.tied_to = tied_to[i];
    if (tensor.tied_to == kNone) total += tensor.byte_count();
    Require(total <= std::uint64_t{1} << 52, where, "bytes of all tensors");
    tensors.push_back(tensor);
  }
  Require(name_at == names.size() && shape_at == shape.size(), where,
          "names or shapes left over");
  for (std::size_t i = 0; i < n; ++i) {
    const Tensor& tensor = tensors[i];
    if (tensor.tied_to == kNone) continue;
    Require(tensor.tied_to < n, where, "tied_to");
    const Tensor& owner = tensors[tensor.tied_to];
    Require(owner.tied_to == kNone && owner.dtype == tensor.dtype &&
                owner.shape == tensor.shape,
            where, "owner of a tie");
  }
  return tensors;
}

// Slices of records and of anchors.
void PlainStore::CheckSlices(const std::string& where,
                             const std::vector<Tensor>& tensors,
                             const std::vector<std::uint32_t>& tensor,
                             const std::vector<std::uint64_t>& begin,
                             const std::vector<std::uint64_t>& count) const {
  for (std::size_t i = 0; i < tensor.size(); ++i) {
    Require(tensor[i] < tensors.size(), where, "tensor of a slice");
    const Tensor& of = tensors[tensor[i]];
    Require(of.tied_to == kNone, where, "a slice of a tied tensor");
    const std::uint64_t units = of.unit_count();
    Require(count[i] >= 1 && begin[i] <= units && count[i] <= units - begin[i],
            where, "a slice outside its tensor");
    if (ElementBytes(of.dtype) == 8) {
      Require(begin[i] % 2 == 0 && count[i] % 2 == 0, where,
              "a slice of half elements");
    }
    if (i == 0) continue;
    Require(
        tensor[i] > tensor[i - 1] || (tensor[i] == tensor[i - 1] &&
                                      begin[i] >= begin[i - 1] + count[i - 1]),
        where, "order of slices");
  }
}

namespace {

// The columns that both manifests have for files.
template <typename File, typename Root>
std::vector<File> Files(const std::string& where, const Root& root,
                        std::vector<std::uint32_t> piece_counts,
                        bool counts_follow_from_sizes) {
  const auto rank = Column(root.file_rank());
  const auto number = Column(root.file_number());
  const auto bytes = Column(root.file_bytes());
  const auto hash = Column(root.file_hash());
  const auto pieces = Column(root.piece_hash());
  const std::size_t n = rank.size();
  Require(number.size() == n && bytes.size() == n && hash.size() == n, where,
          "rows of files");
  if (counts_follow_from_sizes) {
    for (const std::uint64_t size : bytes) {
      piece_counts.push_back(static_cast<std::uint32_t>(CeilDiv(size, kPiece)));
    }
  }
  Require(piece_counts.size() == n, where, "rows of files");
  std::vector<File> files;
  std::size_t at = 0;
  for (std::size_t i = 0; i < n; ++i) {
    File file;
    file.rank = rank[i];
    file.number = number[i];
    file.bytes = bytes[i];
    Require(file.rank < 1000 && file.number < 1000 &&
                file.bytes <= std::uint64_t{1} << 40,
            where, "a file");
    if (i > 0) {
      Require(std::pair(files.back().rank, files.back().number) <
                  std::pair(file.rank, file.number),
              where, "order of files");
    }
    Require(piece_counts[i] <= pieces.size() - at, where, "pieces");
    Bytes column;
    for (std::uint32_t k = 0; k < piece_counts[i]; ++k) {
      file.pieces.push_back(pieces[at++]);
      Put(file.pieces.back(), 8, &column);
    }
    Require(Hash128(column) == hash[i], where, "hash of a file");
    files.push_back(file);
  }
  Require(at == pieces.size(), where, "piece hashes left over");
  return files;
}

}  // namespace

PlainStore::Step PlainStore::ReadStep(std::uint64_t step) const {
  const std::string where = StepPath(step) + "/MANIFEST";
  const Committed committed = ReadCommitted(StepPath(step), step);
  Require(committed.epoch == ValidEpoch(step), where,
          "void: epoch " + Str(committed.epoch));
  const auto* root =
      RootOf<kedge::fbs::StepManifest>(where, committed.manifest, "KDSM");
  Require(Sixteen(*root->run()) == run_, where, "run");
  Require(root->epoch() == committed.epoch, where, "epoch");
  Require(root->step() == step, where, "step");
  Require(root->kind() == 1 || root->kind() == 2, where, "kind");
  Step result;
  result.step = step;
  result.hash = committed.hash;
  result.root = root->kind() == 2;
  result.table = Sixteen(*root->table_hash());
  result.tensors = ReadTable(result.table);
  result.base_step = root->base_step();
  result.base_hash = Sixteen(*root->base_manifest_hash());
  result.digest_before = Sixteen(*root->digest_before());
  result.digest_after = Sixteen(*root->digest_after());
  if (step == 0) {
    Require(
        result.root && result.base_step == 0 && result.base_hash == Array16{},
        where, "v0 with a base");
    Require(result.digest_after == v0_digest_ && result.table == v0_table_,
            where, "v0 is not the one of STORE");
  } else {
    Require(result.base_step < step && result.base_hash != Array16{}, where,
            "base");
  }
  result.metadata_changed = root->metadata_changed();
  result.metadata = Metadata(where, root->metadata_end(), root->metadata());
  Require(result.metadata_changed || result.metadata.empty(), where,
          "metadata that did not change");
  result.files = Files<File>(where, *root, {}, true);
  result.l61 = Column(root->l61());

  const auto state_tensor = Column(root->state_tensor());
  const auto before = Column(root->state_l61_before());
  const auto after = Column(root->state_l61_after());
  Require(before.size() == state_tensor.size() &&
              after.size() == state_tensor.size(),
          where, "rows of states");
  CheckResidues(where, before);
  CheckResidues(where, after);
  for (std::size_t i = 0; i < state_tensor.size(); ++i) {
    result.states.push_back({state_tensor[i], before[i], after[i]});
  }

  const auto tensor = Column(root->record_tensor());
  const std::size_t n = tensor.size();
  Require(n <= 16000000, where, "records");
  const auto begin =
      Either(where, root->record_begin(), root->record_begin_wide(), n, true);
  const auto count =
      Either(where, root->record_count(), root->record_count_wide(), n, false);
  const auto file =
      Either(where, root->record_file(), root->record_file_wide(), n, true);
  const auto offset8 = Either(where, root->record_offset8(),
                              root->record_offset8_wide(), n, false);
  const auto bytes = Column(root->record_bytes());
  auto codec = Column(root->record_codec());
  if (codec.empty()) codec.assign(n, 1);
  const auto nnz =
      Either(where, root->record_nnz(), root->record_nnz_wide(), n, false);
  const auto l61 = Column(root->record_l61());
  Require(bytes.size() == n && codec.size() == n && l61.size() == n, where,
          "rows of records");
  CheckResidues(where, l61);
  CheckSlices(where, result.tensors, tensor, begin, count);
  for (std::size_t i = 0; i < n; ++i) {
    Require(codec[i] == 1, where, "codec " + Str(codec[i]));
    Require(file[i] < result.files.size(), where, "file of a record");
    Require(offset8[i] <= std::uint64_t{1} << 37, where, "offset of a record");
    Require(bytes[i] >= 16 && bytes[i] <= std::uint64_t{1} << 30, where,
            "bytes of a record");
    Require(nnz[i] >= 1 && nnz[i] <= count[i], where, "nnz of a record");
    result.records.push_back({tensor[i], begin[i], count[i], file[i],
                              8 * offset8[i], bytes[i], nnz[i], l61[i]});
  }

  if (result.root) {
    Require(result.files.empty() && result.states.empty() && n == 0, where,
            "a root with a delta");
    Require(result.digest_before == Array16{}, where, "digest_before");
    CheckAllL61(where, result.tensors, result.l61);
    Require(StateDigest(result.tensors, result.l61) == result.digest_after,
            where, "digest_after");
    return result;
  }

  Require(result.l61.empty(), where, "l61 in a delta");
  // Records fill their files.
  for (std::size_t f = 0; f < result.files.size(); ++f) {
    std::map<std::uint64_t, std::uint64_t> by_offset;
    for (const Step::Record& record : result.records) {
      if (record.file != f) continue;
      Require(by_offset.emplace(record.offset, record.bytes).second, where,
              "two records at one offset");
    }
    std::uint64_t end = 64;
    for (const auto& [offset, size] : by_offset) {
      Require(offset == end, where, "a hole between records");
      end = RoundUp(offset + size, 8);
    }
    Require(result.files[f].bytes == RoundUp(end + 32, 64), where,
            "size of a file");
  }
  // States are those of the tensors with records, and of their ties.
  std::map<std::uint32_t, std::uint64_t> sums;
  for (const Step::Record& record : result.records) {
    sums[record.tensor] = L61Sum(sums[record.tensor], record.l61);
  }
  std::map<std::uint32_t, Step::State> states;
  bool any_change = false;
  for (std::size_t i = 0; i < result.states.size(); ++i) {
    const Step::State& state = result.states[i];
    Require(i == 0 || result.states[i - 1].tensor < state.tensor, where,
            "order of states");
    states[state.tensor] = state;
    any_change = any_change || state.before != state.after;
  }
  std::size_t expected = 0;
  for (std::uint32_t i = 0; i < result.tensors.size(); ++i) {
    const std::uint32_t owner =
        result.tensors[i].tied_to == kNone ? i : result.tensors[i].tied_to;
    if (sums.count(owner) == 0) continue;
    ++expected;
    Require(states.count(i) == 1 && states.count(owner) == 1, where,
            "a changed tensor without a state");
    Require(states[i].before == states[owner].before &&
                states[i].after == states[owner].after &&
                L61Sum(states[i].before, sums[owner]) == states[i].after,
            where, "S of " + result.tensors[i].name);
  }
  Require(expected == states.size(), where, "a state without a record");
  Require(any_change == (result.digest_before != result.digest_after), where,
          "digest_after");
  return result;
}

PlainStore::Anchor PlainStore::ReadAnchor(const Step& step) const {
  const std::string directory = StepPath(step.step) + "/anchor";
  const std::string where = directory + "/MANIFEST";
  const Committed committed = ReadCommitted(directory, step.step);
  const auto* root =
      RootOf<kedge::fbs::AnchorManifest>(where, committed.manifest, "KDAM");
  Require(Sixteen(*root->run()) == run_, where, "run");
  Require(root->epoch() == committed.epoch, where, "epoch");
  Require(root->step() == step.step &&
              Sixteen(*root->step_manifest_hash()) == step.hash,
          where, "version");
  Require(Sixteen(*root->table_hash()) == step.table, where, "table");
  Require(Sixteen(*root->digest()) == step.digest_after, where, "digest");
  Anchor anchor;
  anchor.files =
      Files<File>(where, *root, Column(root->file_piece_count()), false);
  anchor.l61 = Column(root->l61());
  CheckAllL61(where, step.tensors, anchor.l61);
  Require(StateDigest(step.tensors, anchor.l61) == step.digest_after, where,
          "digest of l61");
  const auto tensor = Column(root->slice_tensor());
  const std::size_t n = tensor.size();
  Require(n <= 16000000, where, "slices");
  const auto begin =
      Either(where, root->slice_begin(), root->slice_begin_wide(), n, true);
  const auto count =
      Either(where, root->slice_count(), root->slice_count_wide(), n, false);
  const auto file =
      Either(where, root->slice_file(), root->slice_file_wide(), n, true);
  const auto offset = Column(root->slice_offset4096());
  Require(offset.size() == n, where, "rows of slices");
  CheckSlices(where, step.tensors, tensor, begin, count);
  std::vector<std::uint64_t> covered(step.tensors.size(), 0);
  std::vector<std::uint64_t> end(anchor.files.size(), 4096);
  std::vector<std::uint64_t> slices(anchor.files.size(), 0);
  std::vector<std::uint64_t> pieces(anchor.files.size(), 0);
  for (std::size_t i = 0; i < n; ++i) {
    Require(begin[i] == covered[tensor[i]], where, "a gap");
    covered[tensor[i]] += count[i];
    Require(file[i] < anchor.files.size(), where, "file of a slice");
    const std::uint64_t at = std::uint64_t{4096} * offset[i];
    const std::uint64_t size = count[i] * UnitBytes(step.tensors[tensor[i]]);
    Require(at == RoundUp(end[file[i]], 4096), where, "offset of a slice");
    end[file[i]] = at + size;
    ++slices[file[i]];
    pieces[file[i]] += CeilDiv(size, kPiece);
    anchor.slices.push_back({tensor[i], begin[i], count[i], file[i], at});
  }
  for (std::size_t i = 0; i < step.tensors.size(); ++i) {
    if (step.tensors[i].tied_to != kNone) continue;
    Require(covered[i] == step.tensors[i].unit_count(), where,
            "units of " + step.tensors[i].name + " are missing");
  }
  for (std::size_t f = 0; f < anchor.files.size(); ++f) {
    Require(slices[f] > 0 && anchor.files[f].bytes == end[f] &&
                anchor.files[f].pieces.size() == pieces[f],
            where, "a file that its slices do not fill");
  }
  anchor.metadata = Metadata(where, root->metadata_end(), root->metadata());
  return anchor;
}

std::uint64_t PlainStore::PieceHash(std::uint64_t step, std::uint32_t kind,
                                    const File& file, std::uint32_t piece,
                                    const std::uint8_t* bytes,
                                    std::uint64_t size) const {
  Bytes key(run_.begin(), run_.end());
  Put(step, 8, &key);
  Put(kind, 4, &key);
  Put(file.rank, 4, &key);
  Put(file.number, 4, &key);
  Put(piece, 4, &key);
  return Hash64(bytes, size, Hash64(key.data(), key.size()));
}

// The whole file, its header checked; `payload_at` is where the payload begins.
Bytes PlainStore::ReadDataFile(const std::string& path, const File& file,
                               std::uint32_t kind, std::uint64_t step,
                               std::uint64_t payload_at,
                               std::uint64_t count) const {
  Bytes bytes = ReadFile(path, file.bytes);
  Require(bytes.size() == file.bytes && bytes.size() >= payload_at, path,
          "size");
  const Bytes header(bytes.begin(), bytes.begin() + 64);
  CheckFixed(path, header, 64, kind == 1 ? "KDSG" : "KDAN");
  Require(Sixteen(header, 8) == run_, path, "run");
  Require(Little(header, 24, 8) == step, path, "step");
  Require(Little(header, 32, 4) == file.rank &&
              Little(header, 36, 4) == file.number,
          path, "rank or number");
  Require(Little(header, 48, 4) == count, path, "count");
  CheckZero(path, header, 52, 56);
  CheckZero(path, bytes, 64, payload_at);
  return bytes;
}

void PlainStore::TakeAnchor(const Step& step, const Anchor& anchor,
                            Version* version) const {
  version->tensors = step.tensors;
  version->l61 = anchor.l61;
  version->metadata = anchor.metadata;
  version->bytes.clear();
  for (const Tensor& tensor : step.tensors) {
    version->bytes.emplace_back(tensor.tied_to == kNone ? tensor.byte_count()
                                                        : 0);
  }
  for (std::size_t f = 0; f < anchor.files.size(); ++f) {
    const File& file = anchor.files[f];
    const std::string path = StepPath(step.step) + "/anchor/anchor-r" +
                             Digits(file.rank, 3) + "-" +
                             Digits(file.number, 3) + ".kda";
    std::uint64_t count = 0;
    for (const Anchor::Slice& slice : anchor.slices) count += slice.file == f;
    const Bytes bytes = ReadDataFile(path, file, 2, step.step, 4096, count);
    Require(Little(bytes, 40, 8) == file.bytes - 4096, path, "payload_bytes");
    std::uint64_t end = 4096;
    std::uint32_t piece = 0;
    for (const Anchor::Slice& slice : anchor.slices) {
      if (slice.file != f) continue;
      CheckZero(path, bytes, end, slice.offset);
      const std::uint32_t unit = UnitBytes(step.tensors[slice.tensor]);
      const std::uint64_t size = slice.count * unit;
      end = slice.offset + size;
      for (std::uint64_t at = 0; at < size; at += kPiece) {
        const std::uint64_t hash = PieceHash(step.step, 2, file, piece,
                                             bytes.data() + slice.offset + at,
                                             std::min(kPiece, size - at));
        Require(hash == file.pieces.at(piece), path, "piece " + Str(piece));
        ++piece;
      }
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(slice.offset),
                  size,
                  version->bytes[slice.tensor].begin() +
                      static_cast<std::ptrdiff_t>(slice.begin * unit));
    }
  }
  for (std::size_t i = 0; i < step.tensors.size(); ++i) {
    if (step.tensors[i].tied_to != kNone) continue;
    Require(L61(l61_seed_, version->bytes[i]) == version->l61[i],
            StepPath(step.step) + "/anchor", "S of " + step.tensors[i].name);
  }
  version->step = step.step;
  version->manifest_hash = step.hash;
  version->digest = step.digest_after;
}

void PlainStore::ApplyDelta(const Step& step, Version* version) const {
  for (std::size_t f = 0; f < step.files.size(); ++f) {
    const File& file = step.files[f];
    const std::string path = StepPath(step.step) + "/delta-r" +
                             Digits(file.rank, 3) + "-" +
                             Digits(file.number, 3) + ".kds";
    std::uint64_t count = 0;
    std::uint64_t end = 64;
    for (const Step::Record& record : step.records) {
      if (record.file != f) continue;
      ++count;
      end = std::max(end, RoundUp(record.offset + record.bytes, 8));
    }
    const Bytes bytes = ReadDataFile(path, file, 1, step.step, 64, count);
    Require(Little(bytes, 40, 8) == end - 64, path, "payload_bytes");
    for (std::uint64_t at = 0; at < bytes.size(); at += kPiece) {
      const auto piece = static_cast<std::uint32_t>(at / kPiece);
      const std::uint64_t size =
          std::min<std::uint64_t>(kPiece, bytes.size() - at);
      Require(PieceHash(step.step, 1, file, piece, bytes.data() + at, size) ==
                  file.pieces.at(piece),
              path, "piece " + Str(piece));
    }
    CheckZero(path, bytes, end, bytes.size());
    for (const Step::Record& record : step.records) {
      if (record.file != f) continue;
      const Tensor& tensor = step.tensors[record.tensor];
      const std::string where = path + ": " + tensor.name;
      const auto from =
          bytes.begin() + static_cast<std::ptrdiff_t>(record.offset);
      const Bytes encoded(from,
                          from + static_cast<std::ptrdiff_t>(record.bytes));
      CheckZero(where, bytes, record.offset + record.bytes,
                RoundUp(record.offset + record.bytes, 8));
      const std::uint32_t element = ElementBytes(tensor.dtype);
      const auto changes =
          DecodeRecord(encoded, tensor.shape, element, record.begin,
                       record.begin + record.count);
      Require(changes.size() == record.nnz, where, "nnz");
      Require(L61OfChanges(l61_seed_, changes, element) == record.l61, where,
              "L of the record");
      Apply(changes, element, &version->bytes[record.tensor]);
    }
  }
  const std::string where = StepPath(step.step);
  for (const Step::State& state : step.states) {
    Require(version->l61[state.tensor] == state.before, where,
            "S before of " + step.tensors[state.tensor].name);
    version->l61[state.tensor] = state.after;
    if (step.tensors[state.tensor].tied_to != kNone) continue;
    Require(L61(l61_seed_, version->bytes[state.tensor]) == state.after, where,
            "S after of " + step.tensors[state.tensor].name);
  }
  Require(StateDigest(step.tensors, version->l61) == step.digest_after, where,
          "digest_after");
  if (step.metadata_changed) version->metadata = step.metadata;
  version->step = step.step;
  version->manifest_hash = step.hash;
  version->digest = step.digest_after;
}

Version PlainStore::Read(std::uint64_t step,
                         std::uint64_t newest_anchor) const {
  std::vector<Step> chain = {ReadStep(step)};
  while (chain.back().step > newest_anchor || !HasAnchor(chain.back().step)) {
    const Step& at = chain.back();
    Require(!at.root, StepPath(at.step), "a root without an anchor");
    Step base = ReadStep(at.base_step);
    Require(base.hash == at.base_hash, StepPath(at.step),
            "its base is another version");
    Require(base.digest_after == at.digest_before, StepPath(at.step),
            "digest_before");
    Require(base.table == at.table, StepPath(at.step), "table of the base");
    chain.push_back(std::move(base));
  }
  Version version;
  TakeAnchor(chain.back(), ReadAnchor(chain.back()), &version);
  for (std::size_t i = chain.size() - 1; i > 0; --i) {
    ApplyDelta(chain[i - 1], &version);
  }
  for (std::size_t i = 0; i < version.tensors.size(); ++i) {
    const std::uint32_t owner = version.tensors[i].tied_to;
    if (owner != kNone) version.bytes[i] = version.bytes[owner];
  }
  return version;
}

}  // namespace kedge_plain
