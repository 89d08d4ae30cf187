/*
 * Stand-in for a header that TensorFlow no longer has, so that BytePS 0.2.5's plugin compiles, unchanged, against
 * TensorFlow 2.15 without a GPU. Part of the test bed, never of dpro.
 *
 * byteps/tensorflow/ops.h includes it behind TensorFlow's own headers and before BytePS uses them. So the names that
 * were dropped or changed since are given here: as classes where BytePS makes objects of them, and as macros, which
 * reach the rest of that one source file and nothing else, where the name was a member of a class of TensorFlow.
 */
#pragma once
#include "byteps/common/operations.h"  // BytePS' own, before the macros below can reach into it

extern "C" int hostcuda_device();  // hostcuda.c: 0, once the records of the push before are finished

namespace tensorflow {

// tensorflow::Status had a static OK(); absl::Status, which took its place, has none and is final.
class StatusWithOK {
 public:
  StatusWithOK(const Status& status) : status_(status) {}
  static StatusWithOK OK() { return OkStatus(); }
  operator const Status&() const { return status_; }
  bool ok() const { return status_.ok(); }

 private:
  Status status_;
};

// BytePS records an event on the stream of a GPU op. An op of the CPU has no device context, so none of it ever runs.
struct NoStream {
  int parent() { return 0; }
  void ThenRecordEvent(void*) {}
};
struct NoDeviceContext : DeviceContext {
  NoStream* stream() { return nullptr; }
};

}  // namespace tensorflow

namespace perftools {
namespace gputools {
struct Event {
  enum class StatusWithOK { kPending, kComplete };
  explicit Event(int) {}
  bool Init() { return true; }
  StatusWithOK PollForStatus() { return StatusWithOK::kComplete; }
};
}  // namespace gputools
}  // namespace perftools

// The macro for tensorflow::Status meets BytePS' own class of that name as well.
namespace byteps {
namespace common {
using StatusWithOK = Status;
}
}  // namespace byteps

#define Status StatusWithOK
#define DeviceContext NoDeviceContext
#define op_device_context() op_device_context<::tensorflow::NoDeviceContext>()

// device()->tensorflow_gpu_device_info()->gpu_id: never null, and "device 0". Not "no GPU": for a tensor of the CPU
// BytePS copies the result into the op's input, which under MXNet is the output too, but not under TensorFlow.
#define tensorflow_gpu_device_info tensorflow_cpu_worker_threads
#define gpu_id num_threads * 0 + hostcuda_device()
