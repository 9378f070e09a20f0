// What is known of an operator: where its operands stand, and what Python's plan says of it.
//
// Python's plan (operators/plan.py) is asked once, when the operator is met first, and says all that a schema does not.
#pragma once

#include "ref.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <memory>

namespace ttr {
using c10::IValue;
using torch::jit::Stack;

// How the bytes are counted that a composite operator takes at its peak, where it runs as one.
enum class Peak : int8_t { kNotWhole, kLinear, kMatmul, kAttention, kNorm };

struct Plan {
  struct Slot { uint16_t index; bool is_list, is_written; };
  c10::SmallVector<Slot, 4> slots;        // arguments that are tensors, or lists of them
  c10::SmallVector<uint16_t, 2> devices;  // arguments that name a device
  c10::SmallVector<int16_t, 2> twins;     // for each result, the argument that it hands back; -1
  size_t arg_count = 0, positional_count = 0;
  bool is_composite = false, is_factory = false;  // a factory takes no tensor and makes one
  PyObject* op = nullptr;  // torch.ops' object

  // As Python's plan says:
  bool may_be_ready = false, is_seen_above = false;  // it may run here at all; but a program's own kernel for autograd has to see it
  bool comes_in_parts = false, is_recorded_inside = false;  // autograd takes it apart; looks into its kernel in Python
  bool is_view = false, writes = false, writes_then = false, counts_lists = false;
  bool makes_dense = false;   // else complex operands need more than the kernel
  bool shares = false;        // a copy of a large block costs nothing on the slow path
  bool minds_labels = false, is_for_host = false;
  bool minds_stand_ins = false;  // Python looks at what its forward operator has left
  c10::SmallVector<int16_t, 4> conditions;  // where all of these are set it writes (`writes_then`), or is for Python
  Peak peak = Peak::kNotWhole;

  bool runs_above() const { return may_be_ready && !is_seen_above && !is_view && !writes; }
  const IValue* arguments(const Stack& stack) const { return stack.data() + stack.size() - arg_count; }

  // Call a function with each tensor among the arguments, and whether it is written, while it returns true.
  template <class Function>
  bool each_tensor(const IValue* arguments, Function&& function) const {
    for (const Slot& slot : slots) {
      const IValue& value = arguments[slot.index];
      if (value.isTensor()) {
        if (!function(value.toTensor(), slot.is_written)) return false;
      } else if (value.isList()) {
        for (const IValue& part : value.toListRef()) if (part.isTensor() && !function(part.toTensor(), slot.is_written)) return false;
      }
    }
    return true;
  }
};

inline PyObject* describe = nullptr;  // Python: what its plan says
constexpr std::pair<const char*, bool Plan::*> kSaid[] = {
    {"may_be_ready", &Plan::may_be_ready}, {"is_seen_above", &Plan::is_seen_above}, {"is_view", &Plan::is_view}, {"counts_lists", &Plan::counts_lists},
    {"makes_dense", &Plan::makes_dense}, {"shares", &Plan::shares}, {"minds_labels", &Plan::minds_labels}, {"writes_then", &Plan::writes_then},
    {"comes_in_parts", &Plan::comes_in_parts}, {"is_recorded_inside", &Plan::is_recorded_inside}, {"is_for_host", &Plan::is_for_host}, {"minds_stand_ins", &Plan::minds_stand_ins},
};

inline void ask_python(Plan& plan, const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  py::gil_scoped_acquire gil;
  WithFactories no_longer(false);
  py::dict said = py::reinterpret_borrow<py::object>(describe)(schema.name(), schema.overload_name());
  plan.op = said["op"].cast<py::object>().release().ptr();
  for (auto [name, member] : kSaid) plan.*member = said[name].cast<bool>();
  plan.may_be_ready = plan.may_be_ready && schema.name().compare(0, 6, "aten::") == 0;
  for (auto position : said["conditions"]) plan.conditions.push_back(position.cast<int16_t>());
  plan.peak = static_cast<Peak>(said["peak"].cast<int>());
  for (auto position : said["writes"])
    for (auto& slot : plan.slots) if (slot.index == position.cast<int>()) slot.is_written = true, plan.writes = !plan.writes_then;
  for (auto twin : said["twins"]) plan.twins.push_back(twin.cast<int16_t>());
}

inline Plan* make_plan(const c10::OperatorHandle& op) {
  auto plan = std::make_unique<Plan>();
  const auto& arguments = op.schema().arguments();
  plan->arg_count = arguments.size();
  plan->is_composite = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) && !op.hasKernelForDispatchKey(DispatchKey::CPU);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string type = arguments[i].real_type()->str();
    plan->positional_count += !arguments[i].kwarg_only();
    if (type.find("Tensor") != std::string::npos) plan->slots.push_back({static_cast<uint16_t>(i), type.find('[') != std::string::npos, false});
    else if (type.find("Device") != std::string::npos) plan->devices.push_back(static_cast<uint16_t>(i));
  }
  ask_python(*plan, op);
  const auto& returns = op.schema().returns();
  plan->is_factory = plan->slots.empty() && returns.size() == 1 && returns[0].real_type()->kind() == c10::TypeKind::TensorType;
  return plan.release();  // stays: a call may have it when its operator goes
}

// All plans, by the addresses of schemas. Another operator may come to have the address, and a program may give one another kernel.
struct Plans final : c10::OpRegistrationListener {
  static inline std::mutex lock;
  static inline auto& all = *new std::unordered_map<const void*, const Plan*>();  // operators go at exit, too, after what is static here
  static inline std::atomic<uint64_t> forgotten{0};  // how often one was forgotten
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    std::lock_guard guard(lock);
    all.erase(&op.schema());
    ++forgotten;  // also where another thread is just making one
  }
};

inline const Plan& plan_of(const c10::OperatorHandle& op) {
  thread_local std::array<std::tuple<const void*, uint64_t, const Plan*>, 1024> near{};
  const void* key = &op.schema();
  const uint64_t forgotten = Plans::forgotten.load(std::memory_order_acquire);
  auto& [its_key, since, its_plan] = near[(reinterpret_cast<uintptr_t>(key) >> 6) & 1023];
  if (C10_LIKELY(its_key == key && since == forgotten)) return *its_plan;
  std::unique_lock guard(Plans::lock);
  auto found = Plans::all.find(key);
  if (found == Plans::all.end()) {
    guard.unlock();
    const Plan* made = make_plan(op);  // asks Python, so not under the lock; who comes second has made one more
    guard.lock();
    if (Plans::forgotten != forgotten) return guard.unlock(), plan_of(op);  // perhaps this one
    found = Plans::all.emplace(key, made).first;
  }
  its_key = key, since = forgotten, its_plan = found->second;
  return *its_plan;
}
}  // namespace ttr
