#ifndef KEDGE_TESTS_READER_ENGINE_MEMORY_H_
#define KEDGE_TESTS_READER_ENGINE_MEMORY_H_

// The memory of an inference engine that holds a model in some layout, and what
// tests of the reader ask of it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kedge/engine/device/device.h"
#include "kedge/format/tensor_table.h"
#include "kedge/reader/weight_set.h"
#include "kedge/tests/support/test_model.h"

namespace kedge {

enum class Layout {
  kWhole,       // one set, row-major
  kPadded,      // gaps between rows and between elements
  kTransposed,  // column-major
  kPacked,      // thirds of rows in another order; gate and up interleaved
  kRows,        // two sets, halves along the first dimension
  kColumns,     // two sets, halves along the last dimension
  kReplicas,    // a whole set and one that is cut in two
};
inline constexpr Layout kAllLayouts[] = {
    Layout::kWhole, Layout::kPadded,  Layout::kTransposed, Layout::kPacked,
    Layout::kRows,  Layout::kColumns, Layout::kReplicas};
std::string LayoutName(Layout layout);

// Where tests put weights unless they say otherwise: null, host memory; a
// CpuDevice that lives for ever if the environment's KEDGE_TEST_DEVICE is
// "cpu".
Device* DefaultTestDevice();

class EngineMemory {
 public:
  // `without` are tensors that this engine has no place for. The memory is that
  // of `device`, which outlives it; null: the host's.
  EngineMemory(const TensorTable& table, Layout layout,
               const std::vector<std::string>& without = {},
               Device* device = DefaultTestDevice());

  // A box of a tensor. Empty strides: row-major, contiguous.
  struct Part {
    std::string name;
    std::vector<std::uint64_t> begin;
    std::vector<std::uint64_t> extent;
    std::vector<std::int64_t> strides_bytes;
    // Its first element stands this many bytes after the part before it, whose
    // gaps it fills; 0: in memory of its own.
    std::uint64_t bytes_after_previous = 0;
  };
  // One set that holds these.
  EngineMemory(const TensorTable& table, const std::vector<Part>& parts,
               const std::string& set_name,
               Device* device = DefaultTestDevice());

  std::vector<const WeightSet*> sets() const;

  // Fills all memory, gaps included.
  void Fill(std::byte value);
  // Puts a model into every target.
  void Load(const ModelBytes& model);
  // Empty if every target holds `model` bit for bit and no byte outside of the
  // targets was written since Fill; else says where not. With a name: of the
  // targets, only those of that tensor.
  std::string Difference(const ModelBytes& model,
                         const std::string& only = "") const;
  // The address of an element of a tensor, in the first target that has it.
  // Memory that only the device can reach: in a copy; Push brings changes back.
  std::byte* At(const std::string& name, std::uint64_t element);
  void Push();
  // Likewise where the device has it, for comparisons.
  const std::byte* Address(const std::string& name, std::uint64_t element);
  // An element that the first target of a tensor with any has; nothing if none
  // has one.
  std::optional<std::uint64_t> SomeElement(const std::string& name) const;
  // The bytes of every target, element by element.
  std::vector<std::byte> Contents() const;

 private:
  struct Planned {
    int set = 0;
    TensorTarget target;
    std::uint64_t offset = 0;  // in arena_
  };
  // Calls visit(flat element index, arena offset) for each element of a target.
  template <typename Visit>
  static void ForEach(const Planned& planned, Visit visit);

  // Adds a box; `strides` empty means row-major and contiguous.
  void Plan(int set, const TensorSpec& spec, std::vector<std::uint64_t> begin,
            std::vector<std::uint64_t> extent,
            std::vector<std::int64_t> strides, std::uint64_t align);
  // Gives every planned target its memory, in sets of these names.
  void Place(const std::vector<std::string>& set_names);

  // Brings what memory holds into arena_.
  void Pull() const;

  Device* device_;
  std::uint64_t used_ = 64;
  DeviceMemory memory_;
  std::byte* arena_ = nullptr;  // memory_, or host_
  mutable std::vector<std::byte> host_;
  std::vector<bool> owned_;  // bytes of arena_ that targets hold
  std::byte fill_{0};
  std::vector<Planned> planned_;
  std::vector<std::unique_ptr<WeightSet>> sets_;
};

}  // namespace kedge

#endif  // KEDGE_TESTS_READER_ENGINE_MEMORY_H_
