// The runtime behind cuda_runtime.h: a scheduler of fibers, and a checker of memory accesses that
// the compiler's ThreadSanitizer instrumentation reports through the __tsan_* hooks at the end.
// This file itself is never instrumented, and libtsan is not linked.
#include "cuda_runtime.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

// The linker's bounds of the section; absent when no kernel has shared memory.
extern "C" {
extern char __start_emulated_shared[] __attribute__((weak));
extern char __stop_emulated_shared[] __attribute__((weak));
}

namespace emulator {

Indices indices;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kMaxThreads = 1024;
constexpr int kReportedFaults = 3;  // of each kind
// What a kernel's parameters may take: since CUDA 12.1 in the driver, and before.
constexpr size_t kLargeParameterBytes = 32764, kSmallParameterBytes = 4096;
constexpr int kLargeParameterDriver = 12010;

enum class Schedule { kForward, kReverse, kRandom };
enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Fiber {
  ucontext_t entry;
  jmp_buf context;
  char* stack = nullptr;
  bool started = false;  // its context can be jumped to
  State state = State::kDone;
  uint3 thread;
  unsigned mask;  // of the warp collective it waits in
};

struct Warp {
  uint64_t brought[kWarpSize];   // to the collective that lanes are gathering for
  uint64_t received[kWarpSize];  // from the last one that all its lanes had reached
  unsigned arrived = 0;
};

struct Block {
  unsigned number = 0;  // counts the blocks of a launch as they run, from 1
  unsigned epoch = 0;   // counts the barriers passed
  unsigned threads = 0, at_barrier = 0, done = 0;
  int predicate = 0, barrier_result = 0;
};

struct Settings {
  Schedule schedule = Schedule::kForward;
  int driver_version = 13000;
  uint64_t first_block = 0;     // blocks before it are not run
  uint64_t refused_launch = 0;  // this launch fails, counted from 1; none when 0
};

Settings settings;
std::mt19937 random_order;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
Block block;
jmp_buf scheduler;
unsigned running = 0;    // the fiber that runs
bool in_kernel = false;  // a fiber runs, not the scheduler
bool in_atomic = false;
Kernel kernel;

std::string report;
std::map<std::string, int> fault_counts;  // by format
uint64_t launch_count = 0;

// ---- fibers ----

void suspend(State state) {
  Fiber& fiber = *fibers[running];
  fiber.state = state;
  if (!_setjmp(fiber.context)) _longjmp(scheduler, 1);
}

// Serves block after block: a fiber is made once and resumed ever after.
void fiber_main() {
  for (;;) {
    kernel.call(kernel.arguments);
    suspend(State::kDone);
  }
}

void resume(unsigned index) {
  Fiber& fiber = *fibers[index];
  running = index;
  indices.thread = fiber.thread;
  in_kernel = true;
  if (!_setjmp(scheduler)) {
    if (fiber.started) _longjmp(fiber.context, 1);
    fiber.started = true;
    setcontext(&fiber.entry);
  }
  in_kernel = false;
}

void prepare(Fiber& fiber) {
  if (fiber.stack == nullptr) {
    fiber.stack = static_cast<char*>(
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (fiber.stack == MAP_FAILED) abort();
  }
  if (fiber.state != State::kDone) fiber.started = false;  // left behind by a deadlock
  if (!fiber.started) {
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = fiber.stack;
    fiber.entry.uc_stack.ss_size = kStackBytes;
    fiber.entry.uc_link = nullptr;
    makecontext(&fiber.entry, fiber_main, 0);
  }
  fiber.state = State::kReady;
}

// ---- blocks ----

template <typename T>
std::vector<T> schedule_of(T count) {
  std::vector<T> order(count);
  std::iota(order.begin(), order.end(), T(0));
  if (settings.schedule == Schedule::kReverse) std::reverse(order.begin(), order.end());
  if (settings.schedule == Schedule::kRandom) std::shuffle(order.begin(), order.end(), random_order);
  return order;
}

void poison_shared_memory() {
  if (__start_emulated_shared)
    std::memset(__start_emulated_shared, 0xFF, __stop_emulated_shared - __start_emulated_shared);  // NaNs
}

void forget_shared_accesses();
void forget_accesses();

void begin_block(uint64_t linear_index) {
  const dim3 grid = indices.grid_dim, dim = indices.block_dim;
  indices.block = {unsigned(linear_index % grid.x), unsigned(linear_index / grid.x % grid.y),
                   unsigned(linear_index / grid.x / grid.y)};
  ++block.number;
  block.epoch = block.at_barrier = block.done = 0;
  block.predicate = 0;
  warps.assign((block.threads + kWarpSize - 1) / kWarpSize, Warp());
  for (unsigned i = 0; i < block.threads; ++i) {
    prepare(*fibers[i]);
    fibers[i]->thread = {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
  }
  poison_shared_memory();
  forget_shared_accesses();
}

// Wakes the lanes of a collective when the last of them has come.
void finish_collective(unsigned last) {
  const unsigned mask = fibers[last]->mask, first_lane = last / kWarpSize * kWarpSize;
  Warp& warp = warps[last / kWarpSize];
  if ((warp.arrived & mask) != mask) return;
  for (unsigned lane = 0; lane < unsigned(kWarpSize) && first_lane + lane < block.threads; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Fiber& fiber = *fibers[first_lane + lane];
    if (fiber.mask != mask) fault("lanes of one collective name the masks %08x and %08x", mask, fiber.mask);
    fiber.state = State::kReady;
    warp.received[lane] = warp.brought[lane];
  }
  warp.arrived &= ~mask;
}

void finish_barrier() {
  if (block.done) fault("%u threads left before a barrier that %u others wait at", block.done, block.at_barrier);
  block.barrier_result = block.predicate;
  block.predicate = 0;
  block.at_barrier = 0;
  ++block.epoch;
  for (unsigned i = 0; i < block.threads; ++i)
    if (fibers[i]->state == State::kAtBarrier) fibers[i]->state = State::kReady;
}

void run_ready_threads(bool* progress) {
  for (unsigned i : schedule_of(block.threads)) {
    if (fibers[i]->state != State::kReady) continue;
    *progress = true;
    resume(i);
    if (fibers[i]->state == State::kDone) ++block.done;
    if (fibers[i]->state == State::kInWarp) finish_collective(i);
  }
}

void run_block(uint64_t linear_index) {
  begin_block(linear_index);
  while (block.done < block.threads) {
    bool progress = false;
    run_ready_threads(&progress);
    if (block.at_barrier && block.at_barrier + block.done == block.threads) {
      finish_barrier();
    } else if (!progress) {
      fault("deadlock: %u at a barrier, %u done, %u in a warp collective", block.at_barrier, block.done,
            block.threads - block.at_barrier - block.done);
      return;
    }
  }
}

// ---- the checker ----
// A race is two accesses to one cell of a launch, at least one of them a write and not both atomic,
// by two threads with no barrier of their block between them; blocks are never ordered.

constexpr uintptr_t kCellBytes = 2;  // the smallest element

struct Range {
  uintptr_t begin, end;
  bool contains(uintptr_t address, size_t bytes) const { return address >= begin && address + bytes <= end; }
};

Range range_of(const void* begin, size_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
  return {address, address + bytes};
}

struct Access {
  unsigned block = 0, epoch = 0, thread = 0;
  bool atomic = false;
};

struct Cell {
  Access write, reads[2];  // the last ones, the reads by two different threads
};

struct Buffer {
  Range range;
  bool writable;
};

std::map<uintptr_t, Buffer> buffers;  // by their begin
std::unordered_map<uintptr_t, Cell> shared_cells, global_cells;  // by address / kCellBytes

void forget_shared_accesses() { shared_cells.clear(); }
void forget_accesses() { global_cells.clear(); }

const Buffer* find_buffer(uintptr_t address, size_t bytes) {
  auto next = buffers.upper_bound(address);
  if (next == buffers.begin()) return nullptr;
  const Buffer& buffer = std::prev(next)->second;
  return buffer.range.contains(address, bytes) ? &buffer : nullptr;
}

bool conflicts(const Access& earlier, const Access& now) {
  if (earlier.block == 0 || (earlier.atomic && now.atomic)) return false;
  if (earlier.block != now.block) return true;
  return earlier.thread != now.thread && earlier.epoch == now.epoch;
}

void check_race(Cell& cell, const Access& now, bool write, const char* space) {
  const Access* other = conflicts(cell.write, now) ? &cell.write : nullptr;
  if (write)
    for (const Access& read : cell.reads)
      if (conflicts(read, now)) other = &read;
  if (other)
    fault("race on %s memory: %s after thread %u of block number %u %s, no barrier between", space,
          write ? "writes" : "reads", other->thread, other->block, other == &cell.write ? "wrote" : "read");
  if (write) {
    cell.write = now;
  } else {
    const Access& last = cell.reads[0];
    if (last.thread != now.thread || last.block != now.block) cell.reads[1] = last;
    cell.reads[0] = now;
  }
}

void check_access(const void* pointer, size_t bytes, bool write) {
  if (!in_kernel) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (range_of(fibers[running]->stack, kStackBytes).contains(address, bytes)) return;
  const bool read_only = range_of(kernel.arguments, kernel.bytes).contains(address, bytes) ||
                         range_of(&indices, sizeof(indices)).contains(address, bytes);
  if (read_only && !write) return;

  const size_t shared_bytes = __stop_emulated_shared - __start_emulated_shared;
  const bool in_shared = range_of(__start_emulated_shared, shared_bytes).contains(address, bytes);
  if (!in_shared) {
    const Buffer* buffer = find_buffer(address, bytes);
    if (buffer == nullptr) {
      fault("out of bounds: %s %zu bytes that lie in no one buffer", write ? "writes" : "reads", bytes);
      return;
    }
    if (write && !buffer->writable) fault("writes %zu bytes into an input", bytes);
  }

  const Access now = {block.number, block.epoch, running, in_atomic};
  for (uintptr_t at = address / kCellBytes; at <= (address + bytes - 1) / kCellBytes; ++at) {
    Cell& cell = (in_shared ? shared_cells : global_cells)[at];
    if (in_shared && !write && cell.write.block == 0) fault("reads shared memory that nothing wrote");
    check_race(cell, now, write, in_shared ? "shared" : "global");
  }
}

}  // namespace

// ---- what cuda_runtime.h declares ----

void fault(const char* format, ...) {
  if (++fault_counts[format] > kReportedFaults) return;
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  report += "block " + std::to_string(indices.block.x) + ", thread " + std::to_string(running) + ": " + text + "\n";
}

int barrier(int predicate) {
  ++block.at_barrier;
  block.predicate |= predicate != 0;
  suspend(State::kAtBarrier);
  return block.barrier_result;
}

void exchange(unsigned mask, uint64_t value, uint64_t (&values)[kWarpSize]) {
  const unsigned lane = running % kWarpSize;
  Warp& warp = warps[running / kWarpSize];
  if (!(mask >> lane & 1)) fault("lane %u is in a collective whose mask %08x lacks it", lane, mask);
  fibers[running]->mask = mask;
  warp.brought[lane] = value;
  warp.arrived |= 1u << lane;
  suspend(State::kInWarp);
  // The next collective of these lanes can't end before each of them has come here.
  std::memcpy(values, warp.received, sizeof(values));
}

AtomicScope::AtomicScope() { in_atomic = true; }
AtomicScope::~AtomicScope() { in_atomic = false; }

cudaError_t launch(const cudaLaunchConfig_t& config, const Kernel& launched) {
  const dim3 grid = config.gridDim, dim = config.blockDim;
  const uint64_t threads = uint64_t(dim.x) * dim.y * dim.z;
  if (threads == 0 || threads > kMaxThreads || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7FFFFFFF ||
      grid.y > 0xFFFF || grid.z > 0xFFFF)
    return cudaErrorInvalidConfiguration;
  if (++launch_count == settings.refused_launch) return cudaErrorLaunchFailure;
  const bool large = settings.driver_version >= kLargeParameterDriver;
  if (launched.bytes > (large ? kLargeParameterBytes : kSmallParameterBytes)) return cudaErrorInvalidValue;

  kernel = launched;
  indices.block_dim = dim;
  indices.grid_dim = grid;
  block = Block();
  block.threads = threads;
  while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  forget_accesses();
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  for (uint64_t index : schedule_of(blocks))
    if (index >= settings.first_block) run_block(index);
  return cudaSuccess;
}

}  // namespace emulator

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    default: return "unspecified launch failure";
  }
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = emulator::settings.driver_version;
  return cudaSuccess;
}

// ---- the tests' side ----

extern "C" {

// schedule: 0 forward, 1 reverse, 2 random by `seed`. Launches are counted anew.
void emulator_configure(int schedule, unsigned seed, int driver_version, uint64_t first_block,
                        uint64_t refused_launch) {
  emulator::settings = {emulator::Schedule(schedule), driver_version, first_block, refused_launch};
  emulator::random_order.seed(seed);
  emulator::launch_count = 0;
}

uint64_t emulator_launch_count() { return emulator::launch_count; }

// The buffers that kernels may touch in a build that is checked.
void emulator_add_buffer(void* begin, size_t bytes, int writable) {
  const emulator::Range range = emulator::range_of(begin, bytes);
  emulator::buffers[range.begin] = {range, writable != 0};
}

void emulator_clear_buffers() { emulator::buffers.clear(); }

// The faults since the last call, one a line and a few of each kind; empty when there were none.
const char* emulator_take_report() {
  static std::string taken;
  taken = emulator::report;
  emulator::report.clear();
  emulator::fault_counts.clear();
  return taken.c_str();
}

#define TSAN_HOOKS(bytes)                                                                            \
  void __tsan_read##bytes(void* address) { emulator::check_access(address, bytes, false); }          \
  void __tsan_write##bytes(void* address) { emulator::check_access(address, bytes, true); }          \
  void __tsan_unaligned_read##bytes(void* address) { emulator::check_access(address, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* address) { emulator::check_access(address, bytes, true); }
TSAN_HOOKS(1)
TSAN_HOOKS(2)
TSAN_HOOKS(4)
TSAN_HOOKS(8)
TSAN_HOOKS(16)

void __tsan_read_range(void* address, size_t bytes) { emulator::check_access(address, bytes, false); }
void __tsan_write_range(void* address, size_t bytes) { emulator::check_access(address, bytes, true); }
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

}  // extern "C"
