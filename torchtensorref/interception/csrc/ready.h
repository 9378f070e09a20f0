// The ready path: an operator whose operands are all ready runs on the plain tensors, without Python.
//
// An operator announces its blocks first and looks second; an evictor closes `ready` first and looks at the users second: one of
// the two sees the other. Where something has to be decided, nothing has happened: the arguments are still on the stack.
#pragma once

#include "peaks.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>

namespace ttr {

inline PyObject* bear = nullptr;  // Python: the block of a fresh result; None where there is no room, a TensorRef of what has gone home
inline PyObject* written = nullptr;  // Python: a block has been written while another thread copied it
// Smaller blocks are copied at once: cheaper than to ask at each use who shares them.
constexpr int64_t kShareFromNbytes = 1 << 16;

// The operands of a call, their blocks, and the announcement to evictors.
class Operands {
 public:
  struct Operand {
    RefImpl* ref;
    BlockPtr block;
    at::Tensor plain;
    bool is_written;
  };
  c10::SmallVector<Operand, 4> all;
  Device* device = nullptr;
  bool is_without_plain = false;  // Python has to make the plain tensor of one

  Operands() : running_(Running::mine()), outer_(running_.innermost.exchange(this)) {}
  ~Operands() { withdraw(); }
  Operands(const Operands&) = delete;

  // Announce one and look; false where something has to be decided about it.
  bool add(RefImpl* ref, bool is_written) {
    Operand& operand = all.emplace_back(Operand{ref, BlockPtr(), at::Tensor(), is_written});
    RefImpl::Locked guard(*ref);
    operand.block = ref->block;
    operand.block->users.add(1);
    Device* place = operand.block->ready.load();
    if (!place || (device && place != device)) return false;
    if (is_written && !operand.block->owned.load()) return false;
    device = place;
    operand.plain = ref->plain;
    is_without_plain = is_without_plain || ref->on != place;
    return true;
  }
  void withdraw() {
    if (running_.innermost.load() != this) return;  // it is done
    for (Operand& operand : all) operand.block->users.add(-1);
    running_.innermost = outer_;
  }
  // In a forked child, where nothing is announced: an operator of this thread may have called what forks.
  static void announce_anew() {
    for (Operands* one = Running::mine().innermost; one; one = one->outer_)
      for (Operand& operand : one->all) operand.block->users.add(1);
  }

 private:
  Running& running_;
  Operands* const outer_;
};

// Whether a plain tensor may take part as it is: a single number at home, or none.
inline bool is_number(const at::Tensor& tensor) {
  return !tensor.defined() ||
         (tensor.dim() == 0 && tensor.is_cpu() && tensor.layout() == c10::kStrided && !tensor.is_quantized() &&
          !tensor.key_set().has(DispatchKey::Python) && (tensor.key_set() & kLazyBits).empty());
}

// Whether autograd would note a call with this operand.
inline bool is_noted(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return tensor.defined() && ((c10::GradMode::is_enabled() && impl->requires_grad()) ||
                              (impl->autograd_meta() && tensor._fw_grad(/*level=*/0).defined()));
}

// Whether a kernel in Python has refused its operands, and not the program been interrupted.
inline bool is_of_a_kernel(const py::error_already_set& error) {
  py::gil_scoped_acquire gil;
  return error.matches(PyExc_RuntimeError) || error.matches(PyExc_IndexError) || error.matches(PyExc_ValueError);
}

class ReadyCall {
 public:
  ReadyCall(const c10::OperatorHandle& op, const Plan& plan, Stack* stack, bool is_above)
      : op_(op), plan_(plan), stack_(*stack), start_(stack->size() - plan.arg_count), is_above_(is_above),
        writes_(plan.writes || (plan.writes_then && meets_conditions())) {}

  // Run it; false: nothing has happened, and the arguments are where they were.
  bool run() {
    if (!may_run() || !announce()) return false;
    const int64_t counts = !plan_.is_view;  // a view reads nothing: it is no use of what it is of
    const int64_t tick = world.tick.fetch_add(counts, std::memory_order_relaxed) + counts;
    if (counts) for (auto& operand : operands_.all) {
      operand.block->last_use.store(tick, std::memory_order_relaxed);
      if (const int64_t number = operand.block->logged_as.load()) use_log.note({tick, number, plan_.op, operand.is_written});
    }
    push_plain();
    if (!call() || !wrap(tick)) return stack_.resize(start_ + plan_.arg_count), false;
    count_lists();
    stack_.erase(stack_.begin() + start_, stack_.begin() + start_ + plan_.arg_count);
    return true;
  }

  // Whether it may run as one where Python decides: no operand is noted, and one is a TensorRef.
  bool is_for_python() const {
    bool has_ref = false;
    return may_run() && each_tensor([&](const at::Tensor& tensor, bool) {
      has_ref = has_ref || is_ref(tensor);
      return !is_noted(tensor);
    }) && has_ref;
  }
  void withdraw() { operands_.withdraw(); }

 private:
  const IValue& argument(size_t i) const { return stack_[start_ + i]; }
  template <class Function>
  bool each_tensor(Function&& function) const { return plan_.each_tensor(stack_.data() + start_, function); }

  bool may_run() const {
    if (plan_.minds_labels && world.labels_differ.load(std::memory_order_relaxed)) return false;
    if (plan_.minds_stand_ins && world.has_stand_ins.load(std::memory_order_relaxed)) return false;
    return !names_another_device() && (plan_.writes_then ? !(is_above_ && writes_) : !meets_conditions());
  }
  bool meets_conditions() const {
    return !plan_.conditions.empty() && std::all_of(plan_.conditions.begin(), plan_.conditions.end(), [this](auto i) {
      const IValue& value = argument(i);
      return value.isBool() ? value.toBool() : value.isDouble() ? value.toDouble() != 0.0 : value.isTensor() && value.toTensor().defined();
    });
  }

  // What is made beside `self` gets its label: to name that is to name none.
  bool names_another_device() const {
    for (auto i : plan_.devices)
      if (!argument(i).isNone() && (plan_.minds_labels || argument(0).toTensor().device() != argument(i).toDevice())) return true;
    return false;
  }

  bool look(const at::Tensor& tensor, bool is_written) {
    is_written = is_written && writes_;
    if (is_above_ && is_noted(tensor)) return false;
    RefImpl* ref = tensor.defined() ? ref_of(tensor) : nullptr;
    if (!ref) return !is_written && is_number(tensor);
    if (!plan_.makes_dense && at::isComplexType(tensor.scalar_type())) return false;
    return operands_.add(ref, is_written);
  }

  bool announce() {
    if (!each_tensor([this](const at::Tensor& tensor, bool is_written) { return look(tensor, is_written); })) return false;
    const Device* device = operands_.device;
    if (!device || !device->is_open.load()) return false;
    if (device->is_seen_by_python || operands_.is_without_plain || world.is_watched.load()) return false;
    const auto& first = operands_.all[0];
    if (plan_.is_for_host && !first.plain.is_cpu()) return false;
    if (plan_.shares && would_share(first)) return false;
    if (plan_.is_view && c10::InferenceMode::is_enabled() && !first.ref->is_inference()) return false;
    return plan_.peak == Peak::kNotWhole || has_room_for_peak();
  }

  // Whether a copy would be just what its source is: all of a block, dtype and order. Of both that copy the last argument is the memory format.
  bool would_share(const Operands::Operand& source) const {
    const int64_t nbytes = source.block->nbytes.load();
    const IValue &dtype = argument(1), &format = argument(plan_.arg_count - 1);
    if (nbytes < kShareFromNbytes || nbytes != nbytes_of(source.plain)) return false;
    if (plan_.arg_count > 2 && !dtype.isNone() && dtype.toScalarType() != source.plain.scalar_type()) return false;
    return format.isNone() || format.toMemoryFormat() == at::MemoryFormat::Preserve || source.plain.is_contiguous(format.toMemoryFormat());
  }

  bool has_room_for_peak() const {
    const int64_t peak = peak_nbytes(plan_, stack_.data() + start_);
    if (peak <= 0) return peak == 0;
    const Ledger* ledger = operands_.device->ledger.load();
    return ledger && ledger->counted_nbytes.load() + ledger->newborn_nbytes.load() + peak <= ledger->high_nbytes.load();
  }

  // Push the arguments again, with plain tensors for TensorRefs: the kernel takes those.
  void push_plain() {
    stack_.reserve(stack_.size() + plan_.arg_count);
    size_t next = 0;
    auto plain_of = [&](const at::Tensor& tensor) { return is_ref(tensor) ? operands_.all[next++].plain : tensor; };
    auto slot = plan_.slots.begin();
    for (size_t i = 0; i < plan_.arg_count; ++i) {
      IValue value = argument(i);
      if (slot != plan_.slots.end() && slot->index == i) {
        ++slot;
        if (value.isTensor()) {
          value = plain_of(value.toTensor());
        } else if (value.isList()) {
          auto list = c10::impl::GenericList(static_cast<const c10::ListType&>(*value.type()).getElementType());
          for (const IValue& part : value.toListRef()) list.push_back(part.isTensor() ? IValue(plain_of(part.toTensor())) : part);
          value = std::move(list);
        }
      }
      if (value.isDevice()) value = IValue();  // it is where the operands are
      stack_.push_back(std::move(value));
    }
  }

  bool call() {
    WithFactories no_longer(false);
    try {
      std::optional<at::AutoDispatchBelowADInplaceOrView> nothing_to_note;
      if (is_above_) nothing_to_note.emplace();
      op_.callBoxed(&stack_);
    } catch (const c10::OutOfMemoryError&) {
      return false;  // the slow path makes room and tries again
    } catch (const c10::Error&) {
      // The host has the same kernels: then it is the program's own mistake.
      if (operands_.all[0].plain.is_cpu()) count_lists(), throw;
      return false;
    } catch (py::error_already_set& error) {  // the kernel is written in Python
      if (operands_.all[0].plain.is_cpu() || !is_of_a_kernel(error)) throw;
      return false;
    }
    for (const auto& operand : operands_.all) if (operand.is_written && !operand.block->owned.load()) tell_of_write(operand);
    operands_.withdraw();  // what a result needs may be evicted from here on
    return true;
  }

  // Another thread has begun to copy what was being written, and what it has got is stale.
  void tell_of_write(const Operands::Operand& operand) const {
    py::gil_scoped_acquire gil;
    WithFactories no_longer(false);
    auto half = py::reinterpret_steal<py::object>(half_of(operand.block.get()));
    if (!half) throw py::error_already_set();
    py::reinterpret_borrow<py::object>(written)(half, py::reinterpret_steal<py::object>(object_of(operands_.device)));
  }

  // Exchange the plain results for the program's tensors; false where one has found no room.
  bool wrap(int64_t tick) {
    const size_t count = plan_.twins.size(), first = start_ + plan_.arg_count;
    for (size_t i = 0; i < count; ++i) {
      IValue& out = stack_[first + i];
      if (plan_.twins[i] >= 0) {
        out = argument(plan_.twins[i]);
      } else if (out.isTensor()) {
        at::Tensor made = wrapped(out.toTensor(), tick);
        if (!made.defined() && out.toTensor().defined()) return false;
        out = std::move(made);
      } else if (out.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const IValue& part : out.toListRef()) {
          list.push_back(wrapped(part.toTensor(), tick));
          if (!list.get(list.size() - 1).defined() && part.toTensor().defined()) return false;
        }
        out = std::move(list);
      }
    }
    return true;
  }

  // The TensorRef of a result: what it is where it cannot be moved, or a kernel in Python has it from a factory; undefined where there is no room for it.
  at::Tensor wrapped(const at::Tensor& out, int64_t tick) {
    if (!out.defined() || out.layout() != c10::kStrided || out.is_quantized() || out.is_nested() || !out.has_storage() || is_ref(out)) return out;
    const auto* storage = out.storage().unsafeGetStorageImpl();
    const c10::Device label = operands_.all[0].ref->device();
    const bool is_held = out.use_count() > 1 || out.storage().use_count() > 1;  // else it is nobody's: of long lists each would be compared with all
    if (is_held) for (const auto& operand : operands_.all) {
      if (operand.plain.is_same(out)) return operand.ref->tensor();
      if (operand.plain.storage().unsafeGetStorageImpl() == storage) return make_ref(out, operand.block, operands_.device, label);
    }
    if (is_held) for (const auto& [its_storage, block] : shared_)
      if (its_storage == storage) return make_ref(out, block, operands_.device, label);
    at::Tensor made = counted(out, tick, label);
    const RefImpl* ref = made.defined() ? ref_of(made) : nullptr;  // over memory at home, which nobody shares, where it has gone there
    if (ref && is_held && (!ref->on || ref->on == operands_.device)) shared_.emplace_back(storage, ref->block);
    return made;
  }

  // The TensorRef of a fresh result; undefined where there is no room, and the operator may run again.
  at::Tensor counted(const at::Tensor& out, int64_t tick, c10::Device label) const {
    Ledger* ledger = operands_.device->ledger.load();
    const auto nbytes = static_cast<int64_t>(out.storage().nbytes());
    // Under pressure the strategy may want to hear of it, if it is not tiny.
    if (ledger && (!world.is_pressed.load(std::memory_order_relaxed) || nbytes < ledger->tiny_nbytes.load())) {
      const int64_t newborn = ledger->newborn_nbytes.fetch_add(nbytes) + nbytes;
      if (newborn + ledger->counted_nbytes.load() <= ledger->high_nbytes.load()) {
        auto* block = new Block();
        block->born = tick;
        block->last_use = tick;
        block->result = out;
        block->be_born(ledger, nbytes);
        block->owned = true;
        block->ready = operands_.device;
        return make_ref(out, BlockPtr(block), operands_.device, label);
      }
      ledger->newborn_nbytes.fetch_sub(nbytes);
    }
    py::gil_scoped_acquire gil;
    WithFactories no_longer(false);
    py::object op = writes_ ? py::reinterpret_borrow<py::object>(plan_.op) : py::none();
    py::object born = py::reinterpret_borrow<py::object>(bear)(out, py::reinterpret_steal<py::object>(object_of(operands_.device)), op, label);
    if (born.is_none() || THPVariable_Check(born.ptr())) return tensor_in(born.ptr());
    return make_ref(out, BlockPtr(core_of(born.ptr())), operands_.device, label);
  }

  // Torch leaves it to this kernel, which has seen nothing but plain tensors; it may have refused one behind others.
  void count_lists() const {
    for (auto slot = plan_.slots.begin(); plan_.counts_lists && slot != plan_.slots.end(); ++slot)
      if (slot->is_written && slot->is_list)
        for (const IValue& part : argument(slot->index).toListRef())
          if (part.isTensor() && !part.toTensor().is_inference()) part.toTensor().unsafeGetTensorImpl()->bump_version();
  }

  const c10::OperatorHandle& op_;
  const Plan& plan_;
  Stack& stack_;
  const size_t start_;
  const bool is_above_, writes_;
  Operands operands_;
  std::vector<std::pair<const c10::StorageImpl*, BlockPtr>> shared_;  // the blocks of results that others may share
};
}  // namespace ttr
