// What is kept of devices, ledgers and blocks, where operators find it without Python.
//
// The books are Python's (memory/): replicas, states, who may be evicted. What an operator on ready operands has to read or count
// stands here, and the Python classes have it as attributes (python_types.h). Objects of `Device` and `Ledger` are never freed:
// they are few, and blocks and TensorRefs point at them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace ttr {

struct World {
  std::atomic<uint32_t> process{1};        // one more in each forked child
  std::atomic<int64_t> tick{0};            // number of the operator that runs: the clock of recency
  std::atomic<bool> is_pressed{false};     // something had to be evicted: births are told
  std::atomic<bool> is_watched{false};     // somebody wants to see every operator
  std::atomic<bool> has_stand_ins{false};  // what a forward operator has left may be of another device
  std::atomic<bool> labels_differ{false};  // what a call says of a device is not where its bytes are
};
inline World world;

struct Block;
class Operands;

// How many operators run on a block now. A forked child has one thread of its parent's, and none of what the others have announced.
class Users {
 public:
  operator int64_t() const {
    const uint64_t seen = counted_.load();
    return seen >> 32 == world.process ? seen & UINT32_MAX : 0;
  }
  void add(int by) {
    uint64_t seen = counted_.load(std::memory_order_relaxed), process = world.process;
    while (!counted_.compare_exchange_weak(seen, (seen >> 32 == process ? seen : process << 32) + by)) continue;
  }

 private:
  std::atomic<uint64_t> counted_{0};  // the number of the process that counts, and 32 bits of its count
};

// The fresh results on one device that nobody has asked about yet, and what may be there.
struct Ledger {
  std::mutex lock;  // of the list; nobody waits, and nothing of Python's is called, under it
  Block *first = nullptr, *last = nullptr;  // the last one was born first
  std::atomic<int64_t> newborn_nbytes{0};  // the sum of the list
  std::atomic<int64_t> counted_nbytes{0};  // what Python's ledger counts beside it
  std::atomic<int64_t> high_nbytes{0};     // the sum up to which nothing is evicted
  std::atomic<int64_t> tiny_nbytes{0};     // of smaller results no strategy wants to hear
  PyObject* object = nullptr;              // Python's ledger, borrowed; null once that is gone
};

struct Device {
  PyObject* weak = nullptr;         // a weak reference to Python's device
  bool is_seen_by_python = false;   // it is told of every operator: a virtual clock, its own counts
  std::atomic<bool> is_open{false};  // operators may run here that need no decision
  std::atomic<Ledger*> ledger{nullptr};
};

// One logical storage. What Python keeps of it (`half`) is made when somebody asks.
//
// TensorRefs count `refs`. While there are any, they keep one reference to the half together; without them the block belongs to the
// half, or is gone if there is none.
struct Block {
  std::atomic<int64_t> refs{0};
  std::atomic<Device*> ready{nullptr};  // where operators may use it without asking anybody
  std::atomic<bool> owned{false};       // and write it: no other replica is current
  Users users;                          // announced to evictors
  std::atomic<int64_t> last_use{0};
  std::atomic<int64_t> logged_as{0};  // the number under which each use is noted; 0: none is
  std::atomic<int64_t> nbytes{0};
  int64_t born = 0;
  at::Tensor result;  // what a kernel has made, until somebody asks for replicas
  std::atomic<PyObject*> half{nullptr};
  c10::Storage face;  // what torch sees of it: no bytes, and it says so; who has it is an alias

  std::atomic<Ledger*> ledger{nullptr};  // where it is counted as a newborn
  Block *previous = nullptr, *next = nullptr;

  ~Block() { leave_ledger(); }

  void be_born(Ledger* of, int64_t size) {
    nbytes = size;
    std::lock_guard guard(of->lock);
    ledger = of;
    ((next = of->first) ? next->previous : of->last) = this;
    of->first = this;
  }
  // Stop being counted as a newborn; the bytes that were, or 0.
  int64_t leave_ledger() {
    Ledger* of = ledger.load();
    if (!of) return 0;
    const int64_t size = nbytes.load();
    std::lock_guard guard(of->lock);
    (previous ? previous->next : of->first) = next;
    (next ? next->previous : of->last) = previous;
    ledger = nullptr;
    of->newborn_nbytes.fetch_sub(size);
    return size;
  }
  // The storage that torch sees, with a device's label. What has another one than the first is no alias to torch: we know it by the block.
  c10::Storage face_on(c10::Device label) {
    if (face && face.device() == label) return face;
    c10::Storage made(c10::Storage::use_byte_size_t(), nbytes.load(), c10::DataPtr(nullptr, label), nullptr, false);
    made.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
        "Cannot access data pointer of a TensorRef (tensorsManager.release(x) has it)");
    if (!face) face = made;  // nobody else has the block yet, or the GIL is held
    return made;
  }
};

class BlockPtr {
 public:
  BlockPtr() = default;
  explicit BlockPtr(Block* block) : block_(block) {  // with the GIL held, if it may be the first one
    if (block_ && block_->refs.fetch_add(1) == 0) Py_XINCREF(block_->half.load());
  }
  BlockPtr(const BlockPtr& other) : block_(other.block_) { block_ && block_->refs.fetch_add(1, std::memory_order_relaxed); }
  BlockPtr(BlockPtr&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  BlockPtr& operator=(BlockPtr other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~BlockPtr() {
    if (!block_ || block_->refs.fetch_sub(1) != 1) return;
    // Each time that the count falls to zero lets go of the reference that its rise has taken.
    PyObject* half = block_->half.load();
    if (!half) {
      delete block_;
    } else if (Py_IsInitialized()) {
      const PyGILState_STATE gil = PyGILState_Ensure();
      Py_DECREF(half);
      PyGILState_Release(gil);
    }
  }
  // For who walks a ledger's list, under its lock: null for one that is dying.
  static BlockPtr if_alive(Block* block) {
    int64_t count = block->refs.load();
    while (count > 0 && !block->refs.compare_exchange_weak(count, count + 1)) continue;
    BlockPtr made;
    if (count > 0) made.block_ = block;
    return made;
  }
  Block* get() const { return block_; }
  Block* operator->() const { return block_; }
  explicit operator bool() const { return block_ != nullptr; }

 private:
  Block* block_ = nullptr;
};

// Uses of blocks that are told to a strategy later, all of them together, in the order of operators: tick, number of the block,
// operator (torch.ops' object, which stays), whether it was written.
using Use = std::tuple<int64_t, int64_t, py::handle, bool>;
struct UseLog {
  static constexpr size_t kMost = 4096;  // a strategy that misses some learns anew: it costs time only
  std::mutex lock;
  std::vector<Use> uses;

  void note(const Use& use) {
    std::lock_guard guard(lock);
    if (uses.size() < kMost) uses.push_back(use);
  }
  std::vector<Use> take() { std::lock_guard guard(lock); return std::exchange(uses, {}); }
};
inline UseLog use_log;

// What a thread runs here now. Whoever exchanges the devices in use closes them first and looks at these second; an operator
// enters itself first and looks second.
struct Running {
  std::atomic<Operands*> innermost{nullptr};
  std::atomic<bool> is_taken{true};  // else its thread has ended, and the next one may have it
  Running* next = nullptr;
  static inline std::mutex lock;
  static inline Running* all = nullptr;

  static Running& mine() {
    thread_local const struct Here {
      Running* const own = taken();
      ~Here() { own->is_taken = false; }
    } here;
    return *here.own;
  }
  static Running* taken() {
    std::lock_guard guard(lock);
    for (Running* one = all; one; one = one->next) if (!one->is_taken.exchange(true)) return one;
    auto* made = new Running();  // stays: another thread may be looking at it
    made->next = all;
    return all = made;
  }
  static int64_t of_others() {
    int64_t sum = 0;
    const Running* me = &mine();
    std::lock_guard guard(lock);
    for (Running* one = all; one; one = one->next) sum += one != me && one->innermost.load();
    return sum;
  }
};
}  // namespace ttr
