// A CUDA device for PyTorch's CPU build that computes nothing, so that autograd runs on fake CUDA tensors.
//
// The autograd engine asks the device of a tensor for streams and events. The CPU build registers no CUDA device; these
// two registrations are of one device whose only stream is complete at all times. Load the library before PyTorch.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

struct FakeGuard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  c10::Stream getStream(Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, at::FakeGuard)
