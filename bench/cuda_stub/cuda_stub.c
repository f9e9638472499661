/* A stub of the CUDA driver, the CUDA runtime, cuBLAS, cuDNN and NCCL, for machines without a GPU.

   Programs run as on H200s: device memory is memory of the host that is reserved but not touched, kernels and collectives
   do nothing, and what a GPU would be asked to do is counted. Results are whatever the memory holds, mostly zeros.
   What the CUDA documentation forbids is refused: waiting while a graph is captured, more memory than the device has,
   tensor maps that are not aligned.

   build.py adds stub_functions.h: every other function that torch links, as one that returns 0 (success). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, OUT_OF_MEMORY = 2, CAPTURE_UNSUPPORTED = 900 };
enum { DEVICES = 8, MEGABYTE = 1 << 20 };
static const long long DEVICE_MEMORY = 150754820096LL; /* bytes, as an H200 reports them */

/* ---- Counts and log: read by step_counts.py through ctypes ---- */

typedef struct {
  long launches, products, collectives, waits, copies_to_host, copies_to_device, pageable_copies, allocations, graph_launches;
} Counts;
static Counts counts;
static FILE *log_file;
static int capturing; /* whether a stream is being captured into a graph */

static void write_log(const char *kind, const char *what) {
  if (log_file) fprintf(log_file, "%s\t%s\t%s\n", capturing ? "captured" : "", kind, what);
}
EXPORT void cuda_stub_counts(Counts *result) { *result = counts; }
EXPORT void cuda_stub_log(const char *path) { /* An empty path ends the log. */
  if (log_file) fclose(log_file);
  log_file = *path ? fopen(path, "w") : NULL;
}

static __thread int last_error, current_device;
static int fail(int error) { return last_error = error; }
static void *new_handle(void) {
  static uintptr_t next = 4096;
  return (void *)__sync_add_and_fetch(&next, 16);
}
static int wait_for_device(const char *what) {
  if (capturing) {
    fprintf(stderr, "cuda_stub: %s while a graph is captured\n", what);
    return fail(CAPTURE_UNSUPPORTED);
  }
  counts.waits++;
  write_log("wait", what);
  return SUCCESS;
}

/* ---- Memory ---- */

typedef struct Block {
  char *start;
  size_t size;
  int device;           /* -1: pinned memory of the host */
  size_t device_memory; /* 0 of a range of addresses, whose handles have it */
  struct Block *next;
} Block;
static Block *blocks;
static long long used[DEVICES];
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;

static void *reserve(size_t size, int device, int has_memory) {
  size = (size + 2 * MEGABYTE - 1) / (2 * MEGABYTE) * (2 * MEGABYTE);
  size_t device_memory = device >= 0 && has_memory ? size : 0;
  pthread_mutex_lock(&blocks_lock);
  char *start = NULL;
  if (!device_memory || used[device] + (long long)size <= DEVICE_MEMORY)
    start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start && start != MAP_FAILED) {
    Block *block = malloc(sizeof *block);
    *block = (Block){start, size, device, device_memory, blocks};
    blocks = block;
    if (device_memory) used[device] += device_memory;
  }
  pthread_mutex_unlock(&blocks_lock);
  return start == MAP_FAILED ? NULL : start;
}
static void release(void *start) {
  pthread_mutex_lock(&blocks_lock);
  for (Block **at = &blocks; *at; at = &(*at)->next)
    if ((*at)->start == start) {
      Block *block = *at;
      *at = block->next;
      if (block->device_memory) used[block->device] -= block->device_memory;
      munmap(block->start, block->size);
      free(block);
      break;
    }
  pthread_mutex_unlock(&blocks_lock);
}
static Block *block_of(const void *address) {
  pthread_mutex_lock(&blocks_lock);
  Block *block = blocks;
  while (block && ((char *)address < block->start || (char *)address >= block->start + block->size)) block = block->next;
  pthread_mutex_unlock(&blocks_lock);
  return block;
}
static int on_device(const void *address) {
  Block *block = block_of(address);
  return block && block->device >= 0;
}
static int allocate(void **result, size_t size, int device) {
  *result = size ? reserve(size, device, 1) : NULL;
  return size && !*result ? fail(OUT_OF_MEMORY) : SUCCESS;
}
EXPORT int cudaMalloc(void **result, size_t size) {
  counts.allocations++;
  write_log("allocation", "");
  return allocate(result, size, current_device);
}
EXPORT int cudaMallocAsync(void **result, size_t size, void *stream) { return cudaMalloc(result, size); }
EXPORT int cudaMallocManaged(void **result, size_t size, unsigned flags) { return cudaMalloc(result, size); }
EXPORT int cudaHostAlloc(void **result, size_t size, unsigned flags) { return allocate(result, size, -1); }
EXPORT int cudaMallocHost(void **result, size_t size) { return allocate(result, size, -1); }
EXPORT int ncclMemAlloc(void **result, size_t size) { return cudaMalloc(result, size); }
EXPORT int cuMemAlloc_v2(void **result, size_t size) { return cudaMalloc(result, size); }
EXPORT int cudaFree(void *address) { return release(address), SUCCESS; }
EXPORT int cudaFreeAsync(void *address, void *stream) { return cudaFree(address); }
EXPORT int cudaFreeHost(void *address) { return cudaFree(address); }
EXPORT int ncclMemFree(void *address) { return cudaFree(address); }
EXPORT int cuMemFree_v2(void *address) { return cudaFree(address); }
EXPORT int cudaGetSymbolAddress(void **result, const void *symbol) { return allocate(result, 4096, current_device); }
EXPORT int cuModuleGetGlobal_v2(void **result, size_t *size, void *module, const char *name) {
  if (size) *size = 8;
  return allocate(result, 4096, current_device);
}
EXPORT int cudaMemGetInfo(size_t *free, size_t *total) {
  *total = DEVICE_MEMORY;
  *free = DEVICE_MEMORY - used[current_device];
  return SUCCESS;
}
EXPORT int cudaPointerGetAttributes(struct cudaPointerAttributes *result, void *address) {
  Block *block = block_of(address);
  memset(result, 0, sizeof *result);
  result->type = !block ? cudaMemoryTypeUnregistered : block->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  result->device = block && block->device >= 0 ? block->device : 0;
  result->devicePointer = block ? address : NULL;
  result->hostPointer = block && block->device < 0 ? address : NULL;
  return SUCCESS;
}
EXPORT int cuPointerGetAttribute(void *result, int attribute, void *address) {
  switch (attribute) {
    case 2: *(unsigned *)result = on_device(address) ? 2 : 1; break; /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
    case 3: case 4: *(void **)result = address; break;               /* DEVICE_POINTER, HOST_POINTER */
    default: *(unsigned *)result = 0;
  }
  return SUCCESS;
}
EXPORT int cuPointerGetAttributes(unsigned number, int *attributes, void **results, void *address) {
  for (unsigned i = 0; i < number; i++) cuPointerGetAttribute(results[i], attributes[i], address);
  return SUCCESS;
}
EXPORT int cuMemGetAddressRange_v2(void **start, size_t *size, void *address) {
  Block *block = block_of(address);
  if (!block) return 1;
  *start = block->start;
  *size = block->size;
  return SUCCESS;
}

/* ---- Ranges of addresses, to which memory is mapped: expandable segments of torch's allocator ---- */

typedef struct {
  size_t size;
  int device;
} Handle;
EXPORT int cuMemGetAllocationGranularity(size_t *result, const void *properties, int option) {
  *result = 2 * MEGABYTE;
  return SUCCESS;
}
EXPORT int cuMemAddressReserve(void **result, size_t size, size_t alignment, void *address, unsigned long long flags) {
  *result = reserve(size, current_device, 0);
  return *result ? SUCCESS : OUT_OF_MEMORY;
}
EXPORT int cuMemAddressFree(void *address, size_t size) { return release(address), SUCCESS; }
EXPORT int cuMemCreate(Handle **result, size_t size, const int *properties, unsigned long long flags) {
  int device = properties[3]; /* CUmemAllocationProp: type, kind of handle, kind of location, number of the device */
  pthread_mutex_lock(&blocks_lock);
  int fits = used[device] + (long long)size <= DEVICE_MEMORY;
  if (fits) used[device] += size;
  pthread_mutex_unlock(&blocks_lock);
  if (!fits) return OUT_OF_MEMORY; /* An error of the driver is none of the runtime. */
  counts.allocations++;
  write_log("allocation", "");
  *result = malloc(sizeof **result);
  **result = (Handle){size, device};
  return SUCCESS;
}
EXPORT int cuMemRelease(Handle *handle) {
  pthread_mutex_lock(&blocks_lock);
  used[handle->device] -= handle->size;
  pthread_mutex_unlock(&blocks_lock);
  return free(handle), SUCCESS;
}

/* Whether memory can be shared between nodes, which torch looks up in NVML for such segments: it cannot. */
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **result) { return *result = new_handle(), SUCCESS; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, void *result) { return 3; } /* NVML_ERROR_NOT_SUPPORTED */

static void copy(void *to, const void *from, size_t size) {
  int to_host = on_device(from) && !on_device(to), to_device = on_device(to) && !on_device(from);
  char text[64];
  snprintf(text, sizeof text, "%s %zu", to_host ? "to host" : to_device ? "to device" : "on device", size);
  write_log("copy", text);
  counts.copies_to_host += to_host;
  counts.copies_to_device += to_device;
  /* Large tensors have no values that matter, and their pages stay untouched. */
  if (size <= (to_host || to_device ? 16 * MEGABYTE : 4096)) memmove(to, from, size);
}
EXPORT int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  copy(to, from, size);
  return wait_for_device("cudaMemcpy");
}
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  int crosses = on_device(from) != on_device(to);
  if (crosses && !block_of(on_device(from) ? to : from)) {
    counts.pageable_copies++; /* The host waits until such memory has been read or written. */
    write_log("pageable copy", on_device(from) ? "to host" : "to device");
  }
  copy(to, from, size);
  return SUCCESS;
}
EXPORT int cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t size, void *stream) {
  copy(to, from, size);
  return SUCCESS;
}
EXPORT int cudaMemsetAsync(void *address, int value, size_t size, void *stream) {
  write_log("memset", "");
  if (size <= MEGABYTE) memset(address, value, size);
  return SUCCESS;
}
EXPORT int cudaMemset(void *address, int value, size_t size) { return cudaMemsetAsync(address, value, size, NULL); }

/* ---- The device ---- */

static int attribute(int number) { /* cudaDeviceAttr and CUdevice_attribute have the same numbers. */
  switch (number) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrClockRate: return 1980000;       /* kHz */
    case cudaDevAttrMemoryClockRate: return 3201000; /* kHz */
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrL2CacheSize: return 50 * MEGABYTE;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: return 1;
    default: return 0;
  }
}
EXPORT int cudaGetDeviceProperties(struct cudaDeviceProp *result, int device) {
  memset(result, 0, sizeof *result);
  strcpy(result->name, "NVIDIA H200 (stub)");
  result->uuid.bytes[0] = device + 1;
  result->totalGlobalMem = DEVICE_MEMORY;
  result->major = attribute(cudaDevAttrComputeCapabilityMajor);
  result->warpSize = attribute(cudaDevAttrWarpSize);
  result->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  result->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  result->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  result->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  result->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  result->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  result->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  result->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  result->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  result->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  result->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  for (int i = 0; i < 3; i++) {
    result->maxThreadsDim[i] = attribute(cudaDevAttrMaxBlockDimX + i);
    result->maxGridSize[i] = attribute(cudaDevAttrMaxGridDimX + i);
  }
  result->textureAlignment = 512;
  result->concurrentKernels = result->unifiedAddressing = 1;
  return SUCCESS;
}
EXPORT int cudaGetDeviceProperties_v2(struct cudaDeviceProp *result, int device) {
  return cudaGetDeviceProperties(result, device);
}
EXPORT int cudaDeviceGetAttribute(int *result, int number, int device) { return *result = attribute(number), SUCCESS; }
EXPORT int cuDeviceGetAttribute(int *result, int number, int device) { return *result = attribute(number), SUCCESS; }
EXPORT int cudaGetDeviceCount(int *result) {
  const char *given = getenv("CUDA_STUB_DEVICES");
  int number = given ? atoi(given) : 1;
  return *result = number < 1 ? 1 : number > DEVICES ? DEVICES : number, SUCCESS;
}
EXPORT int cuDeviceGetCount(int *result) { return cudaGetDeviceCount(result); }
EXPORT int cudaGetDevice(int *result) { return *result = current_device, SUCCESS; }
EXPORT int cudaSetDevice(int device) { return current_device = device, SUCCESS; }
EXPORT int cuDeviceGet(int *result, int number) { return *result = number, SUCCESS; }
EXPORT int cudaDriverGetVersion(int *result) { return *result = CUDA_VERSION, SUCCESS; }
EXPORT int cudaRuntimeGetVersion(int *result) { return *result = CUDA_VERSION, SUCCESS; }
EXPORT int cuDriverGetVersion(int *result) { return *result = CUDA_VERSION, SUCCESS; }
EXPORT int cudaDeviceGetPCIBusId(char *result, int size, int device) {
  return snprintf(result, size, "0000:%02x:00.0", device), SUCCESS;
}
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return SUCCESS;
}
EXPORT int cudaDeviceCanAccessPeer(int *result, int device, int peer) { return *result = 1, SUCCESS; }
EXPORT int cuDeviceTotalMem_v2(size_t *result, int device) { return *result = DEVICE_MEMORY, SUCCESS; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
EXPORT int cuDevicePrimaryCtxRetain(void **result, int device) { return *result = new_handle(), SUCCESS; }
EXPORT int cuCtxGetCurrent(void **result) { return *result = (void *)1, SUCCESS; }
EXPORT int cuCtxGetDevice(int *result) { return *result = current_device, SUCCESS; }
EXPORT int cuStreamGetCtx(void *stream, void **result) { return *result = (void *)1, SUCCESS; }
EXPORT int cuCtxGetLimit(size_t *result, int limit) { return *result = 0, SUCCESS; }
EXPORT int cudaDeviceSynchronize(void) { return wait_for_device("cudaDeviceSynchronize"); }
EXPORT int cudaPeekAtLastError(void) { return last_error; }
EXPORT int cudaGetLastError(void) {
  int error = last_error;
  last_error = SUCCESS;
  return error;
}
EXPORT const char *cudaGetErrorString(int error) {
  return error == OUT_OF_MEMORY ? "out of memory"
         : error == CAPTURE_UNSUPPORTED ? "operation not permitted when stream is capturing"
                                        : "no error";
}
EXPORT const char *cudaGetErrorName(int error) { return cudaGetErrorString(error); }
EXPORT int cuGetErrorString(int error, const char **result) { return *result = cudaGetErrorString(error), SUCCESS; }
EXPORT int cuGetErrorName(int error, const char **result) { return *result = cudaGetErrorString(error), SUCCESS; }

/* ---- Streams, graphs and events ---- */

EXPORT int cudaStreamCreate(void **result) { return *result = new_handle(), SUCCESS; }
EXPORT int cudaStreamCreateWithFlags(void **result, unsigned flags) { return *result = new_handle(), SUCCESS; }
EXPORT int cudaStreamCreateWithPriority(void **result, unsigned flags, int priority) {
  return *result = new_handle(), SUCCESS;
}
EXPORT int cudaStreamGetPriority(void *stream, int *result) { return *result = 0, SUCCESS; }
EXPORT int cudaStreamSynchronize(void *stream) { return wait_for_device("cudaStreamSynchronize"); }
EXPORT int cudaStreamQuery(void *stream) { return capturing ? fail(CAPTURE_UNSUPPORTED) : SUCCESS; }
EXPORT int cudaStreamIsCapturing(void *stream, int *result) { return *result = capturing, SUCCESS; }
EXPORT int cuStreamIsCapturing(void *stream, int *result) { return *result = capturing, SUCCESS; }
static unsigned long long capture_number;
EXPORT int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *number, void **graph,
                                    const void ***nodes, const void **edges, size_t *size) {
  *status = capturing;
  if (number) *number = capture_number;
  if (graph) *graph = (void *)1;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (size) *size = 0;
  return SUCCESS;
}
EXPORT int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *number, void **graph,
                                       const void ***nodes, size_t *size) {
  return cudaStreamGetCaptureInfo(stream, status, number, graph, nodes, NULL, size);
}
EXPORT int cudaStreamBeginCapture(void *stream, int mode) { return capturing = 1, capture_number++, SUCCESS; }
EXPORT int cudaStreamEndCapture(void *stream, void **result) { return capturing = 0, *result = new_handle(), SUCCESS; }
EXPORT int cudaGraphInstantiate(void **result, void *graph, unsigned long long flags) { return *result = new_handle(), SUCCESS; }
EXPORT int cudaGraphInstantiateWithFlags(void **result, void *graph, unsigned long long flags) {
  return *result = new_handle(), SUCCESS;
}
EXPORT int cudaGraphGetNodes(void *graph, void **nodes, size_t *size) { return *size = 1, SUCCESS; }
EXPORT int cudaGraphLaunch(void *graph, void *stream) {
  counts.graph_launches++;
  write_log("graph", "");
  return SUCCESS;
}
EXPORT int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
  if (!capturing) function(argument);
  return SUCCESS;
}

typedef struct timespec Event; /* the time of its record */
EXPORT int cudaEventCreateWithFlags(Event **result, unsigned flags) { return *result = calloc(1, sizeof(Event)), SUCCESS; }
EXPORT int cudaEventCreate(Event **result) { return cudaEventCreateWithFlags(result, 0); }
EXPORT int cudaEventDestroy(Event *event) { return free(event), SUCCESS; }
EXPORT int cudaEventRecord(Event *event, void *stream) { return clock_gettime(CLOCK_MONOTONIC, event), SUCCESS; }
EXPORT int cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
EXPORT int cudaEventSynchronize(Event *event) { return wait_for_device("cudaEventSynchronize"); }
EXPORT int cudaEventElapsedTime(float *milliseconds, Event *start, Event *end) {
  *milliseconds = (end->tv_sec - start->tv_sec) * 1e3f + (end->tv_nsec - start->tv_nsec) / 1e6f;
  return SUCCESS;
}

/* ---- Kernels ---- */

enum { NAMES = 1 << 20 };
static struct {
  const void *function;
  const char *name;
} names[NAMES]; /* a hash table with open addressing */
static unsigned place_of(const void *function) {
  unsigned place = (uintptr_t)function * 0x9E3779B97F4A7C15ULL >> 44;
  while (names[place].function && names[place].function != function) place = (place + 1) % NAMES;
  return place;
}
static void set_name(const void *function, const char *name) {
  unsigned place = place_of(function);
  names[place].function = function;
  names[place].name = name;
}
static int launch(const void *function) {
  const char *name = names[place_of(function)].name;
  counts.launches++;
  write_log("kernel", name ? name : "without a name");
  return SUCCESS;
}
typedef struct {
  unsigned x, y, z;
} Dimensions;
static __thread struct {
  Dimensions grid, block;
  size_t shared;
  void *stream;
} configuration; /* of the launch that follows */

EXPORT void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}
EXPORT void __cudaRegisterFunction(void **handle, const char *function, char *on_device, const char *name) {
  set_name(function, name);
}
EXPORT unsigned __cudaPushCallConfiguration(Dimensions grid, Dimensions block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return SUCCESS;
}
EXPORT int __cudaPopCallConfiguration(Dimensions *grid, Dimensions *block, size_t *shared, void **stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return SUCCESS;
}
EXPORT int __cudaGetKernel(const void **result, const void *function) { return *result = function, SUCCESS; }
EXPORT int __cudaLaunchKernel(const void *kernel, Dimensions grid, Dimensions block) { return launch(kernel); }
EXPORT int cudaLaunchKernel(const void *function, Dimensions grid, Dimensions block) { return launch(function); }
EXPORT int cudaLaunchCooperativeKernel(const void *function, Dimensions grid, Dimensions block) { return launch(function); }
EXPORT int cudaLaunchKernelExC(const void *config, const void *function) { return launch(function); }
EXPORT int cuLaunchKernel(const void *function) { return launch(function); }
EXPORT int cuLaunchCooperativeKernel(const void *function) { return launch(function); }
EXPORT int cuLaunchKernelEx(const void *config, const void *function) { return launch(function); }
EXPORT int cuModuleLoad(void **result, const char *path) { return *result = new_handle(), SUCCESS; }
EXPORT int cuModuleLoadData(void **result, const void *image) { return *result = new_handle(), SUCCESS; }
EXPORT int cuModuleLoadDataEx(void **result, const void *image) { return *result = new_handle(), SUCCESS; }
EXPORT int cuModuleGetFunction(void **result, void *module, const char *name) {
  *result = new_handle();
  set_name(*result, strdup(name));
  return SUCCESS;
}
EXPORT int cudaFuncGetAttributes(struct cudaFuncAttributes *result, const void *function) {
  memset(result, 0, sizeof *result);
  result->maxThreadsPerBlock = 1024;
  result->numRegs = 64;
  result->binaryVersion = result->ptxVersion = 90;
  result->maxDynamicSharedSizeBytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return SUCCESS;
}
EXPORT int cuFuncGetAttribute(int *result, int number, void *function) {
  return *result = number == 0 ? 1024 : number == 4 ? 64 : 0, SUCCESS; /* threads of a block, registers of a thread */
}
EXPORT int cuOccupancyMaxActiveClusters(int *result, void *function, void *config) { return *result = 66, SUCCESS; }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *result) { return *result = 2, SUCCESS; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *result) { return *result = 2, SUCCESS; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *result) { return *result = 2, SUCCESS; }
EXPORT int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *sizes,
                                  const uint64_t *strides, const uint32_t *box) {
  int refused = (uintptr_t)address % 16 != 0;
  for (unsigned i = 0; i < rank; i++) refused |= !sizes[i] || !box[i] || box[i] > 256 || (i + 1 < rank && strides[i] % 16);
  if (refused) fprintf(stderr, "cuda_stub: a tensor map that is not aligned, or too large\n");
  return refused;
}
static int do_nothing(void) { return SUCCESS; }
EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **result, unsigned version, unsigned long long flags,
                                            int *status) {
  *result = dlsym(RTLD_DEFAULT, name);
  if (!*result) *result = do_nothing;
  if (status) *status = SUCCESS;
  return SUCCESS;
}
EXPORT int cudaGetDriverEntryPoint(const char *name, void **result, unsigned long long flags, int *status) {
  return cudaGetDriverEntryPointByVersion(name, result, 0, flags, status);
}
EXPORT int cuGetProcAddress_v2(const char *name, void **result, int version, uint64_t flags, int *status) {
  return cudaGetDriverEntryPointByVersion(name, result, version, flags, status);
}

/* ---- cuBLAS ---- */

static int product(long m, long n, long k, long lda, long ldb, long ldc) {
  char text[160];
  snprintf(text, sizeof text, "m=%ld n=%ld k=%ld lda=%ld ldb=%ld ldc=%ld", m, n, k, lda, ldb, ldc);
  counts.products++;
  write_log("product", text);
  return SUCCESS;
}
typedef const void *Operand;
EXPORT int cublasCreate_v2(void **result) { return *result = new_handle(), SUCCESS; }
EXPORT int cublasGetMathMode(void *handle, int *result) { return *result = 0, SUCCESS; }
EXPORT int cublasGetPointerMode_v2(void *handle, int *result) { return *result = 0, SUCCESS; }
EXPORT int cublasGemmEx(void *handle, int ta, int tb, int m, int n, int k, Operand alpha, Operand a, int a_type, int lda,
                        Operand b, int b_type, int ldb, Operand beta, Operand c, int c_type, int ldc) {
  return product(m, n, k, lda, ldb, ldc);
}
EXPORT int cublasGemmStridedBatchedEx(void *handle, int ta, int tb, int m, int n, int k, Operand alpha, Operand a,
                                      int a_type, int lda, long long a_stride, Operand b, int b_type, int ldb,
                                      long long b_stride, Operand beta, Operand c, int c_type, int ldc) {
  return product(m, n, k, lda, ldb, ldc);
}
EXPORT int cublasSgemm_v2(void *handle, int ta, int tb, int m, int n, int k, Operand alpha, Operand a, int lda, Operand b,
                          int ldb, Operand beta, Operand c, int ldc) {
  return product(m, n, k, lda, ldb, ldc);
}
EXPORT int cublasSgemmEx(void *handle, int ta, int tb, int m, int n, int k, Operand alpha, Operand a, int a_type, int lda,
                         Operand b, int b_type, int ldb, Operand beta, Operand c, int c_type, int ldc) {
  return product(m, n, k, lda, ldb, ldc);
}
typedef struct {
  uint64_t rows, columns;
  int64_t leading;
} MatrixLayout;
EXPORT size_t cublasLtGetVersion(void) { return 130000; }
EXPORT int cublasLtMatrixLayoutCreate(MatrixLayout **result, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  *result = malloc(sizeof **result);
  **result = (MatrixLayout){rows, columns, leading};
  return SUCCESS;
}
EXPORT int cublasLtMatrixLayoutDestroy(MatrixLayout *layout) { return free(layout), SUCCESS; }
EXPORT int cublasLtMatmulDescCreate(void **result, int compute, int scale) { return *result = new_handle(), SUCCESS; }
EXPORT int cublasLtMatmulPreferenceCreate(void **result) { return *result = new_handle(), SUCCESS; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                          void *preference, int requested, char *results, int *found) {
  /* One algorithm, without a workspace: cublasLtMatmulHeuristicResult_t has 96 bytes. */
  memset(results, 0, 96);
  return *found = 1, SUCCESS;
}
EXPORT int cublasLtMatmul(void *handle, void *operation, Operand alpha, Operand a, MatrixLayout *a_layout, Operand b,
                          MatrixLayout *b_layout, Operand beta, Operand c, MatrixLayout *c_layout, Operand d,
                          MatrixLayout *d_layout) {
  return product(d_layout->rows, d_layout->columns, a_layout->columns, a_layout->leading, b_layout->leading,
                 d_layout->leading);
}

/* ---- cuDNN: attention through its graph interface ---- */

enum { CUDNN_TYPE_INT64 = 3, CUDNN_TYPE_BACKEND_DESCRIPTOR = 15 };
EXPORT size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }
EXPORT int cudnnGetProperty(int which, int *result) {
  return *result = which == 0 ? CUDNN_VERSION / 10000 : which == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100, SUCCESS;
}
EXPORT int cudnnCreate(void **result) { return *result = new_handle(), SUCCESS; }
EXPORT const char *cudnnGetErrorString(int status) { return "no error"; }
EXPORT int cudnnBackendCreateDescriptor(int type, void **result) { return *result = new_handle(), SUCCESS; }
EXPORT int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t requested, int64_t *count, void *result) {
  /* One engine with one plan, and 0 for each number: knobs, bytes of workspace. */
  int is_descriptor = type == CUDNN_TYPE_BACKEND_DESCRIPTOR;
  if (count) *count = is_descriptor ? 1 : requested;
  if (result && !is_descriptor && requested > 0) memset(result, 0, requested * (type == CUDNN_TYPE_INT64 ? 8 : 4));
  return SUCCESS;
}
EXPORT int cudnnBackendExecute(void *handle, void *plan, void *operands) {
  counts.launches++;
  write_log("kernel", "cuDNN's attention");
  return SUCCESS;
}

/* ---- NCCL ---- */

static int collective(const char *name) {
  counts.collectives++;
  write_log("collective", name);
  return SUCCESS;
}
EXPORT int ncclGetVersion(int *result) { return *result = 22900, SUCCESS; }
EXPORT int ncclGetUniqueId(char *result) { return memset(result, 0, 128), SUCCESS; }
typedef struct {
  char bytes[128];
} UniqueId;
typedef struct {
  int size, rank;
} Communicator;
static int new_communicator(Communicator **result, int size, int rank) {
  *result = malloc(sizeof **result);
  **result = (Communicator){size, rank};
  return SUCCESS;
}
EXPORT int ncclCommInitRank(Communicator **result, int size, UniqueId id, int rank) {
  return new_communicator(result, size, rank);
}
EXPORT int ncclCommInitRankConfig(Communicator **result, int size, UniqueId id, int rank, void *config) {
  return new_communicator(result, size, rank);
}
EXPORT int ncclCommInitRankScalable(Communicator **result, int size, int rank, int ids, UniqueId *id, void *config) {
  return new_communicator(result, size, rank);
}
EXPORT int ncclCommSplit(Communicator *whole, int color, int key, Communicator **result, void *config) {
  return new_communicator(result, whole->size, whole->rank);
}
EXPORT int ncclCommCount(Communicator *communicator, int *result) { return *result = communicator->size, SUCCESS; }
EXPORT int ncclCommUserRank(Communicator *communicator, int *result) { return *result = communicator->rank, SUCCESS; }
EXPORT int ncclCommGetAsyncError(Communicator *communicator, int *result) { return *result = SUCCESS, SUCCESS; }
EXPORT int ncclCommRegister(Communicator *communicator, void *buffer, size_t size, void **result) {
  return *result = new_handle(), SUCCESS;
}
EXPORT const char *ncclGetErrorString(int error) { return "no error"; }
EXPORT const char *ncclGetLastError(Communicator *communicator) { return "no error"; }
EXPORT int ncclAllReduce(void) { return collective("all-reduce"); }
EXPORT int ncclAllGather(void) { return collective("all-gather"); }
EXPORT int ncclReduceScatter(void) { return collective("reduce-scatter"); }
EXPORT int ncclBroadcast(void) { return collective("broadcast"); }
EXPORT int ncclReduce(void) { return collective("reduce"); }
EXPORT int ncclAlltoAll(void) { return collective("all-to-all"); }
EXPORT int ncclSend(void) { return collective("send"); }
EXPORT int ncclRecv(void) { return collective("receive"); }

/* ---- CUPTI: a profile without records ---- */

EXPORT int cuptiGetVersion(unsigned *result) { return *result = 130000, SUCCESS; }
EXPORT int cuptiGetResultString(int error, const char **result) { return *result = "no error", SUCCESS; }
EXPORT int cuptiGetCallbackName(int domain, unsigned number, const char **result) { return *result = "", SUCCESS; }
EXPORT int cuptiActivityGetNextRecord(void *buffer, size_t size, void **record) { return 12; } /* no more records */

#include "stub_functions.h"
