#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kedge/format/fp8.h"
#include "kedge/format/status.h"
#include "kedge/writer/hook_impl.h"

namespace kedge {
namespace {

using hook::BytesText;
using hook::kCarries;
using hook::kMaxSlices;
using hook::kNoIndex;
using hook::kTrackedChunks;

}  // namespace

bool OptimizerHook::Impl::Describe(std::uint32_t parameter, std::uint64_t begin,
                                   std::uint64_t end,
                                   DeviceDelta::Slot* slot) const {
  slot->Clear();
  const auto* const weights =
      static_cast<const std::byte*>(options.parameters[parameter].data) + begin;
  bool fits = true;
  const auto add = [&](std::uint32_t p, const UnitRange& units,
                       const StridedUnits& source, bool kept) {
    StridedUnits new_units = source;
    new_units.base = slot->bytes + (source.base - weights);
    fits = delta->AddSlice(map->parts()[p].part.grid(), units, source,
                           new_units, {parts[p].tensor, p}, kept, slot);
    return fits;
  };
  map->ForEachRun(
      parameter, begin, end, weights,
      [&](std::uint32_t p, const UnitRange& units, const StridedUnits& source) {
        return parts[p].quantised != kNoIndex ||
               add(p, units, source, /*kept=*/true);
      });
  if (!fits || !has_quantised[parameter]) return fits;
  if (!DescribeQuantised(parameter, begin, end, slot)) return false;
  // What fp8 is made of is guarded, and does not travel itself.
  map->ForEachRun(
      parameter, begin, end, weights,
      [&](std::uint32_t p, const UnitRange& units, const StridedUnits& source) {
        return parts[p].quantised == kNoIndex ||
               add(p, units, source, /*kept=*/false);
      });
  return fits;
}

// The rows of blocks that bytes [begin, end) make whole: old and new are
// quantised, and values and scales are two slices of their own. What is left
// over waits in a carry.
bool OptimizerHook::Impl::DescribeQuantised(std::uint32_t parameter,
                                            std::uint64_t begin,
                                            std::uint64_t end,
                                            DeviceDelta::Slot* slot) const {
  const std::uint32_t carry = pending[parameter].carry;
  const auto* const weights =
      static_cast<const std::byte*>(options.parameters[parameter].data);
  std::uint64_t values_used = 0;
  std::uint64_t scales_used = 0;
  bool fits = true;
  map->ForEachRun(
      parameter, begin, end, weights + begin,
      [&](std::uint32_t p, const UnitRange& units, const StridedUnits&) {
        if (parts[p].quantised == kNoIndex) return true;
        const MappedPart& mapped = map->parts()[p];
        const QuantisedPart& part = quantised[parts[p].quantised];
        const std::uint64_t cols = part.cols;
        const std::uint64_t block_row = cols * kFp8BlockExtent;
        const std::uint64_t count = part.rows * cols;
        const std::uint64_t first = mapped.part.units().begin;
        const std::uint64_t from = units.begin - first;
        const std::uint64_t to = units.end - first;
        const std::uint64_t whole_begin = from / block_row * block_row;
        const std::uint64_t whole_end =
            to == count ? count : to / block_row * block_row;
        // Element `e` of the part, old and new.
        const auto at = [&](bool is_new, std::uint64_t e) {
          const std::uint64_t byte = mapped.begin + 2 * e;
          return is_new ? slot->bytes + (byte - begin) : weights + byte;
        };
        // Elements [e, e_end) of an open block. Without a carry the step has
        // failed.
        const auto carry_over = [&](DeviceDelta::Slot::DeviceCopy copies[2],
                                    std::uint64_t e, std::uint64_t e_end) {
          if (carry == kNoIndex) return;
          for (const bool is_new : {false, true}) {
            copies[is_new] = {CarryAt(carry, is_new) + 2 * (e % block_row),
                              at(is_new, e), 2 * (e_end - e)};
          }
        };
        if (whole_end <= whole_begin) {
          carry_over(slot->after, from, to);
          return true;
        }
        if (slot->quantise_count > 0 && (slot->scale_kind != part.scale_kind ||
                                         slot->floor != part.floor)) {
          fits = false;  // one kind of scale a chunk
          return false;
        }
        slot->scale_kind = part.scale_kind;
        slot->floor = part.floor;
        const std::uint64_t values = whole_end - whole_begin;
        const std::uint64_t block_rows =
            (values / cols + kFp8BlockExtent - 1) / kFp8BlockExtent;
        const std::uint64_t scales = block_rows * part.block_cols();
        if (values > fp8_values - values_used ||
            scales > fp8_scales - scales_used ||
            slot->quantise_count + 4 > kMaxSlices) {
          fits = false;
          return false;
        }
        std::byte* const values_at[2] = {
            delta->quantised_values(false) + values_used,
            delta->quantised_values(true) + values_used};
        float* const scales_at[2] = {
            delta->quantised_scales(false) + scales_used,
            delta->quantised_scales(true) + scales_used};
        const auto add_task = [&](std::uint64_t e, std::uint64_t e_end,
                                  const std::byte* source, bool is_new) {
          // A step that starts over says nothing of what was there before it,
          // and looks for NaN in what is new.
          if (rebased && !is_new) return;
          const std::uint64_t done = (e - whole_begin) / block_row;
          QuantiseTask task;
          task.source = source;
          task.source_row_stride_bytes = static_cast<std::int64_t>(2 * cols);
          task.rows = (e_end - e) / cols;
          task.cols = cols;
          task.values = values_at[is_new] + (e - whole_begin);
          task.scales = scales_at[is_new] + done * part.block_cols();
          task.first_block = slot->quantise_blocks;
          slot->quantise[slot->quantise_count] = task;
          slot->quantise_names[slot->quantise_count] = part.name.c_str();
          ++slot->quantise_count;
          slot->quantise_blocks += (task.rows + kFp8BlockExtent - 1) /
                                   kFp8BlockExtent * part.block_cols();
        };
        std::uint64_t rest = whole_begin;
        if (from > whole_begin) {
          // Its first rows came before, and wait in the carry.
          rest = std::min(whole_begin + block_row, count);
          carry_over(slot->before, from, rest);
          for (const bool is_new : {false, true}) {
            add_task(whole_begin, rest, CarryAt(carry, is_new), is_new);
          }
        }
        if (whole_end > rest) {
          for (const bool is_new : {false, true}) {
            add_task(rest, whole_end, at(is_new, rest), is_new);
          }
        }
        if (to > whole_end) carry_over(slot->after, whole_end, to);

        const auto add_slice = [&](const TileGrid& grid, const UnitRange& slice,
                                   const void* old_at, const void* new_at,
                                   std::uint32_t unit_bytes,
                                   DeviceDelta::Slice about) {
          StridedUnits source;
          source.base = static_cast<const std::byte*>(old_at);
          source.first_row = slice.begin / grid.cols;
          source.row_stride_bytes =
              static_cast<std::int64_t>(grid.cols * unit_bytes);
          source.col_stride_bytes = unit_bytes;
          source.unit_bytes = unit_bytes;
          StridedUnits new_units = source;
          new_units.base = static_cast<const std::byte*>(new_at);
          return delta->AddSlice(grid, slice, source, new_units, about,
                                 /*kept=*/true, slot);
        };
        const std::uint64_t shape[] = {mapped.part.grid().rows, cols};
        const std::uint64_t block_shape[] = {
            (shape[0] + kFp8BlockExtent - 1) / kFp8BlockExtent,
            part.block_cols()};
        const std::uint64_t first_block =
            (first + whole_begin) / block_row * part.block_cols();
        const auto sum =
            static_cast<std::uint32_t>(parts.size() + 2 * parts[p].quantised);
        fits = add_slice(MakeTileGrid(shape, 1),
                         {first + whole_begin, first + whole_end}, values_at[0],
                         values_at[1], 1, {part.values, sum}) &&
               add_slice(MakeTileGrid(block_shape, 1),
                         {first_block, first_block + scales}, scales_at[0],
                         scales_at[1], 4, {part.scales, sum + 1});
        // Aligned for whoever reads words.
        values_used =
            std::min(fp8_values, (values_used + values + 15) / 16 * 16);
        scales_used = std::min(fp8_scales, (scales_used + scales + 3) / 4 * 4);
        return fits;
      });
  return fits;
}

bool OptimizerHook::Impl::LeavesBlockOpen(std::uint32_t parameter,
                                          std::uint64_t byte) const {
  bool open = false;
  if (byte == 0) return false;
  const std::uint64_t begin = map->CutAtOrBelow(parameter, byte - 1);
  map->ForEachRun(
      parameter, begin, byte, spans[parameter].data + begin,
      [&](std::uint32_t p, const UnitRange& units, const StridedUnits&) {
        if (parts[p].quantised == kNoIndex) return true;
        const UnitRange all = map->parts()[p].part.units();
        const std::uint64_t cols = quantised[parts[p].quantised].cols;
        open = units.end != all.end &&
               (units.end - all.begin) % (cols * kFp8BlockExtent) != 0;
        return !open;
      });
  return open;
}

// Rows wait in a carry from a chunk that leaves a block open to the one that
// makes it whole.
absl::Status OptimizerHook::Impl::TakeCarry(std::uint32_t parameter) {
  if (pending[parameter].carry != kNoIndex) return absl::OkStatus();
  for (std::uint32_t i = 0; i < kCarries; ++i) {
    if (carry_used[i]) continue;
    carry_used[i] = true;
    pending[parameter].carry = i;
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "v", step, ": parameter \"", options.parameters[parameter].name,
      "\": more than ", kCarries,
      " parameters with fp8 tensors are written in part at the same time; "
      "write one after the other"));
}

// The trainer's copy, without the hook; waits for it.
absl::Status OptimizerHook::Impl::PlainCopy(std::uint32_t parameter,
                                            std::uint64_t begin,
                                            std::uint64_t bytes,
                                            const void* source,
                                            DeviceStream stream) {
  auto* const to =
      static_cast<std::byte*>(options.parameters[parameter].data) + begin;
  return WaitOut(device, stream, device->Copy(to, source, bytes, stream));
}

absl::StatusOr<std::uint64_t> OptimizerHook::Impl::UpdateChunk(
    std::uint32_t parameter, std::uint64_t begin, std::uint64_t end,
    const std::byte* source, DeviceStream stream, std::uint64_t jobs,
    Ticket* ticket) {
  auto* const weights =
      static_cast<std::byte*>(options.parameters[parameter].data) + begin;
  const auto slot_or = delta->WaitForSlot(end - begin, weights);
  if (!slot_or.ok()) {
    FailStep(slot_or.status());
    KEDGE_RETURN_IF_ERROR(
        PlainCopy(parameter, begin, end - begin, source, stream));
    return end;
  }
  DeviceDelta::Slot* const slot = *slot_or;
  if (has_quantised[parameter]) FailStep(TakeCarry(parameter));
  while (!Describe(parameter, begin, end, slot)) {
    const std::uint64_t half =
        map->CutAtOrBelow(parameter, begin + (end - begin) / 2);
    KEDGE_CHECK(half > begin);
    end = half;
  }
  const std::uint64_t bytes = end - begin;
  slot->update = {weights, slot->bytes, bytes};
  const absl::Status filled = [&]() -> absl::Status {
    // The trainer's stream copies to the device and does nothing else, chunk
    // after chunk at the rate of the bus. The diff, then the copy over the old
    // bytes, come after it on a stream of the hook's own.
    KEDGE_RETURN_IF_ERROR(delta->Upload(*slot, stream));
    KEDGE_RETURN_IF_ERROR(device->Copy(slot->bytes, source, bytes, stream));
    return device->Record(slot->arrived, stream);
  }();
  absl::Status copied;
  if (!filled.ok()) {
    // The trainer goes on with its new weights, whatever becomes of the delta.
    WaitOut(device, stream).IgnoreError();
    copied = PlainCopy(parameter, begin, bytes, source, stream);
    FailStep(filled);
  }
  if (has_quantised[parameter]) {
    Pending& state_of = pending[parameter];
    state_of.next = end;
    if (state_of.carry != kNoIndex && !LeavesBlockOpen(parameter, end)) {
      carry_used[state_of.carry] = false;
      state_of.carry = kNoIndex;
    }
  }
  ticket->number = delta->Submit(filled.ok(), step_status);
  jobs_after[ticket->number % kTrackedChunks] = jobs;
  chunks = ticket->number;
  KEDGE_RETURN_IF_ERROR(copied);
  return end;
}

// Queues the writes of a range into the anchor; returns how many were queued.
std::uint64_t OptimizerHook::Impl::FeedAnchor(std::uint32_t parameter,
                                              std::uint64_t begin,
                                              std::uint64_t end,
                                              const std::byte* source) {
  std::uint64_t count = 0;
  map->ForEachRun(
      parameter, begin, end, source,
      [&](std::uint32_t p, UnitRange units, const StridedUnits& strided) {
        if (parts[p].quantised != kNoIndex) return true;
        while (units.begin < units.end) {
          AnchorFeed::Job job;
          job.tensor = parts[p].tensor;
          job.units = anchor->writer()->FirstPieceOf(parts[p].tensor, units);
          job.grid = &map->parts()[p].part.grid();
          job.source = strided;
          count = feed->Push(job);
          units.begin = job.units.end;
        }
        return true;
      });
  return count;
}

absl::Status OptimizerHook::Impl::CheckNotWritten(std::uint32_t parameter,
                                                  std::uint64_t begin,
                                                  std::uint64_t end) {
  auto& ranges = written[parameter];
  auto after = std::upper_bound(
      ranges.begin(), ranges.end(), begin,
      [](std::uint64_t at, const Written& range) { return at < range.begin; });
  const Written* twice = nullptr;
  if (after != ranges.end() && after->begin < end) twice = &*after;
  if (after != ranges.begin() && std::prev(after)->end > begin) {
    twice = &*std::prev(after);
  }
  if (twice == nullptr) {
    ranges.insert(after, {begin, end});
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "v", step, ": parameter \"", options.parameters[parameter].name,
      "\": bytes ", BytesText(begin, end), " were written when bytes ",
      BytesText(twice->begin, twice->end),
      " had been written already; a step writes each byte once: this one "
      "cannot be published, begin the next with an anchor"));
}

absl::StatusOr<OptimizerHook::Ticket> OptimizerHook::OnUpdate(
    std::uint32_t parameter, std::uint64_t begin, std::uint64_t bytes,
    const void* pinned_source, DeviceStream h2d_stream) {
  Impl& impl = *impl_;
  if (parameter >= impl.options.parameters.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter: expected one of ",
                     impl.options.parameters.size(), ", found ", parameter));
  }
  const HookedParameter& target = impl.options.parameters[parameter];
  if (begin > target.bytes || bytes > target.bytes - begin ||
      (bytes > 0 && pinned_source == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter \"", target.name, "\": expected a range of its ",
        target.bytes, " bytes, found ", bytes, " bytes from ", begin,
        pinned_source == nullptr ? ", from a null source" : ""));
  }
  if (bytes == 0) return Ticket{};
  const std::uint64_t end = begin + bytes;
  for (const std::uint64_t cut : {begin, end}) {
    if (impl.map->CutAtOrBelow(parameter, cut) == cut) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter \"", target.name, "\": byte ", cut,
                     " lies inside an element; give whole elements"));
  }

  absl::Status refused;
  if (impl.state != Impl::State::kOpen) {
    refused = absl::FailedPreconditionError(absl::StrCat(
        "parameter \"", target.name, "\": bytes ", BytesText(begin, end),
        " were written outside of a step: call BeginStep first and EndStep "
        "after the last range"));
  } else if (target.frozen) {
    refused = absl::FailedPreconditionError(
        absl::StrCat("v", impl.step, ": parameter \"", target.name,
                     "\" is declared frozen, and bytes ", BytesText(begin, end),
                     " of it were written"));
  } else {
    refused = impl.CheckNotWritten(parameter, begin, end);
    if (refused.ok() && impl.has_quantised[parameter] &&
        impl.pending[parameter].next != begin) {
      refused = absl::FailedPreconditionError(absl::StrCat(
          "v", impl.step, ": parameter \"", target.name,
          "\" has fp8 tensors and is written in ascending order: expected the "
          "range from byte ",
          impl.pending[parameter].next, ", found ", BytesText(begin, end)));
    }
  }
  if (!refused.ok()) {
    if (impl.state != Impl::State::kIdle) {
      ++impl.updates;
      impl.FailStep(refused);
    }
    // An earlier copy to the same bytes must not come after this one.
    KEDGE_RETURN_IF_ERROR(impl.delta->WaitUntilIdle());
    KEDGE_RETURN_IF_ERROR(
        impl.PlainCopy(parameter, begin, bytes, pinned_source, h2d_stream));
    return refused;
  }

  ++impl.updates;
  const auto* source = static_cast<const std::byte*>(pinned_source);
  Ticket ticket;
  std::uint64_t jobs = 0;
  if (impl.feeding) jobs = impl.FeedAnchor(parameter, begin, end, source);
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t chunk_end =
        end - at <= impl.options.chunk_bytes
            ? end
            : impl.map->CutAtOrBelow(parameter, at + impl.options.chunk_bytes);
    const auto done =
        impl.UpdateChunk(parameter, at, chunk_end, source + (at - begin),
                         h2d_stream, jobs, &ticket);
    if (!done.ok()) {
      impl.FailStep(done.status());
      // A trainer that hears of a failure may put its weights right at once:
      // nothing of the hook's own moves any more.
      impl.delta->WaitUntilIdle().IgnoreError();
      // There is no ticket: the source is free when this returns.
      impl.feed->WaitFor(jobs).IgnoreError();
      impl.delta->WaitFor(ticket.number).IgnoreError();
      return done.status();
    }
    at = *done;
  }
  // Nobody waits for it when there is no chunk to wait for.
  if (ticket.number == 0) KEDGE_RETURN_IF_ERROR(impl.feed->WaitFor(jobs));
  return ticket;
}

absl::StatusOr<bool> OptimizerHook::HasPassed(Ticket ticket) const {
  if (ticket.number == 0) return true;
  const Impl& impl = *impl_;
  if (!impl.feed->HasPassed(impl.JobsOf(ticket.number))) return false;
  return impl.delta->HasPassed(ticket.number);
}

absl::Status OptimizerHook::WaitFor(Ticket ticket) const {
  if (ticket.number == 0) return absl::OkStatus();
  const Impl& impl = *impl_;
  KEDGE_RETURN_IF_ERROR(impl.feed->WaitFor(impl.JobsOf(ticket.number)));
  return impl.delta->WaitFor(ticket.number);
}

}  // namespace kedge
