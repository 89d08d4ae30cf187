/*
 * Host-memory stand-in for the GPU under BytePS 0.2.5, for a machine without one. Part of the test bed, never of dpro.
 *
 * BytePS is linked against the CUDA runtime and NCCL even if every tensor lives in host memory. With one process per
 * host it makes about 25 of their calls and no NCCL collective. This library answers them: a stream is synchronous, an
 * event has always happened, a copy is memcpy. Everything else is the real thing: BytePS' queues, partitions and
 * stages, ps-lite, ZeroMQ, the server, the network.
 *
 * It is preloaded into every process of a job (LD_PRELOAD; benchmarks/testbed/byteps.py), and then does four things
 * more, each a cure for something that BytePS would do to a small machine or to a correct sum:
 *
 *   1. Rounds in step (HOSTCUDA_GUARD=<file shared by the job's workers>). The server answers pulls of round i straight
 *      from the buffer into which it copies the first push of round i+1: a fast worker overwrites the sum before a slow
 *      one has it. Here a worker's copy out of the tensor (before a push) waits until all workers have copied in
 *      (after a pull) the same part of the round before.
 *   2. Trace records in order. BytePS calls a tensor's completion callback before it has finished the trace records of
 *      that tensor; a push that follows at once corrupts them ("'dur' has already been assigned"). The next push
 *      waits until the thread that finishes a group is through with it.
 *   3. Idle threads (HOSTCUDA_IDLE_US, HOSTCUDA_POLL_US). BytePS' loops sleep 1 us when they have nothing to do, and
 *      ps-lite's receivers spin on a non-blocking receive with the send lock held: some 30 runnable threads on two
 *      cores. The loops sleep longer; a receiver waits for its socket, for a while, before it takes the lock again.
 *   4. Private shared memory. Buffers are named BytePS_ShM_<key> whatever the job and the worker: two workers in one
 *      /dev/shm write into each other's gradients. Each gets names of its own, which are unlinked at once.
 *
 * Also one NUMA node, for the calls that BytePS makes to libnuma (include/numa.h).
 * Limits: one process per worker, all workers on one machine, at most MAX_WORKERS of them if they are guarded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 801 /* cudaErrorNotSupported */, NCCL_INVALID_USAGE = 5 };
enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2 }; /* cudaMemcpyKind */

static void sleep_us(long us) {
  struct timespec length = {us / 1000000, us % 1000000 * 1000};
  syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &length, NULL); /* not nanosleep(): that one is ours, below */
}

static void give_up(const char* why) {
  fprintf(stderr, "hostcuda: %s\n", why);
  abort();
}

static long setting_us(const char* name) {
  const char* text = getenv(name);
  return text ? atol(text) : 0;
}

/* ---- 1. rounds in step -------------------------------------------------------------------------------------------
 * A part is a byte range of one tensor's buffer, known by the tensor's key and the offset of its first byte: the same
 * for all workers, and for as long as the partition size stays. The shared file counts, for each part and worker, the
 * rounds that the worker has copied in. It cannot deadlock: a copy-in needs only pushes that were made before the wait.
 */
enum { MAX_PARTS = 1 << 16, MAX_WORKERS = 16, PATIENCE_S = 300 };

struct part {
  _Atomic uint64_t id; /* 0: free */
  _Atomic uint32_t copied_in[MAX_WORKERS];
};
struct buffer {
  const char* begin;
  size_t size;
  uint64_t key;
};

static struct part* parts; /* the shared file; NULL: no guard */
static uint32_t copied_out[MAX_PARTS];
static int worker, workers;
static struct buffer buffers[MAX_PARTS];
static int n_buffers;
static pthread_mutex_t buffers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t guard_once = PTHREAD_ONCE_INIT;
static __thread uint64_t opened_key; /* of the buffer that this thread has just opened, and maps and registers next */
static __thread int opened;

static void open_guard(void) {
  const char *file = getenv("HOSTCUDA_GUARD"), *id = getenv("DMLC_WORKER_ID"), *number = getenv("DMLC_NUM_WORKER");
  if (!file || !*file || !id || !number) return;
  worker = atoi(id), workers = atoi(number);
  if (worker < 0 || workers > MAX_WORKERS || worker >= workers) give_up("HOSTCUDA_GUARD: too many workers");
  int fd = open(file, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  size_t size = sizeof(struct part) * MAX_PARTS; /* sparse: only the parts in use take memory */
  if (fd < 0 || ftruncate(fd, size)) give_up("HOSTCUDA_GUARD: the file cannot be opened");
  void* at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) give_up("HOSTCUDA_GUARD: the file cannot be mapped");
  parts = at;
}

static void register_buffer(const void* begin, size_t size) {
  pthread_mutex_lock(&buffers_lock);
  if (n_buffers == MAX_PARTS) give_up("HOSTCUDA_GUARD: too many buffers");
  buffers[n_buffers++] = (struct buffer){begin, size, opened_key};
  pthread_mutex_unlock(&buffers_lock);
}

/* Where the part that begins at `address` stands in the file, -1 if the address is in no buffer of BytePS. */
static int part_at(const char* address) {
  uint64_t id = 0;
  pthread_mutex_lock(&buffers_lock);
  for (int i = n_buffers - 1; i >= 0 && !id; --i) { /* the newest first: after a resume addresses may come again */
    const struct buffer* b = &buffers[i];
    /* the key of a tensor is a multiple of 2^16: its parts count below that */
    if (address >= b->begin && address < b->begin + b->size)
      id = ((b->key >> 16) << 40 | (uint64_t)(address - b->begin)) + 1;
  }
  pthread_mutex_unlock(&buffers_lock);
  if (!id) return -1;
  uint64_t first = (id * 0x9E3779B97F4A7C15u) >> 48; /* Fibonacci hashing to 16 bits, then the next free slot */
  for (uint64_t k = 0; k < MAX_PARTS; ++k) {
    int slot = (int)((first + k) % MAX_PARTS);
    uint64_t seen = 0;
    if (atomic_compare_exchange_strong(&parts[slot].id, &seen, id) || seen == id) return slot;
  }
  give_up("HOSTCUDA_GUARD: too many parts");
  return -1;
}

static void wait_for_round(int slot) {
  for (long waited_us = 0;; waited_us += 100) {
    int behind = 0;
    for (int w = 0; w < workers; ++w)
      if ((int32_t)(parts[slot].copied_in[w] - copied_out[slot]) < 0) behind = 1; /* right when it wraps, too */
    if (!behind) break;
    if (waited_us > PATIENCE_S * 1000000L) give_up("HOSTCUDA_GUARD: another worker does not get on");
    sleep_us(100);
  }
  copied_out[slot]++;
}

int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  (void)stream;
  int slot = -1;
  if (parts && kind == DEVICE_TO_HOST && (slot = part_at(to)) >= 0) wait_for_round(slot);
  if (to != from) memcpy(to, from, size);
  if (parts && kind == HOST_TO_DEVICE && (slot = part_at(from)) >= 0) parts[slot].copied_in[worker]++;
  return OK;
}

/* BytePS registers its own buffers with the default flags, those of a framework as mapped ones. */
int cudaHostRegister(void* begin, size_t size, unsigned flags) {
  pthread_once(&guard_once, open_guard);
  if (parts && opened && !flags) register_buffer(begin, size);
  opened = 0;
  return OK;
}
int cudaHostUnregister(void* begin) { return (void)begin, OK; }

/* ---- 2. trace records in order -----------------------------------------------------------------------------------
 * RunSyncNcclOnce (core_loops.cc): synchronise the events of a group, finish its tasks (callback, then the records),
 * destroy the events. Between the first synchronise and the last destroy a group is being finished.
 */
static _Atomic unsigned events_open, groups_finished;
static __thread int finishing; /* this thread is the one that others wait for */

static void wait_until_finished(void) {
  unsigned before = groups_finished;
  if (finishing) return;
  for (int i = 0; i < 5000 && events_open && groups_finished == before; ++i) sleep_us(20); /* bounded: 0.1 s */
}

int cudaEventSynchronize(void* event) {
  (void)event;
  finishing = 1;
  events_open++;
  return OK;
}
int cudaEventDestroy(void* event) {
  free(event);
  if (finishing && --events_open == 0) {
    finishing = 0;
    groups_finished++;
  }
  return OK;
}
/* The first call of a push under MXNet ... */
int cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  (void)flags;
  wait_until_finished();
  *device = host;
  return OK;
}
/* ... and of one under TensorFlow, where our stand-in header asks for the device: always number 0. */
int hostcuda_device(void) {
  wait_until_finished();
  return 0;
}

/* ---- the CUDA runtime and NCCL, as far as nothing is to be done ---------------------------------------------------- */
static int new_handle(void** handle) { return *handle = malloc(8), *handle ? OK : NOT_SUPPORTED; }

int cudaSetDevice(int device) { return (void)device, OK; }
int cudaGetDevice(int* device) { return *device = 0, OK; }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { /* BytePS passes NULL for one of them */
  if (least) *least = 0;
  if (greatest) *greatest = 0;
  return OK;
}
int cudaStreamCreateWithFlags(void** stream, unsigned flags) { return (void)flags, new_handle(stream); }
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return (void)flags, (void)priority, new_handle(stream);
}
int cudaStreamSynchronize(void* stream) { return (void)stream, OK; }
int cudaStreamDestroy(void* stream) { return free(stream), OK; }
int cudaEventCreateWithFlags(void** event, unsigned flags) { return (void)flags, new_handle(event); }
int cudaEventRecord(void* event, void* stream) { return (void)event, (void)stream, OK; }
int cudaEventQuery(void* event) { return (void)event, OK; }
int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  (void)kind;
  if (to != from) memcpy(to, from, size);
  return OK;
}
int cudaGetLastError(void) { return OK; }
const char* cudaGetErrorString(int error) { return error ? "not supported by the host-memory stand-in" : "no error"; }

typedef struct {
  char bytes[128];
} unique_id; /* ncclUniqueId: passed by value */
int ncclGetUniqueId(unique_id* id) { return memset(id, 0, sizeof *id), OK; }
int ncclCommInitRank(void** comm, int ranks, unique_id id, int rank) {
  (void)ranks, (void)id, (void)rank;
  return new_handle(comm);
}
int ncclGroupStart(void) { return OK; }
int ncclGroupEnd(void) { return OK; }
const char* ncclGetErrorString(int error) { return cudaGetErrorString(error); }
/* Needed with several processes per host only, which this test bed does not have. */
int ncclReduceScatter(void) { return NCCL_INVALID_USAGE; }
int ncclReduce(void) { return NCCL_INVALID_USAGE; }
int ncclAllGather(void) { return NCCL_INVALID_USAGE; }
int ncclBroadcast(void) { return NCCL_INVALID_USAGE; }

/* ---- one NUMA node ------------------------------------------------------------------------------------------------- */
void *numa_all_nodes_ptr, *numa_no_nodes_ptr;
int numa_max_node(void) { return 0; }
void* numa_parse_nodestring(const char* text) { return (void)text, NULL; }
void numa_bind(void* nodes) { (void)nodes; }
void numa_set_preferred(int node) { (void)node; }
void numa_set_interleave_mask(void* nodes) { (void)nodes; }

/* ---- 3. idle threads -----------------------------------------------------------------------------------------------
 * ps-lite's CallZmqRecvThread: lock; receive without blocking (ZeroMQ polls the socket's signal once); unlock; again.
 * A poll that found nothing is remembered, and before this thread takes its next lock it waits for that signal. It
 * cannot wait for good: a sender that uses the same socket may take the signal in its stead.
 */
static long idle_us, poll_us;
static int (*real_lock)(pthread_mutex_t*);
static int (*real_shm_open)(const char*, int, mode_t);
static __thread int idle_fd = -1;

__attribute__((constructor)) static void begin(void) {
  idle_us = setting_us("HOSTCUDA_IDLE_US");
  poll_us = setting_us("HOSTCUDA_POLL_US");
}

/* Called by BytePS' own library, and not by the framework or by Python? */
static int byteps_calls(void* from) {
  Dl_info library;
  return dladdr(from, &library) && library.dli_fname && strstr(library.dli_fname, "/byteps/");
}

int nanosleep(const struct timespec* length, struct timespec* left) {
  struct timespec asked = *length;
  if (idle_us > 0 && asked.tv_sec == 0 && asked.tv_nsec == 1000) asked.tv_nsec = idle_us * 1000;
  return syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &asked, left) ? -1 : 0; /* the plain call sets errno */
}

int poll(struct pollfd* fds, nfds_t n, int timeout_ms) {
  struct timespec length = {timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
  int ready = (int)syscall(SYS_ppoll, fds, n, timeout_ms < 0 ? NULL : &length, NULL, 0);
  if (poll_us > 0 && n == 1 && timeout_ms == 0 && ready == 0 && byteps_calls(__builtin_return_address(0)))
    idle_fd = fds[0].fd;
  return ready;
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (!real_lock) real_lock = (int (*)(pthread_mutex_t*))dlsym(RTLD_NEXT, "pthread_mutex_lock");
  if (idle_fd >= 0) {
    struct pollfd signal = {idle_fd, POLLIN, 0};
    struct timespec length = {0, poll_us * 1000};
    int before = errno;
    idle_fd = -1;
    syscall(SYS_ppoll, &signal, 1, &length, NULL, 0);
    errno = before;
  }
  return real_lock(mutex);
}

/* ---- 4. private shared memory -------------------------------------------------------------------------------------- */
int shm_open(const char* name, int flags, mode_t mode) {
  static const char prefix[] = "BytePS_ShM_";
  if (!real_shm_open) real_shm_open = (int (*)(const char*, int, mode_t))dlsym(RTLD_NEXT, "shm_open");
  const char* key = strstr(name, prefix);
  if (!key) return real_shm_open(name, flags, mode);
  char own[256];
  snprintf(own, sizeof own, "/%s.%d", key, (int)getpid());
  int fd = real_shm_open(own, flags, mode);
  if (fd >= 0) shm_unlink(own);
  opened_key = strtoull(key + sizeof prefix - 1, NULL, 10);
  opened = 1;
  return fd;
}
