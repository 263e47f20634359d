#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kedge/engine/io/lease.h"
#include "kedge/engine/io/store.h"
#include "kedge/format/status.h"
#include "kedge/tools/commands.h"
#include "kedge/tools/console.h"

namespace kedge {
namespace {

struct Row {
  std::uint64_t step = 0;
  absl::Status why_invalid;
  const char* state = "valid";  // fenced, fork, unpublished, damaged
  // The rest of a valid step only.
  VersionId id;
  VersionId base;
  StepKind kind = StepKind::kDelta;
  std::uint32_t epoch = 0;
  std::uint64_t nnz = 0;
  std::uint64_t units = 0;
  std::uint64_t bytes = 0;
  std::int64_t unix_seconds = 0;
  std::optional<std::uint64_t> anchor_bytes;
  absl::Status why_no_anchor;  // one is there, and is damaged
};

std::uint64_t BytesOf(const std::vector<DataFile>& files,
                      std::uint64_t manifest_bytes) {
  std::uint64_t bytes = manifest_bytes + kCommitBytes;
  for (const DataFile& file : files) bytes += file.bytes;
  return bytes;
}

Row RowOf(const Store& store, std::uint64_t step) {
  Row row;
  row.step = step;
  const auto read = store.ReadStep(step);
  if (!read.ok()) {
    row.why_invalid = read.status();
    row.state = absl::IsFailedPrecondition(read.status()) ? "fenced"
                : absl::IsNotFound(read.status())         ? "unpublished"
                : absl::IsUnimplemented(read.status())    ? "newer format"
                                                          : "damaged";
    return row;
  }
  const PublishedStep& published = **read;
  const StepManifest& manifest = published.manifest;
  row.id = published.id;
  row.base = manifest.base;
  row.kind = manifest.kind;
  row.epoch = manifest.epoch;
  for (const DeltaRecord& record : manifest.records) row.nnz += record.nnz;
  row.units = UnitCount(*published.table);
  row.bytes = BytesOf(manifest.files, published.manifest_bytes);
  if (const auto info =
          store.fs()->Stat(JoinPath(published.path, kCommitFileName));
      info.ok()) {
    row.unix_seconds = info->modified_ns / 1'000'000'000;
  }
  const auto anchor = store.ReadAnchor(published.id);
  if (anchor.ok()) {
    row.anchor_bytes =
        BytesOf((*anchor)->manifest.files, (*anchor)->manifest_bytes);
  } else if (!absl::IsNotFound(anchor.status())) {
    row.why_no_anchor = anchor.status();
  }
  return row;
}

std::string Note(const Row& row) {
  if (!row.why_invalid.ok()) {
    return absl::StrCat("not valid: ", row.why_invalid.message());
  }
  if (!row.why_no_anchor.ok()) {
    return absl::StrCat("anchor not valid: ", row.why_no_anchor.message());
  }
  return "";
}

double BitsPerChange(const Row& row) {
  return 8.0 * static_cast<double>(row.bytes) / static_cast<double>(row.nnz);
}

Json JsonOf(const Row& row) {
  Json json;
  json["step"] = row.step;
  json["valid"] = row.why_invalid.ok();
  json["state"] = row.state;
  if (!row.why_invalid.ok()) {
    json["why"] = std::string(row.why_invalid.message());
    return json;
  }
  json["manifest_hash"] = ToHex(row.id.manifest_hash);
  json["kind"] = row.kind == StepKind::kRoot ? "root" : "delta";
  json["base_step"] = nullptr;
  json["base_manifest_hash"] = nullptr;
  if (!row.base.manifest_hash.IsZero()) {
    json["base_step"] = row.base.step;
    json["base_manifest_hash"] = ToHex(row.base.manifest_hash);
  }
  json["epoch"] = row.epoch;
  json["nnz"] = row.nnz;
  json["units"] = row.units;
  json["bytes"] = row.bytes;
  json["bits_per_changed_element"] = nullptr;
  if (row.nnz > 0) json["bits_per_changed_element"] = BitsPerChange(row);
  json["anchor_bytes"] = nullptr;
  if (row.anchor_bytes) json["anchor_bytes"] = *row.anchor_bytes;
  json["anchor_error"] = nullptr;
  if (!row.why_no_anchor.ok()) {
    json["anchor_error"] = std::string(row.why_no_anchor.message());
  }
  json["committed_unix_seconds"] = row.unix_seconds;
  return json;
}

// Versions that follow from each other without a gap, and the anchors among
// them: each version from the first of these on can be joined.
struct ChainRow {
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  std::uint64_t versions = 0;
  std::vector<std::uint64_t> anchors;
  VersionId last_id;
};

std::vector<ChainRow> ChainsOf(const std::vector<Row>& rows) {
  std::vector<ChainRow> chains;
  for (const Row& row : rows) {
    if (!row.why_invalid.ok()) continue;
    if (row.kind == StepKind::kRoot || chains.empty() ||
        chains.back().last_id != row.base) {
      chains.emplace_back();
      chains.back().first = row.step;
    }
    ChainRow& chain = chains.back();
    chain.last = row.step;
    chain.last_id = row.id;
    ++chain.versions;
    if (row.anchor_bytes) chain.anchors.push_back(row.step);
  }
  return chains;
}

// The last few of a list that may be long.
std::string Tail(std::vector<std::string> texts) {
  constexpr std::size_t kMost = 10;
  std::string before;
  if (texts.size() > kMost) {
    before = absl::StrCat(HumanCount(texts.size() - kMost), " older, ");
    texts.erase(texts.begin(), texts.end() - kMost);
  }
  return before + absl::StrJoin(texts, ", ");
}

std::string ChainText(const ChainRow& chain) {
  std::string text =
      chain.first == chain.last
          ? absl::StrCat("chain: v", chain.first)
          : absl::StrCat("chain: v", chain.first, " to v", chain.last, ", ",
                         HumanCount(chain.versions), " versions");
  if (!chain.anchors.empty()) {
    std::vector<std::string> anchors;
    for (const std::uint64_t step : chain.anchors) {
      anchors.push_back(absl::StrCat("v", step));
    }
    const char* const noun = anchors.size() == 1 ? "anchor " : "anchors ";
    return absl::StrCat(text, ", to join from ", noun, Tail(std::move(anchors)),
                        "\n");
  }
  return absl::StrCat(text,
                      chain.first == 0
                          ? ", for engines that boot with v0\n"
                          : ", no anchor: for readers that hold a version of "
                            "it, or the one before\n");
}

// A reader, what it holds, and whether gc heeds it.
struct LeaseRow {
  LeaseEntry entry;
  LeaseState state = LeaseState::kLive;
  std::int64_t age_seconds = 0;
  std::string note;
};

// Ages are by this host's clock: `ls` writes nothing, not even to ask the
// storage for its time.
absl::StatusOr<std::vector<LeaseRow>> LeasesOf(const Store& store,
                                               const std::vector<Row>& rows,
                                               std::chrono::seconds lease_ttl) {
  KEDGE_ASSIGN_OR_RETURN(
      LeaseListing listing,
      ReadLeases(*store.fs(), store.path(), store.info().run));
  const std::int64_t now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::system_clock::now().time_since_epoch())
          .count();
  std::vector<LeaseRow> leases;
  for (LeaseEntry& entry : listing.leases) {
    LeaseRow lease;
    lease.state = StateOfLease(entry, now, lease_ttl);
    lease.age_seconds = now / 1'000'000'000 - entry.modified_ns / 1'000'000'000;
    lease.note = std::string(entry.status.message());
    if (entry.info && entry.info->held) {
      const VersionId& held = *entry.info->held;
      for (const Row& row : rows) {
        if (row.step == held.step && row.why_invalid.ok() && row.id != held) {
          lease.note = absl::StrCat("superseded: holds another v", held.step,
                                    " than the one here");
        }
      }
      if (!rows.empty() && held.step > rows.back().step) {
        lease.note = absl::StrCat("superseded: there is no v", held.step);
      }
    }
    lease.entry = std::move(entry);
    leases.push_back(std::move(lease));
  }
  return leases;
}

Json JsonOf(const LeaseRow& lease) {
  Json json;
  json["reader"] = lease.entry.name;
  json["state"] = std::string(LeaseStateName(lease.state));
  json["age_seconds"] = lease.age_seconds;
  json["oldest_step"] = nullptr;
  json["held_step"] = nullptr;
  json["held_manifest_hash"] = nullptr;
  json["counter"] = nullptr;
  if (lease.entry.info) {
    const LeaseInfo& info = *lease.entry.info;
    json["oldest_step"] = info.oldest_step;
    if (info.held) {
      json["held_step"] = info.held->step;
      json["held_manifest_hash"] = ToHex(info.held->manifest_hash);
    }
    json["counter"] = info.counter;
  }
  json["note"] = lease.note;
  return json;
}

}  // namespace

absl::StatusOr<int> Run(const LsCommand& command) {
  KEDGE_ASSIGN_OR_RETURN(const auto store,
                         Store::Open(PosixFileSystem(), command.store));
  KEDGE_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> steps,
                         store->ListSteps());
  std::vector<Row> rows;
  std::map<std::uint64_t, VersionId> valid;
  for (const std::uint64_t step : steps) {
    Row row = RowOf(*store, step);
    if (row.why_invalid.ok()) {
      // A delta on a version that is not the one here leads nowhere.
      const auto base = valid.find(row.base.step);
      if (row.kind == StepKind::kDelta && base != valid.end() &&
          base->second != row.base) {
        row.state = "fork";
        row.why_invalid = DataLoss(
            {.where = store->StepPath(step),
             .what = "base",
             .expected = ToString(base->second),
             .found = ToString(row.base),
             .advice =
                 "it was published on another version; run `kedge fsck`"});
      } else {
        valid.emplace(step, row.id);
      }
    }
    rows.push_back(std::move(row));
  }
  const absl::StatusOr<Head> head = store->ReadHead();
  // What is damaged elsewhere must not hide the versions.
  const auto epochs = store->ReadEpochs();
  const auto leases =
      LeasesOf(*store, rows, std::chrono::seconds(command.lease_ttl_seconds));
  const std::vector<ChainRow> chains = ChainsOf(rows);

  if (command.json) {
    Json json;
    json["command"] = "ls";
    json["store"] = command.store;
    json["run_id"] = ToHex(store->info().run);
    json["head"] = nullptr;
    json["head_error"] = nullptr;
    if (head.ok()) {
      json["head"] = {{"step", head->step},
                      {"manifest_hash", ToHex(head->manifest_hash)},
                      {"epoch", head->epoch}};
    } else {
      json["head_error"] = std::string(head.status().message());
    }
    json["steps"] = Json::array();
    for (const Row& row : rows) json["steps"].push_back(JsonOf(row));
    json["chains"] = Json::array();
    for (const ChainRow& chain : chains) {
      json["chains"].push_back({{"first", chain.first},
                                {"last", chain.last},
                                {"versions", chain.versions},
                                {"anchors", chain.anchors}});
    }
    json["epochs"] = Json::array();
    json["epochs_error"] = nullptr;
    if (epochs.ok()) {
      for (const EpochInfo& epoch : *epochs) {
        json["epochs"].push_back(
            {{"epoch", epoch.epoch},
             {"resume_step", epoch.resume_step},
             {"resume_manifest_hash", ToHex(epoch.resume_manifest_hash)}});
      }
    } else {
      json["epochs_error"] = std::string(epochs.status().message());
    }
    json["leases"] = Json::array();
    json["leases_error"] = nullptr;
    if (leases.ok()) {
      for (const LeaseRow& lease : *leases) {
        json["leases"].push_back(JsonOf(lease));
      }
    } else {
      json["leases_error"] = std::string(leases.status().message());
    }
    KEDGE_RETURN_IF_ERROR(PrintJson(json));
    return kExitOk;
  }

  using Align = TextTable::Align;
  TextTable table({{"STEP", Align::kRight},
                   {"KIND"},
                   {"BASE", Align::kRight},
                   {"EPOCH", Align::kRight},
                   {"CHANGED", Align::kRight},
                   {"DENSITY", Align::kRight},
                   {"BYTES", Align::kRight},
                   {"BITS/CHANGE", Align::kRight},
                   {"ANCHOR", Align::kRight},
                   {"COMMITTED"},
                   {"NOTE"}});
  for (const Row& row : rows) {
    const std::string step = absl::StrCat("v", row.step);
    if (!row.why_invalid.ok()) {
      table.Add({step, "-", "-", "-", "-", "-", "-", "-", "-", "-", Note(row)});
      continue;
    }
    const bool delta = row.kind == StepKind::kDelta;
    table.Add({step, delta ? "delta" : "root",
               row.base.manifest_hash.IsZero()
                   ? "-"
                   : absl::StrCat("v", row.base.step),
               absl::StrCat(row.epoch), delta ? HumanCount(row.nnz) : "-",
               delta ? Percent(static_cast<double>(row.nnz),
                               static_cast<double>(row.units))
                     : "-",
               HumanBytes(row.bytes),
               row.nnz > 0 ? absl::StrFormat("%.2f", BitsPerChange(row)) : "-",
               row.anchor_bytes ? HumanBytes(*row.anchor_bytes) : "-",
               UtcTime(row.unix_seconds), Note(row)});
  }
  const std::string text = absl::StrCat(
      command.store, ": run ", ToHex(store->info().run), "\nHEAD: ",
      head.ok()
          ? absl::StrCat(ToString(VersionId{head->step, head->manifest_hash}),
                         ", epoch ", head->epoch)
          : std::string(head.status().message()),
      "\n");
  std::string below;
  for (const ChainRow& chain : chains) {
    below += ChainText(chain);
  }
  if (epochs.ok()) {
    std::vector<std::string> texts;
    for (const EpochInfo& epoch : *epochs) {
      texts.push_back(
          absl::StrCat(epoch.epoch, " from v", epoch.resume_step, " on"));
    }
    absl::StrAppend(&below,
                    "epochs: ", texts.empty() ? "none" : Tail(std::move(texts)),
                    "\n");
  } else {
    absl::StrAppend(&below, "epochs: ", epochs.status().message(), "\n");
  }
  std::string lease_text;
  if (!leases.ok()) {
    lease_text =
        Printable(absl::StrCat("leases: ", leases.status().message(), "\n"));
  } else if (leases->empty()) {
    lease_text = "leases: none\n";
  } else {
    TextTable readers({{"READER"},
                       {"HOLDS", Align::kRight},
                       {"NEEDS FROM", Align::kRight},
                       {"AGE", Align::kRight},
                       {"LEASE"},
                       {"NOTE"}});
    for (const LeaseRow& lease : *leases) {
      const auto& info = lease.entry.info;
      readers.Add(
          {lease.entry.name,
           info && info->held ? absl::StrCat("v", info->held->step) : "-",
           info ? absl::StrCat("v", info->oldest_step) : "-",
           absl::StrCat(lease.age_seconds, " s"),
           std::string(LeaseStateName(lease.state)), lease.note});
    }
    lease_text = readers.Text();
  }
  KEDGE_RETURN_IF_ERROR(
      Print(Printable(text) + table.Text() + Printable(below) + lease_text));
  return kExitOk;
}

}  // namespace kedge
