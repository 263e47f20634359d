// Goal: devices, streams and the optimizer hook work through the C ABI; a
// hooked trainer's steps reach an engine that reads on a device. Method: device
// memory is vectors that only the hook and the reader write; bytes of engine
// and trainer are compared after each version. Built twice: for the device that
// is no GPU, and, with KEDGE_TEST_ON_GPU, for a GPU and memory that it manages.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#ifdef KEDGE_TEST_ON_GPU
#include <cuda_runtime_api.h>
#endif

#include "kedge/capi/kedge.h"
#include "kedge/tests/capi/c_call.h"

namespace kedge {
namespace {

constexpr std::uint32_t kSeed = 19991231;

bool HaveDevice() {
#ifdef KEDGE_TEST_ON_GPU
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
#else
  return true;
#endif
}

// Memory that the device and this program see alike; without a GPU no test
// runs, but fixtures are made.
template <class T>
struct DeviceAllocator {
  using value_type = T;
  DeviceAllocator() = default;
  template <class U>
  explicit DeviceAllocator(const DeviceAllocator<U>&) {}

#ifdef KEDGE_TEST_ON_GPU
  T* allocate(std::size_t count) {
    if (!HaveDevice()) return static_cast<T*>(std::malloc(count * sizeof(T)));
    void* data = nullptr;
    if (cudaMallocManaged(&data, count * sizeof(T)) != cudaSuccess) {
      throw std::bad_alloc();
    }
    return static_cast<T*>(data);
  }
  void deallocate(T* data, std::size_t) {
    if (HaveDevice()) {
      cudaFree(data);
    } else {
      std::free(data);
    }
  }
#else
  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T)));
  }
  void deallocate(T* data, std::size_t) { ::operator delete(data); }
#endif

  friend bool operator==(DeviceAllocator, DeviceAllocator) { return true; }
};
template <class T>
using DeviceVector = std::vector<T, DeviceAllocator<T>>;

DeviceHandle OpenDevice() {
  kedge_device* device = nullptr;
#ifdef KEDGE_TEST_ON_GPU
  EXPECT_C_OK(
      Call([&](auto** e) { return kedge_device_open_cuda(0, &device, e); }));
#else
  EXPECT_C_OK(
      Call([&](auto** e) { return kedge_device_open_cpu(&device, e); }));
#endif
  return DeviceHandle(device);
}

template <class A, class B>
bool Equal(const A& a, const B& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// A parameter that holds gate and up one after the other, one that is norm, and
// one that is frozen; a buffer that lives in no parameter.
class CapiDeviceLoopTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kRows = 41;
  static constexpr std::uint64_t kCols = 131;
  static constexpr std::uint64_t kNorm = 77;
  static constexpr std::uint64_t kElements = kRows * kCols;

  CapiDeviceLoopTest() {
    for (auto& bits : gate_up_) bits = Bits();
    for (auto& bits : frozen_) bits = Bits();
    replica_ = gate_up_;
    replicas_[0] = replica_.data();
    gate_up_source_.assign(gate_up_.begin(), gate_up_.end());
    norm_source_.assign(norm_.begin(), norm_.end());

    writer_options_ = Sized<kedge_writer_options>();
    writer_options_.store_path = store_.c_str();

    parameters_.fill(Sized<kedge_parameter>());
    parameters_[0].name = "mlp.gate_up";
    parameters_[0].data = gate_up_.data();
    parameters_[0].bytes = 2 * gate_up_.size();
    parameters_[0].replicas = replicas_;
    parameters_[0].replica_count = 1;
    parameters_[1].name = "norm";
    parameters_[1].data = norm_.data();
    parameters_[1].bytes = 4 * norm_.size();
    parameters_[2].name = "embed";
    parameters_[2].data = frozen_.data();
    parameters_[2].bytes = 2 * frozen_.size();
    parameters_[2].frozen = 1;

    tensors_.fill(Sized<kedge_tensor>());
    const char* const names[] = {"gate", "up", "norm", "embed"};
    const void* const data[] = {gate_up_.data(), gate_up_.data() + kElements,
                                norm_.data(), frozen_.data()};
    for (int i = 0; i < 4; ++i) {
      tensors_[i].name = names[i];
      tensors_[i].dtype = i == 2 ? KEDGE_F32 : KEDGE_BF16;
      tensors_[i].dimensions = i < 2 ? 2 : 1;
      tensors_[i].shape = i < 2    ? matrix_shape_
                          : i == 2 ? norm_shape_
                                   : frozen_shape_;
      tensors_[i].data = data[i];
    }
    residual_ = Sized<kedge_tensor>();
    residual_.name = "inv_freq";
    residual_.dtype = KEDGE_I64;
    residual_.dimensions = 1;
    residual_.shape = buffer_shape_;
    residual_.data = buffer_.data();

    hook_options_ = Sized<kedge_hook_options>();
    hook_options_.parameters = parameters_.data();
    hook_options_.parameter_count = parameters_.size();
    hook_options_.tensors = tensors_.data();
    hook_options_.tensor_count = tensors_.size();
    hook_options_.residual = &residual_;
    hook_options_.residual_count = 1;
    hook_options_.chunk_bytes = 4096;
    hook_options_.ring_bytes = 1 << 20;
  }

  void SetUp() override {
    if (!HaveDevice()) GTEST_SKIP() << "no GPU";
  }

  std::uint16_t Bits() {
    return static_cast<std::uint16_t>(0x3c00 + random_() % 0x800);
  }
  // The optimizer's new weights, in host memory.
  void Train() {
    for (int n = 0; n < 90; ++n) {
      gate_up_source_[random_() % gate_up_source_.size()] ^=
          static_cast<std::uint16_t>(1 + random_() % 7);
    }
    for (float& value : norm_source_) value += 0.0078125f;
    buffer_[1] += 1;
  }

  void OpenHook(kedge_device* device) {
    hook_options_.device = device;
    kedge_hook* hook = nullptr;
    const Outcome outcome = Call([&](auto** e) {
      return kedge_hook_create(&writer_options_, nullptr, &hook_options_, &hook,
                               e);
    });
    EXPECT_TRUE(outcome.ok()) << outcome;
    hook_.reset(hook);
  }
  Outcome BeginStep(std::uint64_t step, bool anchor = false) {
    return Call([&](auto** e) {
      return kedge_hook_begin_step(hook_.get(), step, anchor ? 1 : 0, e);
    });
  }
  Outcome EndStep() {
    return Call([&](auto** e) { return kedge_hook_end_step(hook_.get(), e); });
  }
  Outcome OnUpdate(std::uint32_t parameter, std::uint64_t begin,
                   std::uint64_t bytes, const void* source, void* stream,
                   std::uint64_t* ticket) {
    return Call([&](auto** e) {
      return kedge_hook_on_update(hook_.get(), parameter, begin, bytes, source,
                                  stream, ticket, e);
    });
  }
  Outcome Publish(kedge_publish_result* result = nullptr,
                  kedge_hook_result* hook_result = nullptr) {
    return Call([&](auto** e) {
      return kedge_hook_publish(hook_.get(), nullptr, result, hook_result, e);
    });
  }
  // All updates of a step, in ranges of odd lengths, the last one first; then
  // the replica, as the trainer keeps it.
  void Update(void* stream) {
    std::vector<std::uint64_t> tickets;
    const auto send = [&](std::uint32_t parameter, const void* source,
                          std::uint64_t bytes, std::uint64_t step) {
      for (std::uint64_t end = bytes; end > 0;) {
        const std::uint64_t begin = end > step ? end - step : 0;
        std::uint64_t ticket = 0;
        EXPECT_C_OK(OnUpdate(parameter, begin, end - begin,
                             static_cast<const char*>(source) + begin, stream,
                             &ticket));
        tickets.push_back(ticket);
        end = begin;
      }
    };
    send(0, gate_up_source_.data(), 2 * gate_up_source_.size(), 3334);
    send(1, norm_source_.data(), 4 * norm_source_.size(), 100);
    // From another thread, as trainers do.
    std::thread([&] {
      for (const std::uint64_t ticket : tickets) {
        EXPECT_C_OK(Call([&](auto** e) {
          return kedge_hook_wait_for(hook_.get(), ticket, e);
        }));
        std::int32_t passed = 0;
        EXPECT_C_OK(Call([&](auto** e) {
          return kedge_hook_has_passed(hook_.get(), ticket, &passed, e);
        }));
        EXPECT_EQ(passed, 1);
      }
    }).join();
    EXPECT_C_OK(EndStep());
    std::copy(gate_up_source_.begin(), gate_up_source_.end(), replica_.begin());
  }

  // An engine's buffers for all five tensors, opened on `device` (or none).
  struct Engine {
    DeviceVector<std::uint16_t> gate = DeviceVector<std::uint16_t>(kElements);
    DeviceVector<std::uint16_t> up_t = DeviceVector<std::uint16_t>(kElements);
    DeviceVector<float> norm = DeviceVector<float>(kNorm);
    DeviceVector<std::uint16_t> embed = DeviceVector<std::uint16_t>(5);
    DeviceVector<std::int64_t> buffer = DeviceVector<std::int64_t>(3);
    ReaderHandle reader;
  };
  void OpenReader(kedge_device* device, void* stream, Engine* engine) {
    std::array<kedge_target, 5> targets;
    targets.fill(Sized<kedge_target>());
    // up lies transposed.
    const std::int64_t transposed[2] = {2, 2 * kRows};
    void* const data[] = {engine->gate.data(), engine->up_t.data(),
                          engine->norm.data(), engine->embed.data(),
                          engine->buffer.data()};
    for (int i = 0; i < 5; ++i) {
      const kedge_tensor& tensor = i == 4 ? residual_ : tensors_[i];
      targets[i].name = tensor.name;
      targets[i].dtype = tensor.dtype;
      targets[i].dimensions = tensor.dimensions;
      targets[i].shape = tensor.shape;
      targets[i].data = data[i];
    }
    targets[1].strides_bytes = transposed;
    auto set = Sized<kedge_weight_set>();
    set.targets = targets.data();
    set.target_count = targets.size();
    auto options = Sized<kedge_reader_options>();
    options.store_path = store_.c_str();
    options.device = device;
    options.stream = stream;
    options.device_stage_bytes = 16 << 20;
    kedge_reader* reader = nullptr;
    EXPECT_C_OK(Call([&](auto** e) {
      return kedge_reader_open(&options, &set, 1, &reader, e);
    }));
    engine->reader.reset(reader);
  }
  bool Holds(const Engine& engine) const {
    for (std::uint64_t r = 0; r < kRows; ++r) {
      for (std::uint64_t c = 0; c < kCols; ++c) {
        if (engine.up_t[c * kRows + r] !=
            gate_up_source_[kElements + r * kCols + c]) {
          return false;
        }
      }
    }
    return std::equal(engine.gate.begin(), engine.gate.end(),
                      gate_up_source_.begin()) &&
           Equal(engine.norm, norm_source_) && Equal(engine.embed, frozen_) &&
           Equal(engine.buffer, buffer_);
  }

  ScratchDirectory directory_;
  const std::string store_ = directory_.Join("store");
  std::mt19937 random_{kSeed};
  const std::uint64_t matrix_shape_[2] = {kRows, kCols};
  const std::uint64_t norm_shape_[1] = {kNorm};
  const std::uint64_t frozen_shape_[1] = {5};
  const std::uint64_t buffer_shape_[1] = {3};
  // On the device:
  DeviceVector<std::uint16_t> gate_up_ =
      DeviceVector<std::uint16_t>(2 * kElements);
  DeviceVector<std::uint16_t> replica_;
  DeviceVector<float> norm_ = DeviceVector<float>(kNorm, 1.0f);
  DeviceVector<std::uint16_t> frozen_ = DeviceVector<std::uint16_t>(5);
  // On the host:
  std::array<std::int64_t, 3> buffer_ = {10, 20, 30};
  std::vector<std::uint16_t> gate_up_source_;
  std::vector<float> norm_source_;

  const void* replicas_[1] = {nullptr};
  kedge_writer_options writer_options_;
  std::array<kedge_parameter, 3> parameters_;
  std::array<kedge_tensor, 4> tensors_;
  kedge_tensor residual_;
  kedge_hook_options hook_options_;
  HookHandle hook_;
};

TEST_F(CapiDeviceLoopTest, EnginesOnADeviceFollowAHookedTrainer) {
  DeviceHandle device = OpenDevice();
  OpenHook(device.get());
  ASSERT_NE(hook_, nullptr);
  auto memory = Sized<kedge_hook_memory>();
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_hook_get_memory(hook_.get(), &memory, e);
  }));
  EXPECT_GE(memory.device_bytes, hook_options_.ring_bytes);
  EXPECT_GE(memory.residual_bytes, sizeof(buffer_));
  ASSERT_EQ(memory.residual_count, 1u);
  EXPECT_STREQ(memory.residual[0].name, "inv_freq");
  EXPECT_EQ(memory.residual[0].bytes, sizeof(buffer_));

  // The reader has a device of its own, which is freed under it.
  DeviceHandle reader_device = OpenDevice();
  Engine engine;
  OpenReader(reader_device.get(), nullptr, &engine);
  reader_device.reset();
  ASSERT_NE(engine.reader, nullptr);
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_reader_join(engine.reader.get(), nullptr, e);
  }));
  EXPECT_TRUE(Holds(engine));

  void* stream = nullptr;
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_device_create_stream(device.get(), &stream, e);
  }));
  for (std::uint64_t step = 1; step <= 4; ++step) {
    SCOPED_TRACE(testing::Message() << "step " << step << ", seed " << kSeed);
    Train();
    const bool anchor = step == 3;
    ASSERT_C_OK(BeginStep(step, anchor));
    Update(stream);
    auto published = Sized<kedge_publish_result>();
    auto hooked = Sized<kedge_hook_result>();
    ASSERT_C_OK(Publish(&published, &hooked));
    EXPECT_EQ(published.version.step, step);
    EXPECT_EQ(published.anchor_bytes != 0, anchor);
    EXPECT_EQ(published.anchor_status, KEDGE_OK) << published.anchor_message;
    EXPECT_GT(published.nnz, kNorm);
    EXPECT_GE(hooked.guard_bytes, 2 * gate_up_.size());
    EXPECT_GT(hooked.commit_seconds, 0);
    kedge_version_id held;
    ASSERT_C_OK(
        Call([&](auto** e) { return kedge_hook_held(hook_.get(), &held, e); }));
    EXPECT_EQ(held.step, step);
    EXPECT_TRUE(Equal(gate_up_, gate_up_source_));

    auto updated = Sized<kedge_update_result>();
    ASSERT_C_OK(Call([&](auto** e) {
      return kedge_reader_update(engine.reader.get(), &updated, e);
    }));
    EXPECT_EQ(updated.version.step, step);
    EXPECT_EQ(updated.tensors_verified, 5u);
    EXPECT_TRUE(Holds(engine));
  }
  // A trainer that starts again from its weights of step 4, and an engine that
  // comes late: from the anchor that passed by.
  hook_.reset();
  kedge_hook* hook = nullptr;
  const std::uint64_t resume_step = 4;
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_hook_open(&writer_options_, &hook_options_, &resume_step,
                           &hook, e);
  }));
  hook_.reset(hook);
  Train();
  ASSERT_C_OK(BeginStep(5));
  Update(stream);
  ASSERT_C_OK(Publish());
  Engine late;
  OpenReader(nullptr, nullptr, &late);
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_reader_join(late.reader.get(), nullptr, e);
  }));
  EXPECT_TRUE(Holds(late));
  // The device goes before the hook; the stream goes with it.
  device.reset();
  hook_.reset();
}

TEST_F(CapiDeviceLoopTest, MisuseOfAHookIsSaid) {
  DeviceHandle device = OpenDevice();
  OpenHook(device.get());
  ASSERT_NE(hook_, nullptr);
  std::uint64_t ticket = 7;
  const auto send_norm = [&] {
    return OnUpdate(1, 0, 4 * kNorm, norm_source_.data(), nullptr, &ticket);
  };
  EXPECT_C_FAILS(send_norm(), KEDGE_FAILED_PRECONDITION, "");
  EXPECT_C_FAILS(BeginStep(2), KEDGE_INVALID_ARGUMENT, "2");
  Train();
  ASSERT_C_OK(BeginStep(1));
  EXPECT_C_FAILS(BeginStep(1), KEDGE_FAILED_PRECONDITION, "");
  EXPECT_C_FAILS(OnUpdate(3, 0, 4, norm_source_.data(), nullptr, &ticket),
                 KEDGE_INVALID_ARGUMENT, "3");
  EXPECT_C_FAILS(OnUpdate(1, 0, 4 * kNorm, nullptr, nullptr, &ticket),
                 KEDGE_INVALID_ARGUMENT, "pinned_source");
  EXPECT_C_FAILS(
      OnUpdate(1, 4, 4 * kNorm, norm_source_.data(), nullptr, &ticket),
      KEDGE_INVALID_ARGUMENT, "norm");
  EXPECT_C_OK(send_norm());
  // Half of a parameter was never written.
  EXPECT_C_OK(
      OnUpdate(0, 0, 2 * kElements, gate_up_source_.data(), nullptr, &ticket));
  EXPECT_C_FAILS(EndStep(), KEDGE_FAILED_PRECONDITION, "mlp.gate_up");
  EXPECT_C_FAILS(Publish(), KEDGE_FAILED_PRECONDITION, "");
  kedge_version_id held;
  ASSERT_C_OK(
      Call([&](auto** e) { return kedge_hook_held(hook_.get(), &held, e); }));
  EXPECT_EQ(held.step, 0u);
}

TEST_F(CapiDeviceLoopTest, WeightsChangedOutsideTheStepAreNotPublished) {
  DeviceHandle device = OpenDevice();
  OpenHook(device.get());
  ASSERT_NE(hook_, nullptr);
  Train();
  ASSERT_C_OK(BeginStep(1));
  Update(nullptr);
  norm_[7] += 1;
  EXPECT_C_FAILS(Publish(), KEDGE_FAILED_PRECONDITION, "norm");
  norm_[7] = norm_source_[7];
  ASSERT_C_OK(Publish());
}

TEST_F(CapiDeviceLoopTest, Fp8EnginesGetValuesAndScales) {
  // A matrix of ones with a single 0.5: amax 1, scale 1 / 448, ones are 448.
  DeviceVector<std::uint16_t> weights(2 * 128, 0x3f80);
  std::vector<std::uint16_t> source(weights.begin(), weights.end());
  const std::uint64_t shape[2] = {2, 128};
  auto parameter = Sized<kedge_parameter>();
  parameter.name = "p";
  parameter.data = weights.data();
  parameter.bytes = 2 * weights.size();
  auto tensor = Sized<kedge_tensor>();
  tensor.name = "w";
  tensor.dtype = KEDGE_BF16;
  tensor.dimensions = 2;
  tensor.shape = shape;
  tensor.data = weights.data();
  auto quantised = Sized<kedge_quantised_tensor>();
  quantised.tensor = "w";
  quantised.scales = "w_scale_inv";
  DeviceHandle device = OpenDevice();
  auto options = Sized<kedge_hook_options>();
  options.device = device.get();
  options.parameters = &parameter;
  options.parameter_count = 1;
  options.tensors = &tensor;
  options.tensor_count = 1;
  options.quantised = &quantised;
  options.quantised_count = 1;
  options.chunk_bytes = 4096;
  options.ring_bytes = 1 << 20;
  kedge_hook* hook = nullptr;
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_hook_create(&writer_options_, nullptr, &options, &hook, e);
  }));
  hook_.reset(hook);
  source[130] = 0x3f00;  // 0.5
  ASSERT_C_OK(BeginStep(1));
  std::uint64_t ticket = 0;
  ASSERT_C_OK(
      OnUpdate(0, 0, 2 * source.size(), source.data(), nullptr, &ticket));
  ASSERT_C_OK(EndStep());
  ASSERT_C_OK(Publish());

  std::vector<std::uint8_t> values(256, 0xaa);
  float scale = -1;
  const std::uint64_t scale_shape[2] = {1, 1};
  kedge_target targets[2] = {Sized<kedge_target>(), Sized<kedge_target>()};
  targets[0].name = "w";
  targets[0].dtype = KEDGE_F8_E4M3;
  targets[0].dimensions = 2;
  targets[0].shape = shape;
  targets[0].data = values.data();
  targets[1].name = "w_scale_inv";
  targets[1].dtype = KEDGE_F32;
  targets[1].dimensions = 2;
  targets[1].shape = scale_shape;
  targets[1].data = &scale;
  auto set = Sized<kedge_weight_set>();
  set.targets = targets;
  set.target_count = 2;
  auto reader_options = Sized<kedge_reader_options>();
  reader_options.store_path = store_.c_str();
  kedge_reader* opened = nullptr;
  ASSERT_C_OK(Call([&](auto** e) {
    return kedge_reader_open(&reader_options, &set, 1, &opened, e);
  }));
  const ReaderHandle reader(opened);
  ASSERT_C_OK(Call(
      [&](auto** e) { return kedge_reader_join(reader.get(), nullptr, e); }));
  EXPECT_EQ(scale, 1.0f / 448.0f);
  std::vector<std::uint8_t> expected(256, 0x7e);  // 448
  expected[130] = 0x76;                           // 224
  EXPECT_EQ(values, expected);
}

}  // namespace
}  // namespace kedge
