#include "kedge/writer/table_agreement.h"

#include <utility>
#include <vector>

#include "kedge/format/status.h"
#include "kedge/writer/rank_group.h"
#include "kedge/writer/rank_parts.h"

namespace kedge {

absl::StatusOr<TensorTable> AgreeOnTable(Coordinator* coordinator,
                                         std::span<const TrainerTensor> tensors,
                                         const absl::Status& given) {
  const RankGroup group(coordinator);
  absl::Status sound = given;
  if (sound.ok()) sound = CheckTensors(tensors);
  if (group.alone()) {
    KEDGE_RETURN_IF_ERROR(given);
    // A table says more of what is wrong with names and shapes.
    KEDGE_ASSIGN_OR_RETURN(TensorTable table, MakeTable(tensors));
    KEDGE_RETURN_IF_ERROR(sound);
    return table;
  }
  RankGroup::Piece mine = std::vector<std::byte>();
  if (sound.ok()) {
    mine = SerializeDeclared(Declare(tensors));
  } else {
    mine = sound;
  }
  const Verdict verdict = group.Agree(
      "tensor tables", mine,
      [](std::span<const std::vector<std::byte>> pieces) -> Verdict {
        std::vector<std::vector<DeclaredTensor>> declared;
        for (std::uint32_t rank = 0; rank < pieces.size(); ++rank) {
          auto one = ParseDeclared(
              RankName(rank, static_cast<std::uint32_t>(pieces.size())),
              pieces[rank]);
          if (!one.ok()) return {one.status(), {}};
          declared.push_back(*std::move(one));
        }
        const auto table = UniteTables(declared);
        if (!table.ok()) return {table.status(), {}};
        return {absl::OkStatus(),
                {table->bytes().begin(), table->bytes().end()}};
      });
  KEDGE_RETURN_IF_ERROR(verdict.status);
  return TensorTable::Parse("tensor table of all ranks", verdict.payload);
}

absl::Status AgreeThatAllCould(Coordinator* coordinator, absl::string_view what,
                               const absl::Status& mine) {
  const RankGroup group(coordinator);
  if (group.alone()) return mine;
  RankGroup::Piece piece = std::vector<std::byte>();
  if (!mine.ok()) piece = mine;
  return group
      .Agree(what, piece,
             [](std::span<const std::vector<std::byte>>) -> Verdict {
               return {absl::OkStatus(), {}};
             })
      .status;
}

MemorySource::Others OthersOf(Coordinator* coordinator) {
  return RankGroup(coordinator).alone() ? MemorySource::Others::kNone
                                        : MemorySource::Others::kHoldTheRest;
}

}  // namespace kedge
