/* kedge from C: a "trainer" publishes a few steps out of its own buffers, and
 * an "inference engine", another process, follows them into buffers that are
 * laid out in its own way. For each version the engine reports a hash of its
 * weights, which must be that of the trainer's.
 *
 *   cc -std=c11 main.c $(pkg-config --cflags --libs kedge) -o kedge_c
 *   ./kedge_c STORE        (a path that is not there)
 */

#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kedge/capi/kedge.h"

enum {
  kSteps = 6,
  kAnchorEvery = 3,
  kVocabulary = 512,
  kWidth = 192,
  kHidden = 320
};

/* The model as checkpoints have it; bf16 tensors are their bits. */
struct weights {
  uint16_t embed[kVocabulary * kWidth];
  uint16_t gate[kHidden * kWidth];
  uint16_t up[kHidden * kWidth];
  float norm[kWidth];
};

static const uint64_t kEmbedShape[] = {kVocabulary, kWidth};
static const uint64_t kProjectionShape[] = {kHidden, kWidth};
static const uint64_t kNormShape[] = {kWidth};

/* 1 if `status` is OK; else says why not and gives the error back. */
static int Succeeded(kedge_status status, kedge_error* error,
                     const char* what) {
  if (status == KEDGE_OK) return 1;
  fprintf(stderr, "%s: %s: %s\n", what, kedge_status_name(status),
          kedge_error_message(error));
  kedge_error_free(error);
  return 0;
}

static uint64_t Hash(uint64_t hash, const void* data, size_t bytes) {
  const unsigned char* at = data;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 0x100000001b3u;
  return hash;
}

/* ----------------------------------------------------------------- trainer */

static uint64_t Random(uint64_t* state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

/* One step of what would be an optimizer: about 1 % of the bits move a little,
 * and all of the norm does. */
static void Train(struct weights* weights, uint64_t* random) {
  uint16_t* const matrices[] = {weights->embed, weights->gate, weights->up};
  const size_t sizes[] = {kVocabulary * kWidth, kHidden * kWidth,
                          kHidden * kWidth};
  for (int m = 0; m < 3; ++m) {
    for (size_t n = 0; n < sizes[m] / 100; ++n) {
      const uint64_t bits = Random(random);
      uint16_t* const weight = &matrices[m][(bits >> 8) % sizes[m]];
      *weight = (uint16_t)(*weight + (bits % 2 == 0 ? 1 : -1));
    }
  }
  for (size_t i = 0; i < kWidth; ++i) weights->norm[i] *= 1.0009765625f;
}

static uint64_t HashOfTrainer(const struct weights* weights) {
  uint64_t hash = 0xcbf29ce484222325u;
  hash = Hash(hash, weights->embed, sizeof(weights->embed));
  hash = Hash(hash, weights->gate, sizeof(weights->gate));
  hash = Hash(hash, weights->up, sizeof(weights->up));
  return Hash(hash, weights->norm, sizeof(weights->norm));
}

/* What the engine says about each version that it holds. */
struct report {
  kedge_version_id version;
  uint64_t hash;
};

/* Publishes every step; fills versions[step] and hashes[step]. */
static int Publish(kedge_writer* writer, struct weights* weights,
                   uint64_t* random, struct report* reports) {
  for (uint64_t step = 1; step <= kSteps; ++step) {
    Train(weights, random);
    const kedge_metadata metadata[] = {{"example", "c"}};
    const kedge_publish_options options = {.struct_size = sizeof(options),
                                           .anchor = step % kAnchorEvery == 0,
                                           .replace_metadata = 1,
                                           .metadata = metadata,
                                           .metadata_count = 1};
    kedge_publish_result result = {.struct_size = sizeof(result)};
    kedge_error* error = NULL;
    const kedge_status status =
        kedge_writer_publish(writer, step, &options, &result, &error);
    if (!Succeeded(status, error, "publish")) return 0;
    for (size_t i = 0; i < result.warning_count; ++i) {
      fprintf(stderr, "publish: warning: %s\n", result.warnings[i]);
    }
    if (result.anchor_status != KEDGE_OK) {
      fprintf(stderr, "anchor: %s\n", result.anchor_message);
    }
    reports[step].version = result.version;
    reports[step].hash = HashOfTrainer(weights);
    printf("trainer: v%" PRIu64 ": %" PRIu64 " changes in %" PRIu64
           " bytes%s\n",
           step, result.nnz, result.bytes,
           result.anchor_bytes != 0 ? ", and an anchor" : "");
  }
  return 1;
}

/* Creates the store, says so through `ready`, publishes. */
static int RunTrainer(const char* store, int ready, struct report* reports) {
  struct weights* const weights = malloc(sizeof(*weights));
  if (weights == NULL) return 0;
  uint64_t random = 20240229;
  for (size_t i = 0; i < kVocabulary * kWidth; ++i) {
    weights->embed[i] = (uint16_t)(0x3c00 + Random(&random) % 0x400);
  }
  for (size_t i = 0; i < kHidden * kWidth; ++i) {
    weights->gate[i] = (uint16_t)(0x3c00 + Random(&random) % 0x400);
    weights->up[i] = (uint16_t)(0xbc00 + Random(&random) % 0x400);
  }
  for (size_t i = 0; i < kWidth; ++i) weights->norm[i] = 1.0f;

  const kedge_tensor tensors[] = {{.struct_size = sizeof(kedge_tensor),
                                   .name = "embed.weight",
                                   .dtype = KEDGE_BF16,
                                   .dimensions = 2,
                                   .shape = kEmbedShape,
                                   .data = weights->embed},
                                  {.struct_size = sizeof(kedge_tensor),
                                   .name = "mlp.gate.weight",
                                   .dtype = KEDGE_BF16,
                                   .dimensions = 2,
                                   .shape = kProjectionShape,
                                   .data = weights->gate},
                                  {.struct_size = sizeof(kedge_tensor),
                                   .name = "mlp.up.weight",
                                   .dtype = KEDGE_BF16,
                                   .dimensions = 2,
                                   .shape = kProjectionShape,
                                   .data = weights->up},
                                  {.struct_size = sizeof(kedge_tensor),
                                   .name = "norm.weight",
                                   .dtype = KEDGE_F32,
                                   .dimensions = 1,
                                   .shape = kNormShape,
                                   .data = weights->norm}};
  const kedge_writer_options options = {.struct_size = sizeof(options),
                                        .store_path = store};
  kedge_writer* writer = NULL;
  kedge_error* error = NULL;
  int good = Succeeded(kedge_writer_create(&options, NULL, tensors,
                                           sizeof(tensors) / sizeof(tensors[0]),
                                           &writer, &error),
                       error, "create");
  if (good) {
    reports[0].hash = HashOfTrainer(weights);
    good = Succeeded(kedge_writer_held(writer, &reports[0].version, &error),
                     error, "held");
  }
  good = good && write(ready, "r", 1) == 1;
  good = good && Publish(writer, weights, &random, reports);
  kedge_writer_free(writer);
  free(weights);
  return good;
}

/* ------------------------------------------------------------------ engine */

/* As this engine wants its weights: gate and up interleaved, row by row. */
struct engine {
  uint16_t embed[kVocabulary * kWidth];
  uint16_t gate_up[kHidden][2][kWidth];
  float norm[kWidth];
  int paused; /* how often serving stopped, and went on */
  int committed;
};

static kedge_status Pause(void* user) {
  struct engine* const engine = user;
  ++engine->paused;
  return KEDGE_OK;
}

static void Commit(void* user, const kedge_version_id* version) {
  struct engine* const engine = user;
  ++engine->committed;
  printf("engine:  v%" PRIu64 " is held\n", version->step);
}

static int Report(const struct engine* engine, const kedge_version_id* version,
                  int to) {
  struct report report;
  memset(&report, 0, sizeof(report));
  report.version = *version;
  report.hash = 0xcbf29ce484222325u;
  report.hash = Hash(report.hash, engine->embed, sizeof(engine->embed));
  for (int part = 0; part < 2; ++part) {
    for (int row = 0; row < kHidden; ++row) {
      report.hash = Hash(report.hash, engine->gate_up[row][part],
                         sizeof(engine->gate_up[row][part]));
    }
  }
  report.hash = Hash(report.hash, engine->norm, sizeof(engine->norm));
  return write(to, &report, sizeof(report)) == (ssize_t)sizeof(report);
}

/* Joins, then follows every version up to the last one. */
static int Follow(kedge_reader* reader, const struct engine* engine,
                  int reports) {
  kedge_update_result result = {.struct_size = sizeof(result)};
  kedge_error* error = NULL;
  if (!Succeeded(kedge_reader_join(reader, &result, &error), error, "join")) {
    return 0;
  }
  if (!Report(engine, &result.version, reports)) return 0;
  while (result.version.step < kSteps) {
    const kedge_status status =
        kedge_reader_wait_for_update(reader, 20000, &result, &error);
    if (!Succeeded(status, error, "update")) return 0;
    if (!Report(engine, &result.version, reports)) return 0;
  }
  return engine->paused == engine->committed &&
         kedge_reader_get_state(reader) == KEDGE_READER_READY;
}

static int RunEngine(const char* store, int ready, int reports) {
  char byte = 0;
  if (read(ready, &byte, 1) != 1) return 0; /* the trainer has failed */
  struct engine* const engine = calloc(1, sizeof(*engine));
  if (engine == NULL) return 0;

  const int64_t packed[] = {2 * kWidth * sizeof(uint16_t), sizeof(uint16_t)};
  const kedge_target targets[] = {{.struct_size = sizeof(kedge_target),
                                   .name = "embed.weight",
                                   .dtype = KEDGE_BF16,
                                   .dimensions = 2,
                                   .shape = kEmbedShape,
                                   .data = engine->embed},
                                  {.struct_size = sizeof(kedge_target),
                                   .name = "mlp.gate.weight",
                                   .dtype = KEDGE_BF16,
                                   .dimensions = 2,
                                   .shape = kProjectionShape,
                                   .data = engine->gate_up[0][0],
                                   .strides_bytes = packed},
                                  {.struct_size = sizeof(kedge_target),
                                   .name = "mlp.up.weight",
                                   .dtype = KEDGE_BF16,
                                   .dimensions = 2,
                                   .shape = kProjectionShape,
                                   .data = engine->gate_up[0][1],
                                   .strides_bytes = packed},
                                  {.struct_size = sizeof(kedge_target),
                                   .name = "norm.weight",
                                   .dtype = KEDGE_F32,
                                   .dimensions = 1,
                                   .shape = kNormShape,
                                   .data = engine->norm}};
  const kedge_weight_set set = {
      .struct_size = sizeof(set),
      .name = "engine",
      .targets = targets,
      .target_count = sizeof(targets) / sizeof(targets[0])};
  const kedge_reader_options options = {.struct_size = sizeof(options),
                                        .store_path = store,
                                        .every_version = 1,
                                        .lease_id = "c-engine",
                                        .pause = Pause,
                                        .commit = Commit,
                                        .user = engine};
  kedge_reader* reader = NULL;
  kedge_error* error = NULL;
  const int good =
      Succeeded(kedge_reader_open(&options, &set, 1, &reader, &error), error,
                "open") &&
      Follow(reader, engine, reports);
  kedge_reader_free(reader);
  free(engine);
  return good;
}

/* -------------------------------------------------------------------- both */

/* Reads what the engine reported and compares it with the trainer's. */
static int Compare(int from, const struct report* expected) {
  struct report report;
  uint64_t last = 0;
  int count = 0;
  while (read(from, &report, sizeof(report)) == (ssize_t)sizeof(report)) {
    const uint64_t step = report.version.step;
    if (step > kSteps ||
        memcmp(&report, &expected[step], sizeof(report)) != 0) {
      fprintf(stderr, "v%" PRIu64 ": the engine holds other weights\n", step);
      return 0;
    }
    last = step;
    ++count;
  }
  printf("the engine held %d versions, the last one v%" PRIu64
         ", each the trainer's\n",
         count, last);
  return last == kSteps;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s STORE  (a path that is not there)\n", argv[0]);
    return 2;
  }
  if (kedge_abi_version() != KEDGE_ABI_VERSION) {
    fprintf(stderr, "this is kedge %s, with another ABI\n", kedge_version());
    return 2;
  }
  int ready[2];
  int reports[2];
  if (pipe(ready) != 0 || pipe(reports) != 0) return 2;
  /* Before kedge is used: it has threads, which a fork would not take along. */
  const pid_t engine = fork();
  if (engine < 0) return 2;
  if (engine == 0) {
    close(ready[1]);
    close(reports[0]);
    const int good = RunEngine(argv[1], ready[0], reports[1]);
    fflush(NULL);
    return good ? 0 : 1;
  }
  close(ready[0]);
  close(reports[1]);
  struct report expected[kSteps + 1];
  memset(expected, 0, sizeof(expected));
  const int published = RunTrainer(argv[1], ready[1], expected);
  close(ready[1]);
  const int equal = Compare(reports[0], expected);
  int status = 0;
  const int exited = waitpid(engine, &status, 0) == engine &&
                     WIFEXITED(status) && WEXITSTATUS(status) == 0;
  return published && equal && exited ? 0 : 1;
}
