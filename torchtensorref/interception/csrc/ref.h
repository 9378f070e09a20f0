// A TensorRef for torch: a tensor with sizes, strides and autograd of its own that has a block instead of bytes, and keeps the plain
// tensor over the replica where operators last ran.
//
// Its Python object is of torch's own class, or of whichever class the program makes of it, and it carries no Python key: autograd sees no
// subclass; nodes, formulas and bits are those of plain tensors. It carries two keys of ours instead (entry.h), by which it is known.
#pragma once

#include "python_types.h"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ttr {
using c10::DispatchKey;
using c10::DispatchKeySet;

// Above autograd: torch itself leaves this key alone.
constexpr auto kAbove = DispatchKey::DeferredInit;
// Below autograd, conjugation and Python's modes, above every kernel, also those of sparse tensors. Torch 2.15 has fake tensors in C++ that
// carry it, and no way to make one yet: a tensor is ours by both keys, and what asks for this one is told so (tensor/install.py).
constexpr auto kBelow = DispatchKey::Fake;
constexpr DispatchKeySet kOurs({kAbove, kBelow});
// Functionalization gives what it wraps around a TensorRef the keys of that one besides its own.
inline bool is_ours(const c10::TensorImpl& impl) { return (impl.key_set() & (kOurs | DispatchKeySet(DispatchKey::Functionalize))) == kOurs; }
constexpr DispatchKeySet kLazyBits({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});

// The frame of Python that this thread is in, to be compared and never looked into.
inline const void* python_frame() {
  PyThreadState* state = PyGILState_GetThisThreadState();
#if PY_VERSION_HEX >= 0x030D0000
  return state ? state->current_frame : nullptr;
#else
  return state ? state->cframe->current_frame : nullptr;
#endif
}

// While an operator on TensorRefs is taken apart, or goes back, factories come to us too: what they make is filled for a
// TensorRef, and nothing in the call of a factory says so. Those that Python calls meanwhile (a hook's, our own) are none
// of these: they have another frame. Nor are those of threads that a script forks: torch hands them the key.
class WithFactories {
 public:
  explicit WithFactories(bool wanted) : was_(are_taken()), was_here_(is_here_), is_other_(was_ != wanted || is_here_ != wanted), before_(frame_) {
    if (is_other_) c10::impl::tls_set_dispatch_key_included(kBelow, is_here_ = wanted);
    if (is_other_ && wanted) frame_ = python_frame();
  }
  ~WithFactories() {
    if (is_other_) c10::impl::tls_set_dispatch_key_included(kBelow, was_);
    is_here_ = was_here_, frame_ = before_;
  }
  WithFactories(const WithFactories&) = delete;

  static bool are_taken() { return c10::impl::tls_is_dispatch_key_included(kBelow); }
  // Whether C++ itself calls the factory. Autograd's threads for devices have no frame, and are handed the key, too.
  static bool is_called_by_cpp() {
    const void* frame = python_frame();
    return frame ? frame == frame_ : is_here_ || torch::autograd::get_current_graph_task_id() != -1;
  }

 private:
  static inline thread_local const void* frame_ = nullptr;
  static inline thread_local bool is_here_ = false;
  const bool was_, was_here_, is_other_;
  const void* const before_;
};

struct RefImpl final : c10::TensorImpl {
  // `lock` is for the four below it, which another thread may exchange together (`x.data = y`). Nobody waits under it.
  mutable std::atomic<uint32_t> lock{0};  // the number of the process whose thread has it; 0: nobody
  BlockPtr block;
  at::Tensor plain;
  Device* on = nullptr;  // null: no plain tensor that the ready path may use
  at::Tensor home;       // the plain tensor over the replica at home, once made

  RefImpl(const at::Tensor& like, BlockPtr of, c10::Device label)
      : TensorImpl(c10::Storage(of->face_on(label)),
                   DispatchKeySet(c10::computeDispatchKey(std::nullopt, c10::kStrided, label)), like.dtype()),
        block(std::move(of)) {
    key_set_ = key_set_ | kOurs | (like.key_set() & kLazyBits);
    set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  }
  at::Tensor tensor() const { return at::Tensor(c10::intrusive_ptr<TensorImpl>::unsafe_reclaim_from_nonowning(const_cast<RefImpl*>(this))); }
  struct Locked {
    explicit Locked(const RefImpl& ref) : flag(ref.lock) {
      uint32_t seen = 0, mine = world.process;  // what a thread of the parent's has kept is taken over
      while (!flag.compare_exchange_weak(seen, mine, std::memory_order_acquire)) if (seen == mine) seen = 0;
    }
    ~Locked() { flag.store(0, std::memory_order_release); }
    std::atomic<uint32_t>& flag;
  };
  std::tuple<BlockPtr, at::Tensor, at::Tensor, Device*> all() const {
    Locked guard(*this);
    return {block, plain, home, on};
  }
  BlockPtr its_block() const { Locked guard(*this); return block; }
  void point_at_the_same(const RefImpl& other) {
    auto [its_block, its_plain, its_home, its_device] = other.all();
    Locked guard(*this);  // what they were before is let go behind it
    std::swap(block, its_block);
    std::swap(plain, its_plain);
    std::swap(home, its_home);
    on = its_device;
  }
  // A dispatch mode sees this as the operator `detach`, as it does for plain tensors.
  c10::intrusive_ptr<TensorImpl> copy(c10::VariableVersion version, bool may_change) const {
    const auto modes = c10::impl::TorchDispatchModeTLS::stack_len();
    if (!modes || c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python)) return twin(std::move(version), may_change);
    auto seen = c10::impl::TorchDispatchModeTLS::get_stack_at(modes - 1)->pyinterpreter()->detach(this);
    if (!seen->is_inference()) {
      seen->set_version_counter(std::move(version));
      seen->set_allow_tensor_metadata_change(may_change);
    }
    return seen;
  }
  c10::intrusive_ptr<TensorImpl> twin(c10::VariableVersion version, bool may_change) const {
    auto twin = c10::make_intrusive<RefImpl>(tensor(), its_block(), device());
    copy_tensor_metadata(this, twin.get(), std::move(version), may_change);
    twin->point_at_the_same(*this);
    return twin;
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version, bool may_change) const override {
    return copy(version, may_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version, bool may_change) const override {
    return copy(std::move(version), may_change);
  }
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override {
    TORCH_CHECK(is_ours(*impl), "a TensorRef can only become what another TensorRef is");
    TensorImpl::shallow_copy_from(impl);
    point_at_the_same(*static_cast<RefImpl*>(impl.get()));
  }
  // Profilers and other observers that record operands read the bytes of whatever has a storage.
  bool has_storage() const override { return !at::hasCallbacks(); }
  const char* tensorimpl_type_name() const override { return "TensorRef"; }
};

inline RefImpl* ref_of(const c10::TensorImpl* impl) {
  return is_ours(*impl) ? static_cast<RefImpl*>(const_cast<c10::TensorImpl*>(impl)) : nullptr;
}
inline RefImpl* ref_of(const at::TensorBase& tensor) { return ref_of(tensor.unsafeGetTensorImpl()); }
inline bool is_ref(const at::TensorBase& tensor) { return tensor.defined() && ref_of(tensor); }

inline at::Tensor make_ref(const at::Tensor& plain, BlockPtr block, Device* device, c10::Device label) {
  auto made = c10::make_intrusive<RefImpl>(plain, std::move(block), label);
  made->plain = plain;
  // Never on the ready path, which hands plain tensors on without a look at such bits.
  made->on = (plain.key_set() & kLazyBits).empty() ? device : nullptr;
  return at::Tensor(std::move(made));
}

// -- attributes of tensors that are TensorRefs (with the GIL) --------------------------------------

// By its class, not as `isinstance` asks: a proxy only says that it is a tensor.
inline PyObject* is_python_ref(PyObject*, PyObject* object) {
  const bool is_tensor = PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass));
  return PyBool_FromLong(is_tensor && ref_of(THPVariable_Unpack(object)));
}
inline RefImpl* ref_in(PyObject* self) {
  RefImpl* ref = ref_of(THPVariable_Unpack(self));
  if (!ref) PyErr_SetString(PyExc_AttributeError, "it is a plain tensor, and no TensorRef");
  return ref;
}
inline PyObject* block_in(RefImpl& ref) { return half_of(ref.its_block().get()); }
inline void set_block(RefImpl& ref, PyObject* value) {
  BlockPtr given(core_of(value));
  if (given.get() == ref.block.get()) return;
  ref.set_storage_keep_dtype(given->face_on(ref.device()));
  RefImpl::Locked guard(ref);
  std::swap(ref.block, given);
}
template <size_t place>
PyObject* plain_in(RefImpl& ref) { return or_none(std::get<place>(ref.all())); }
template <at::Tensor RefImpl::*member>
void set_plain(RefImpl& ref, PyObject* value) {
  at::Tensor given = tensor_in(value);
  RefImpl::Locked guard(ref);
  if (member == &RefImpl::plain) ref.on = nullptr;  // until it is said where the new one is
  std::swap(ref.*member, given);
}
inline PyObject* device_in(RefImpl& ref) { return object_of(ref.on); }
inline void set_device(RefImpl& ref, PyObject* value) {
  Device* device = device_of(value);
  RefImpl::Locked guard(ref);
  ref.on = device;
}
template <auto get, auto set>
constexpr PyGetSetDef ref_field(const char* name) {
  return {name,
          [](PyObject* self, void*) -> PyObject* { RefImpl* ref = ref_in(self); return ref ? get(*ref) : nullptr; },
          [](PyObject* self, PyObject* value, void*) -> int { RefImpl* ref = ref_in(self); return ref ? set(*ref, value), 0 : -1; }};
}
inline PyGetSetDef ref_fields[] = {
    ref_field<block_in, set_block>("_ttr_block"), ref_field<device_in, set_device>("_ttr_device"),
    ref_field<plain_in<1>, set_plain<&RefImpl::plain>>("_ttr_plain"), ref_field<plain_in<2>, set_plain<&RefImpl::home>>("_ttr_home"),
    {},
};
}  // namespace ttr
