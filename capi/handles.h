#ifndef KEDGE_CAPI_HANDLES_H_
#define KEDGE_CAPI_HANDLES_H_

// Handles that other handles are made from. They share what is inside, so that
// they may be freed in any order.

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/base/thread_annotations.h"
#include "kedge/capi/kedge.h"
#include "kedge/engine/device/device.h"
#include "kedge/writer/coordinator.h"

struct kedge_device {
  std::shared_ptr<kedge::Device> device;
  std::string name;
  std::mutex mutex;
  // Made here; destroyed before `device`.
  std::map<void*, kedge::OwnedStream> streams ABSL_GUARDED_BY(mutex);
};

struct kedge_coordinator {
  std::shared_ptr<kedge::Coordinator> coordinator;
};

#endif  // KEDGE_CAPI_HANDLES_H_
