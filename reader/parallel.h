#ifndef KEDGE_READER_PARALLEL_H_
#define KEDGE_READER_PARALLEL_H_

// Many small jobs on the threads of a pool, without a task for each.

#include <cstddef>
#include <functional>

#include "absl/status/status.h"
#include "kedge/engine/io/io_pool.h"

namespace kedge {

// Calls job(i) once for each i in [0, count), on the threads of `pool`, the
// lower ones first, and waits. Returns the first error, after which no further
// job starts.
absl::Status ParallelFor(IoPool* pool, std::size_t count,
                         const std::function<absl::Status(std::size_t)>& job);

}  // namespace kedge

#endif  // KEDGE_READER_PARALLEL_H_
