/* NVIDIA's driver as far as CUDA packages ask for it when they are imported and configured: compiled twice, as
 * libcuda.so.1, whose functions all answer that there is no device, and as libnvidia-ml.so.1, which describes the cards
 * of the variables FAKE_GPU_* of the environment (tools/gpu_proof/fake_gpu.py). Nothing computes. */
#include <stdio.h>
#include <stdlib.h>

#define NO_DEVICE(name) \
  int name(void) { return 100; }
#include "symbols.h" /* what the installed wheels, and Triton's own module, need of libcuda */

static const char *variable(const char *name) {
  const char *value = getenv(name);
  return value ? value : "0";
}

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = atoi(variable("FAKE_GPU_COUNT")), 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, size_t *handle) { return *handle = index + 1, 0; }
int nvmlDeviceGetName(size_t handle, char *name, unsigned size) {
  return snprintf(name, size, "%s", variable("FAKE_GPU_NAME")), 0;
}
int nvmlDeviceGetCudaComputeCapability(size_t handle, int *major, int *minor) {
  int both = atoi(variable("FAKE_GPU_CAPABILITY"));
  return *major = both / 10, *minor = both % 10, 0;
}
int nvmlDeviceGetMemoryInfo(size_t handle, unsigned long long sizes[3]) { /* total, free, used */
  return sizes[0] = sizes[1] = strtoull(variable("FAKE_GPU_BYTES"), 0, 10), sizes[2] = 0, 0;
}
int nvmlDeviceGetP2PStatus(size_t a, size_t b, int index, int *status) { return *status = 0, 0; } /* NVLink */
