#ifndef KEDGE_CAPI_KEDGE_H_
#define KEDGE_CAPI_KEDGE_H_

/* The C ABI of kedge: writer, hook and reader for programs that are not C++,
 * or that are built with another compiler or another Abseil. C99 and C++.
 *
 * Handles are opaque. What makes one hands it over through its out parameter,
 * and kedge_X_free gives it back (null is ignored). A handle keeps alive what
 * it was made from: a device may be freed before the hook that uses it.
 *
 * Structs begin with their size: set `struct_size` to sizeof the struct, and
 * leave what you do not need at zero, which means "the default" for every
 * member. Later versions add members at the end, so a program runs with the
 * kedge that it was compiled with and with every later one of the same
 * KEDGE_ABI_VERSION. All elements of an array have the same struct_size.
 *
 *     kedge_writer_options options = {.struct_size = sizeof(options),
 *                                     .store_path = "/shared/run7"};
 *
 * Inputs (strings, arrays, structs) are read during the call and not kept,
 * except for memory that holds weights: `data` and `replicas` are borrowed
 * until the handle is freed. Strings are UTF-8, end with NUL, and are never
 * null where a name or a path is asked for. An array may be null if its count
 * is 0.
 *
 * Errors: functions that can fail return a kedge_status. With `error` not null
 * they set *error to null, or, if they fail, to an object of the caller's with
 * the message: read it with kedge_error_message, then kedge_error_free it. A
 * failure sets a handle's out parameter to null and leaves results as they
 * were. Arguments that cannot be right (a null handle, a struct_size that no
 * version had, an unknown enum value) are KEDGE_INVALID_ARGUMENT, and nothing
 * has happened, not even a word to other ranks. No C++ exception leaves a
 * function, and none may leave a callback.
 *
 * Threads: one thread at a time uses a handle, unless a function says
 * otherwise. Different handles are independent.
 */

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KEDGE_API __attribute__((visibility("default")))
#else
#define KEDGE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when a program must be compiled again: the number in the library's
 * file name (libkedge.so.1). */
#define KEDGE_ABI_VERSION 1

/* Of the library that runs: its KEDGE_ABI_VERSION, and "0.1.0". */
KEDGE_API uint32_t kedge_abi_version(void);
KEDGE_API const char* kedge_version(void);

/* ------------------------------------------------------------------- errors */

/* What the caller can do next. Numbers never change. */
typedef int32_t kedge_status;
enum {
  KEDGE_OK = 0,
  KEDGE_CANCELLED = 1,
  KEDGE_UNKNOWN = 2,
  KEDGE_INVALID_ARGUMENT = 3,    /* the call cannot be right */
  KEDGE_DEADLINE_EXCEEDED = 4,   /* nothing came in the time given */
  KEDGE_NOT_FOUND = 5,           /* no store, no such step, or pruned */
  KEDGE_ALREADY_EXISTS = 6,      /* a store is there; another step N stands */
  KEDGE_PERMISSION_DENIED = 7,   /* storage says no */
  KEDGE_RESOURCE_EXHAUSTED = 8,  /* disk or memory is full */
  KEDGE_FAILED_PRECONDITION = 9, /* not in this state: fenced, wrong weights */
  KEDGE_ABORTED = 10,
  KEDGE_OUT_OF_RANGE = 11,
  KEDGE_UNIMPLEMENTED = 12, /* a newer format, or built without CUDA */
  KEDGE_INTERNAL = 13,      /* a CUDA call failed; a bug */
  KEDGE_UNAVAILABLE = 14,   /* storage or another rank: try again */
  KEDGE_DATA_LOSS = 15      /* bytes or weights are wrong */
};
/* "KEDGE_DATA_LOSS"; "?" for a number that is none. Static. */
KEDGE_API const char* kedge_status_name(kedge_status status);

typedef struct kedge_error kedge_error;
/* Where, what, expected, found, what to do. Valid until the error is freed; ""
 * and KEDGE_OK for null (a failure without memory for its message). */
KEDGE_API const char* kedge_error_message(const kedge_error* error);
KEDGE_API kedge_status kedge_error_status(const kedge_error* error);
KEDGE_API void kedge_error_free(kedge_error* error);

/* ------------------------------------------------------------------- shared */

/* Element types. Numbers are those of the store and never change; 0 is none.
 * What is not here travels as opaque KEDGE_U8. */
typedef int32_t kedge_dtype;
enum {
  KEDGE_F64 = 1,
  KEDGE_F32 = 2,
  KEDGE_F16 = 3,
  KEDGE_BF16 = 4,
  KEDGE_F8_E4M3 = 5, /* OCP e4m3fn */
  KEDGE_F8_E5M2 = 6,
  KEDGE_F8_E8M0 = 7,
  KEDGE_I64 = 8,
  KEDGE_I32 = 9,
  KEDGE_I16 = 10,
  KEDGE_I8 = 11,
  KEDGE_U64 = 12,
  KEDGE_U32 = 13,
  KEDGE_U16 = 14,
  KEDGE_U8 = 15,
  KEDGE_BOOL = 16
};

/* A version: the weights after step N, with the hash of the manifest that
 * published them. Two versions are the same if both members are. */
typedef struct kedge_version_id {
  uint64_t step;
  uint8_t manifest_hash[16];
} kedge_version_id;

/* A half-open range of elements, in row-major order. */
typedef struct kedge_range {
  uint64_t begin;
  uint64_t end;
} kedge_range;

/* Free-form text that travels with a version. Keys differ. */
typedef struct kedge_metadata {
  const char* key;
  const char* value;
} kedge_metadata;

/* A size with a name. */
typedef struct kedge_named_bytes {
  const char* name;
  uint64_t bytes;
} kedge_named_bytes;

/* ------------------------------------------------------------------- device */

/* What holds weights. A stream is a void*: a cudaStream_t of a CUDA device
 * (null: the legacy default stream), or what kedge_device_create_stream gave.
 * Every function may be called from any thread. */
typedef struct kedge_device kedge_device;

/* The host as a device: streams are threads, "device memory" is any host
 * memory. For tests, and for programs that run with and without a GPU. */
KEDGE_API kedge_status kedge_device_open_cpu(kedge_device** device,
                                             kedge_error** error);
/* GPU number `ordinal`, as CUDA counts them in this process.
 *   KEDGE_UNIMPLEMENTED     this library was built without CUDA
 *   KEDGE_INVALID_ARGUMENT  there is no such GPU
 *   KEDGE_INTERNAL          what CUDA says: no driver, ... */
KEDGE_API kedge_status kedge_device_open_cuda(int32_t ordinal,
                                              kedge_device** device,
                                              kedge_error** error);
/* "cuda:0 (NVIDIA H200)", "cpu". Valid until the device is freed; "" for
 * null. */
KEDGE_API const char* kedge_device_name(const kedge_device* device);
/* A stream of kedge's own, for programs that have none. */
KEDGE_API kedge_status kedge_device_create_stream(kedge_device* device,
                                                  void** stream,
                                                  kedge_error** error);
/* Waits until what is enqueued on `stream` has run. */
KEDGE_API kedge_status kedge_device_wait_for_stream(kedge_device* device,
                                                    void* stream,
                                                    kedge_error** error);
/* Waits likewise, then destroys the stream. KEDGE_INVALID_ARGUMENT if it is
 * not from kedge_device_create_stream of this device. */
KEDGE_API kedge_status kedge_device_destroy_stream(kedge_device* device,
                                                   void* stream,
                                                   kedge_error** error);
/* Destroys its streams too. Nothing else made from it may still use them. */
KEDGE_API void kedge_device_free(kedge_device* device);

/* -------------------------------------------------------------- coordinator */

/* How the ranks of one trainer meet. With a coordinator each call of a writer,
 * and those calls of a hook that say so, are made by all ranks in the same
 * order, each with its own tensors; all come out of it alike. */
typedef struct kedge_coordinator kedge_coordinator;

typedef struct kedge_coordinator_options {
  size_t struct_size;
  const char* store_path; /* made if missing: the store may come later */
  uint32_t rank;
  uint32_t world_size;   /* 1 to 1000; required */
  const uint8_t* run_id; /* [16] what the ranks of one job have in common; null:
                            the run of the store that stands there, if any */
  uint64_t deadline_ms;  /* of opening and of each meeting; default 300,000.
                            Longer than the slowest rank's part of an anchor */
} kedge_coordinator_options;
KEDGE_API kedge_status
kedge_coordinator_options_init(kedge_coordinator_options* options,
                               size_t struct_size, kedge_error** error);

/* Ranks that meet through files in the store: processes, on any hosts that see
 * it. Waits until all ranks are there.
 *   KEDGE_INVALID_ARGUMENT     rank or world size out of range
 *   KEDGE_FAILED_PRECONDITION  a live rank of another world size or run
 *   KEDGE_UNAVAILABLE          a rank is missing at the deadline; storage */
KEDGE_API kedge_status kedge_coordinator_open_files(
    const kedge_coordinator_options* options, kedge_coordinator** coordinator,
    kedge_error** error);
KEDGE_API void kedge_coordinator_free(kedge_coordinator* coordinator);

/* ------------------------------------------------------------------- writer */

/* The trainer's side, for any optimizer: keeps a copy of the last published
 * weights, in host memory, and publishes what has changed since. Tensors are
 * read in place, and must not change during a call; they may between calls. */
typedef struct kedge_writer kedge_writer;

/* One tensor in the trainer's memory, or this rank's shard of one. A rank may
 * have several shards of one tensor, as entries of the same name, and may lack
 * tensors that other ranks have. */
typedef struct kedge_tensor {
  size_t struct_size;
  const char* name;
  kedge_dtype dtype;
  uint32_t dimensions;   /* at most 32; 0: a scalar */
  const uint64_t* shape; /* [dimensions] of the whole tensor, at every rank */
  const void* data;      /* the first element, of the shard if there is one */
  const int64_t* strides_bytes; /* [dimensions] between neighbours, for a view
                                   of a packed parameter; null: row-major and
                                   contiguous. A shard of a view is whole rows
                                   of the first dimension */
  const char* tied_to; /* the tensor whose storage this one shares, if the model
                          declares a tie; null: none */
  const kedge_range* shard; /* which elements `data` holds; null: all of them */
} kedge_tensor;

typedef struct kedge_writer_options {
  size_t struct_size;
  const char* store_path;
  kedge_coordinator* coordinator; /* null: this rank is alone. Used by nobody
                                     else meanwhile */
  int32_t io_threads;             /* 1 to 1024; default 8 */
  int32_t encode_threads;         /* at most 1024; default one a core */
  uint64_t anchor_file_bytes;     /* default 1 GiB */
  uint64_t slice_units;       /* that a thread encodes at once; default 16 Mi */
  uint32_t segment_files;     /* of a large step, written at once; default 8 */
  uint32_t keep_anchors;      /* after each publish drop what is older than the
                                 newest this many anchors and needed by no lease;
                                 0: keep everything */
  uint64_t lease_ttl_seconds; /* a reader silent this long is dead; 600 */
  uint64_t trash_grace_seconds; /* until what was dropped is deleted; 60 */
} kedge_writer_options;
KEDGE_API kedge_status kedge_writer_options_init(kedge_writer_options* options,
                                                 size_t struct_size,
                                                 kedge_error** error);

/* How a store begins. */
typedef struct kedge_store_options {
  size_t struct_size;
  const uint8_t* run_id;         /* [16]; null: random */
  const uint64_t* l61_seed;      /* null: random */
  uint64_t created_unix_seconds; /* 0: now */
  const kedge_metadata* metadata;
  size_t metadata_count;
  int32_t external_v0; /* not 0: the engines have v0 already, write no anchor */
  int32_t reserved;    /* 0 */
} kedge_store_options;
KEDGE_API kedge_status kedge_store_options_init(kedge_store_options* options,
                                                size_t struct_size,
                                                kedge_error** error);

typedef struct kedge_publish_options {
  size_t struct_size;
  int32_t anchor;           /* not 0: also write every byte */
  int32_t replace_metadata; /* 0: metadata are as before, and not looked at */
  const kedge_metadata* metadata;
  size_t metadata_count;
} kedge_publish_options;

/* What a publish did. Strings belong to the writer or hook, and are valid
 * until its next call that publishes, or until it is freed. */
typedef struct kedge_publish_result {
  size_t struct_size;
  kedge_version_id version;
  uint64_t nnz; /* changed elements, pairs of 32-bit words counted by word */
  uint64_t records;
  uint64_t bytes;          /* every file of the step directory */
  uint64_t manifest_bytes; /* thereof */
  uint64_t anchor_bytes;   /* 0: no anchor */
  double encode_seconds;   /* diff, encode, and the writes beneath it */
  double commit_seconds;   /* merge, sync, rename, HEAD */
  double anchor_seconds;
  kedge_status anchor_status; /* not KEDGE_OK: the step stands without its
                                 anchor; a later one may carry one */
  uint32_t epoch;
  const char* anchor_message;  /* of anchor_status; "" if it is KEDGE_OK */
  const char* const* warnings; /* [warning_count] what failed without harm */
  size_t warning_count;
} kedge_publish_result;

/* Creates a store whose v0 is what `tensors` hold, of all ranks together, and
 * opens it. The path does not exist or is empty.
 *   KEDGE_ALREADY_EXISTS       something is there
 *   KEDGE_FAILED_PRECONDITION  names tensors that ranks declare differently,
 *                              or of which a part is held by nobody or twice
 * `store` may be null. */
KEDGE_API kedge_status kedge_writer_create(const kedge_writer_options* options,
                                           const kedge_store_options* store,
                                           const kedge_tensor* tensors,
                                           size_t tensor_count,
                                           kedge_writer** writer,
                                           kedge_error** error);
/* Opens a store at *resume_step (null: its newest version) and fences every
 * writer opened before; later steps go to trash. The tensors hold exactly that
 * version; this is checked before anything is changed.
 *   KEDGE_NOT_FOUND            no store, or no such step
 *   KEDGE_FAILED_PRECONDITION  names tensors that differ from the version, or
 *                              "fenced"
 *   KEDGE_DATA_LOSS, KEDGE_UNAVAILABLE  the store cannot be read */
KEDGE_API kedge_status kedge_writer_open(const kedge_writer_options* options,
                                         const kedge_tensor* tensors,
                                         size_t tensor_count,
                                         const uint64_t* resume_step,
                                         kedge_writer** writer,
                                         kedge_error** error);
/* Publishes the tensors as version `step`, above the last one, as a delta. On
 * an error nothing is visible, the version held stays, and the step may be
 * published again or the next one instead.
 *   KEDGE_INVALID_ARGUMENT     step is not above the version held
 *   KEDGE_FAILED_PRECONDITION  fenced by a later writer; ranks disagree
 *   KEDGE_ALREADY_EXISTS       step N stands with other content
 *   KEDGE_RESOURCE_EXHAUSTED   disk full
 *   KEDGE_UNAVAILABLE          storage, or a missing rank; or "outcome
 *                              unknown": open a new writer, on all ranks
 * An anchor that fails does not fail the step. `options` and `result` may be
 * null. */
KEDGE_API kedge_status kedge_writer_publish(
    kedge_writer* writer, uint64_t step, const kedge_publish_options* options,
    kedge_publish_result* result, kedge_error** error);
/* Publishes other tensors (names, shapes, dtypes or shards differ) as version
 * `step`: no delta, an anchor. They take the place of those given before. The
 * metadata are all of the new version's. Errors as above. */
KEDGE_API kedge_status kedge_writer_replace_tensors(
    kedge_writer* writer, uint64_t step, const kedge_tensor* tensors,
    size_t tensor_count, const kedge_metadata* metadata, size_t metadata_count,
    kedge_publish_result* result, kedge_error** error);
/* The last published version. */
KEDGE_API kedge_status kedge_writer_held(const kedge_writer* writer,
                                         kedge_version_id* version,
                                         kedge_error** error);
/* Host memory of the copy; 0 for null. */
KEDGE_API uint64_t kedge_writer_snapshot_bytes(const kedge_writer* writer);
KEDGE_API void kedge_writer_free(kedge_writer* writer);

/* --------------------------------------------------------------------- hook */

/* The trainer's side for full CPU offload: the delta is taken where the
 * optimizer's new weights pass on their way to the device, with no copy of the
 * model.
 *
 *   v0:        kedge_hook_create or kedge_hook_open, weights on the device
 *   each step: kedge_hook_begin_step   before the step's final backward
 *              kedge_hook_on_update    for each chunk, in place of the
 *                                      trainer's own copy to the device
 *              kedge_hook_end_step     after the last chunk
 *              kedge_hook_publish      or nothing: the next step is then an
 *                                      anchor
 *
 * With a coordinator all but kedge_hook_on_update, kedge_hook_has_passed and
 * kedge_hook_wait_for are made by all ranks. */
typedef struct kedge_hook kedge_hook;

/* A trainer's storage on the device: what one optimizer parameter of this rank
 * holds, contiguous. The optimizer writes it whole, once a step, in ranges. */
typedef struct kedge_parameter {
  size_t struct_size;
  const char* name; /* for messages */
  void* data;       /* device memory */
  uint64_t bytes;
  const void* const* replicas; /* [replica_count] other copies on this device
                                  that the trainer keeps equal; checked */
  size_t replica_count;
  int32_t frozen;   /* not 0: never written by the optimizer; checked */
  int32_t reserved; /* 0 */
} kedge_parameter;

/* How the scale of an fp8 block follows from its largest magnitude. */
typedef int32_t kedge_scale_kind;
enum {
  KEDGE_SCALE_EXACT = 0,       /* max(amax, floor) / 448 */
  KEDGE_SCALE_POWER_OF_TWO = 1 /* the next power of two of that */
};

/* An fp8 engine's form of a bf16 tensor of two dimensions: e4m3 values under
 * its name, and f32 scales of blocks of 128 x 128, travel in its place. */
typedef struct kedge_quantised_tensor {
  size_t struct_size;
  const char* tensor; /* of `tensors` */
  const char* scales; /* "...weight_scale_inv" */
  kedge_scale_kind scale_kind;
  float floor; /* default 1e-12 */
} kedge_quantised_tensor;

typedef struct kedge_hook_options {
  size_t struct_size;
  kedge_device* device; /* required */
  const kedge_parameter* parameters;
  size_t parameter_count;
  const kedge_tensor* tensors; /* that lie in parameters: `data` is a device
                                  address in one of them, and addresses of
                                  elements ascend in row-major order. A byte of
                                  a parameter belongs to at most one tensor */
  size_t tensor_count;
  const kedge_tensor* residual; /* that do not: buffers, copies, other views, in
                                   device or host memory. A copy of their bytes
                                   is kept in host memory */
  size_t residual_count;
  const kedge_quantised_tensor* quantised;
  size_t quantised_count;
  uint64_t chunk_bytes; /* longest update that is not cut; default 32 MiB.
                           Memory for four of these lies on the device */
  uint64_t ring_bytes;  /* device memory for encoded parts; default 256 MiB */
  uint64_t deadline_ms; /* of any wait for device or storage; default 600,000 */
} kedge_hook_options;
KEDGE_API kedge_status kedge_hook_options_init(kedge_hook_options* options,
                                               size_t struct_size,
                                               kedge_error** error);

/* What a hooked step came to, beside kedge_publish_result. */
typedef struct kedge_hook_result {
  size_t struct_size;
  double wait_seconds;   /* begin_step: for the publish before */
  double drain_seconds;  /* end_step: for the diff of the last chunks */
  double guard_seconds;  /* live weights against what the step wrote */
  double commit_seconds; /* publish as a whole */
  uint64_t early_drains; /* of parts, since the ring was full */
  uint64_t guard_bytes;
} kedge_hook_result;

/* What a hook holds beside the trainer's own memory, all taken when it is
 * opened. `residual` is valid until the hook is freed. */
typedef struct kedge_hook_memory {
  size_t struct_size;
  uint64_t device_bytes;
  uint64_t pinned_bytes;
  uint64_t residual_bytes; /* host memory: copies of residual tensors */
  const kedge_named_bytes* residual; /* [residual_count] each of them */
  size_t residual_count;
} kedge_hook_memory;

/* Creates a store whose v0 is what the tensors hold, and opens it. Errors as
 * kedge_writer_create; KEDGE_INVALID_ARGUMENT names a tensor that lies in no
 * parameter, in two, over another tensor, or whose addresses do not ascend.
 * `store` may be null. */
KEDGE_API kedge_status kedge_hook_create(const kedge_writer_options* writer,
                                         const kedge_store_options* store,
                                         const kedge_hook_options* options,
                                         kedge_hook** hook,
                                         kedge_error** error);
/* As kedge_writer_open. */
KEDGE_API kedge_status kedge_hook_open(const kedge_writer_options* writer,
                                       const kedge_hook_options* options,
                                       const uint64_t* resume_step,
                                       kedge_hook** hook, kedge_error** error);
/* Arms the hook for `step`, the one after the version held. Waits until the
 * last publish has read live weights. `anchor` not 0: the step's bytes are also
 * written into an anchor as they pass.
 *   KEDGE_FAILED_PRECONDITION  the step before was hooked and not published:
 *                              begin this one with `anchor`; or it is open */
KEDGE_API kedge_status kedge_hook_begin_step(kedge_hook* hook, uint64_t step,
                                             int32_t anchor,
                                             kedge_error** error);
/* New weights for bytes [begin, begin + bytes) of parameters[parameter], at
 * `pinned_source`: copies them to the device on `stream` and queues the
 * difference. The parameter has them when kedge_hook_end_step returns. Ranges
 * are whole elements, in any order, each written once a step. The source must
 * not change until *ticket has passed.
 *   KEDGE_FAILED_PRECONDITION  not within a step, a frozen parameter, a range
 *                              written twice. The weights are on their way
 *                              nevertheless, and the source is free when
 *                              `stream` has passed this call;
 *                              kedge_hook_end_step says again what cannot be
 *                              published
 *   KEDGE_INVALID_ARGUMENT     nothing was copied */
KEDGE_API kedge_status kedge_hook_on_update(kedge_hook* hook,
                                            uint32_t parameter, uint64_t begin,
                                            uint64_t bytes,
                                            const void* pinned_source,
                                            void* stream, uint64_t* ticket,
                                            kedge_error** error);
/* Whether the source of a ticket may be overwritten: *passed is 1 or 0. An
 * error: the device did not say that it has read it; call kedge_hook_end_step
 * before the weights are put right, as others are on their way. From any
 * thread; so is kedge_hook_wait_for. */
KEDGE_API kedge_status kedge_hook_has_passed(const kedge_hook* hook,
                                             uint64_t ticket, int32_t* passed,
                                             kedge_error** error);
KEDGE_API kedge_status kedge_hook_wait_for(const kedge_hook* hook,
                                           uint64_t ticket,
                                           kedge_error** error);
/* Waits until every chunk is diffed and its new weights are where they belong,
 * which they are also when the step cannot be published, but for two errors:
 * KEDGE_UNAVAILABLE after the deadline (they may still come), and one that says
 * "did not arrive". KEDGE_FAILED_PRECONDITION names parameters that were
 * written in part or not at all ("never written"). */
KEDGE_API kedge_status kedge_hook_end_step(kedge_hook* hook,
                                           kedge_error** error);
/* Checks live weights against what the step wrote, then publishes it. May be
 * repeated after a failure as long as no part was drained early. Errors as
 * kedge_writer_publish; KEDGE_FAILED_PRECONDITION names tensors "changed
 * outside the step", and a step that was not hooked. Of `options` only the
 * metadata count: the anchor is begin_step's. `options` and both results may
 * be null. */
KEDGE_API kedge_status kedge_hook_publish(kedge_hook* hook,
                                          const kedge_publish_options* options,
                                          kedge_publish_result* result,
                                          kedge_hook_result* hook_result,
                                          kedge_error** error);
KEDGE_API kedge_status kedge_hook_held(const kedge_hook* hook,
                                       kedge_version_id* version,
                                       kedge_error** error);
KEDGE_API kedge_status kedge_hook_get_memory(const kedge_hook* hook,
                                             kedge_hook_memory* memory,
                                             kedge_error** error);
KEDGE_API void kedge_hook_free(kedge_hook* hook);

/* ------------------------------------------------------------------- reader */

/* The inference engine's side: follows a store, applies deltas in place and
 * proves that what memory holds is the version it claims; alone, or as one
 * rank of a group that holds the model together. */
typedef struct kedge_reader kedge_reader;

/* A box of one tensor in the engine's memory. Coordinates are those of the
 * checkpoint's tensor, whatever the engine packs it into: the q part of a
 * packed qkv buffer is a target named q_proj.weight whose data points at its
 * first row there. */
typedef struct kedge_target {
  size_t struct_size;
  const char* name;
  kedge_dtype dtype;
  uint32_t dimensions;   /* at most 32 */
  const uint64_t* shape; /* [dimensions] of the whole tensor */
  const uint64_t* begin; /* [dimensions] of the box [begin, begin + extent);
                            begin and extent both null: the whole tensor */
  const uint64_t* extent;
  void* data;                   /* the box's first element */
  const int64_t* strides_bytes; /* [dimensions] between neighbours; null:
                                   row-major and contiguous */
} kedge_target;

/* What one replica's one rank holds. Several targets may name one tensor. */
typedef struct kedge_weight_set {
  size_t struct_size;
  const char* name; /* for messages ("tp0"); null: "weights" */
  const kedge_target* targets;
  size_t target_count;
} kedge_weight_set;

/* Called on the thread that updates. `user` is kedge_reader_options::user.
 *
 * pause   before the first write. Anything but KEDGE_OK cancels the update,
 *         nothing changed.
 * commit  once per update, after verification, still paused: drop caches that
 *         depend on the weights, then go on serving.
 * resume  groups only: after pause, if the ranks then decided to change
 *         nothing. Weights are whole. */
typedef kedge_status (*kedge_pause_callback)(void* user);
typedef void (*kedge_commit_callback)(void* user,
                                      const kedge_version_id* version);
typedef void (*kedge_resume_callback)(void* user);
/* Groups only: replaces each of values[count] by the sum over all ranks, modulo
 * 2^61 - 1. Values handed in are below that; up to 8 ranks plain addition of
 * 64-bit integers does (ncclAllReduce of ncclUint64 with ncclSum), since what
 * comes back is reduced. Called by every rank equally often, with equally many
 * values. Has a deadline of its own, longer than retry_deadline_ms, and gives
 * KEDGE_UNAVAILABLE when it passes, or when ranks come with different counts.
 * `user` is kedge_reader_options::reduce_user. */
typedef kedge_status (*kedge_reduce_callback)(void* user, uint64_t* values,
                                              size_t count);

/* How files are read. */
typedef int32_t kedge_read_mode;
enum {
  KEDGE_READ_AUTO = 0, /* map on local file systems, but not to a device */
  KEDGE_READ_MAP = 1,
  KEDGE_READ_READ = 2
};

typedef struct kedge_reader_options {
  size_t struct_size;
  const char* store_path;
  kedge_device* device; /* that holds every target; null: host memory */
  void* stream; /* of the device, on which weights change; null: one that
                   the reader makes. At `pause` no other work on the
                   weights is in flight but what is on it already */
  uint64_t device_stage_bytes; /* most device memory that deltas take before
                                  they are applied; default 4 GiB */
  kedge_read_mode read_mode;
  int32_t io_threads;         /* 1 to 1024; default 12 */
  int32_t apply_threads;      /* at most 1024; default one a core */
  int32_t every_version;      /* not 0: pass through each, skip none */
  int32_t allow_partial;      /* not 0: part of the model is enough; such a
                                 reader is never KEDGE_READER_READY */
  int32_t skip_record_checks; /* not 0: do not decode every record before the
                                 pause to check it */
  uint64_t directory_interval_ms; /* look beyond HEAD; default 30,000 */
  uint64_t retry_deadline_ms;     /* for missing, short and stale files;
                                     default 10,000 */
  const char* lease_id; /* under this name gc learns what is still needed; no
                           two readers share one, the ranks of a group do;
                           null: gc is not asked */
  uint64_t lease_renewal_ms; /* default 20,000 */
  uint32_t group_rank;
  uint32_t group_size;          /* default 1 */
  const char* group_name;       /* for messages ("tp"); may be null */
  kedge_reduce_callback reduce; /* required if group_size is above 1 */
  void* reduce_user;
  kedge_pause_callback pause; /* this and the two below may be null */
  kedge_commit_callback commit;
  kedge_resume_callback resume;
  void* user; /* handed to the three */
} kedge_reader_options;
KEDGE_API kedge_status kedge_reader_options_init(kedge_reader_options* options,
                                                 size_t struct_size,
                                                 kedge_error** error);

typedef int32_t kedge_reader_state;
enum {
  KEDGE_READER_EMPTY = 0,     /* nothing verified: join, or verify_held */
  KEDGE_READER_READY = 1,     /* memory holds the version, verified */
  KEDGE_READER_UPDATING = 2,  /* weights are being changed */
  KEDGE_READER_POISONED = 3,  /* an update failed half-way; join heals */
  KEDGE_READER_SUPERSEDED = 4 /* what is held is whole, but the run went on
                                 without it; the next update rejoins */
};

/* What one update did. Warnings belong to the reader, and are valid until its
 * next call that fills a result, or until it is freed. */
typedef struct kedge_update_result {
  size_t struct_size;
  kedge_version_id version; /* held now */
  int32_t changed;          /* 0: nothing newer was found */
  int32_t joined;           /* 1: came from an anchor */
  uint64_t deltas;
  uint64_t bytes_read;
  uint64_t nnz;           /* changes in the records read */
  uint64_t units_written; /* into the boxes */
  uint64_t records;
  uint64_t tensors_verified;  /* of a group: by all its ranks */
  uint64_t elements_verified; /* that this process read for it */
  uint64_t bytes_verified;    /* of them */
  double read_seconds;  /* plan, read, check, as far as before the pause */
  double pause_seconds; /* apply, verify, commit */
  double apply_seconds;
  double verify_seconds;
  const char* const* warnings; /* [warning_count] what failed without harm */
  size_t warning_count;
} kedge_update_result;

/* Opens the store and binds `sets`, of all ranks of a group together, to the
 * newest version's table.
 *   KEDGE_INVALID_ARGUMENT     names a target that cannot be right
 *   KEDGE_FAILED_PRECONDITION  names tensors that the store does not have, or
 *                              of which nobody holds a part
 *   KEDGE_NOT_FOUND            no store
 * In a group this and every call below but kedge_reader_prefetch, state, held
 * and unverified is made by all ranks in the same order; all come out of it
 * alike. */
KEDGE_API kedge_status kedge_reader_open(const kedge_reader_options* options,
                                         const kedge_weight_set* sets,
                                         size_t set_count,
                                         kedge_reader** reader,
                                         kedge_error** error);
/* Declares that memory holds version `step` already (0: the boot checkpoint)
 * and proves it. KEDGE_DATA_LOSS names every tensor that differs (the first
 * few); the reader stays empty. */
KEDGE_API kedge_status kedge_reader_verify_held(kedge_reader* reader,
                                                uint64_t step,
                                                kedge_error** error);
/* Loads the newest version from an anchor and deltas, in place. Also heals a
 * poisoned reader: tensors that verify are not read again. */
KEDGE_API kedge_status kedge_reader_join(kedge_reader* reader,
                                         kedge_update_result* result,
                                         kedge_error** error);
/* Likewise a given version. KEDGE_NOT_FOUND if it is not there. */
KEDGE_API kedge_status kedge_reader_join_step(kedge_reader* reader,
                                              uint64_t step,
                                              kedge_update_result* result,
                                              kedge_error** error);
/* Looks for a newer version and, if there is one (*found is 1), reads and
 * checks everything that the update needs. Weights are untouched. *version,
 * which may be null, is where kedge_reader_update would go. */
KEDGE_API kedge_status kedge_reader_prefetch(kedge_reader* reader,
                                             int32_t* found,
                                             kedge_version_id* version,
                                             kedge_error** error);
/* Prefetch unless done, then pause, apply, verify, commit. With nothing newer
 * the result says changed = 0.
 *   KEDGE_FAILED_PRECONDITION  empty or poisoned: join first
 *   KEDGE_DATA_LOSS            a damaged file (nothing changed), or a tensor
 *                              that does not verify (poisoned)
 *   KEDGE_UNAVAILABLE          files or other ranks: try again
 *   KEDGE_NOT_FOUND            pruned: the next call takes a newer version
 * What the pause or the reduce callback returns is wrapped into these. */
KEDGE_API kedge_status kedge_reader_update(kedge_reader* reader,
                                           kedge_update_result* result,
                                           kedge_error** error);
/* Update, waiting up to `timeout_ms` for something newer.
 * KEDGE_DEADLINE_EXCEEDED says what it waited for. */
KEDGE_API kedge_status kedge_reader_wait_for_update(kedge_reader* reader,
                                                    uint64_t timeout_ms,
                                                    kedge_update_result* result,
                                                    kedge_error** error);
/* From any thread; so is kedge_reader_held. KEDGE_READER_EMPTY for null. */
KEDGE_API kedge_reader_state kedge_reader_get_state(const kedge_reader* reader);
/* The version that memory holds. KEDGE_FAILED_PRECONDITION while there is
 * none: empty, updating or poisoned. */
KEDGE_API kedge_status kedge_reader_held(const kedge_reader* reader,
                                         kedge_version_id* version,
                                         kedge_error** error);
/* Names of tensors that are held in part only, by all ranks together, and
 * cannot be verified. Valid until the next call of this function, or until the
 * reader is freed. */
KEDGE_API kedge_status kedge_reader_unverified(kedge_reader* reader,
                                               const char* const** names,
                                               size_t* name_count,
                                               kedge_error** error);
KEDGE_API void kedge_reader_free(kedge_reader* reader);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEDGE_CAPI_KEDGE_H_ */
