// Goal: between BeginStep and EndStep of a normal step the hook takes no
// memory, of the heap, the device or the host's pinned pages. Method: operator
// new of the whole program counts, on every thread, and so does the device.

#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kedge/engine/cpu/cpu_device.h"
#include "kedge/tests/engine/device/counted_heap.h"
#include "kedge/tests/support/temp_directory.h"
#include "kedge/tests/writer/hook_trainer.h"
#include "kedge/writer/optimizer_hook.h"

namespace kedge {
namespace {

TEST(HookAllocationTest, AStepTakesNoMemoryAfterTheFirst) {
  const TempDirectory temp;
  CpuDevice device;
  HookTrainer trainer(&device, 8);
  trainer.AddEverything();
  trainer.AddQuantised(trainer.AddFiniteParameter("fp8", 300 * 90 * 2), 0,
                       "fp8", {300, 90});
  WriterOptions writer;
  writer.store_path = temp.Join("store");
  writer.encode_threads = 2;
  auto hook = OptimizerHook::Create(writer, {}, trainer.Options());
  ASSERT_TRUE(hook.ok()) << hook.status();

  const std::vector<HookTrainer::Range> ranges = trainer.Ranges(false);
  for (std::uint64_t step = 1; step <= 5; ++step) {
    SCOPED_TRACE(step);
    const bool anchor = step % 2 == 0;  // the second and the fourth
    trainer.Optimize(step == 1 ? 0.2 : 0.05);
    ASSERT_TRUE((*hook)->BeginStep(step, anchor).ok());
    const std::uint64_t device_before = device.allocation_count();
    const std::uint64_t heap_before = testing::HeapAllocations();
    OptimizerHook::Ticket last;
    bool fine = true;
    for (const HookTrainer::Range& range : ranges) {
      const auto ticket = (*hook)->OnUpdate(
          range.parameter, range.begin, range.end - range.begin,
          trainer.Next(range.parameter) + range.begin, trainer.stream());
      fine = fine && ticket.ok();
      if (ticket.ok()) last = *ticket;
    }
    fine = fine && (*hook)->WaitFor(last).ok();
    fine = fine && (*hook)->EndStep().ok();
    const std::uint64_t taken = testing::HeapAllocations() - heap_before;
    ASSERT_TRUE(fine);
    if (step > 1) {
      EXPECT_EQ(taken, 0u);
    }
    EXPECT_EQ(device.allocation_count(), device_before);
    trainer.SyncReplicas();
    const auto result = (*hook)->Publish();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->publish.anchor_status.ok());
  }
}

}  // namespace
}  // namespace kedge
