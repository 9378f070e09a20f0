// Before torch 2.13: torch's way to Python, with our key left in.
//
// Torch calls a mode, or a tensor of another class (jagged ones, DTensor), with all keys shut out that stand above Python's, as kBelow
// does there: operators on a TensorRef inside would look for its bytes. All such calls are made through one object, which stands for
// Python. Ours hands on what torch's does, and such a call with our key let in again.
#pragma once

#include "ref.h"

#include <c10/core/impl/PyInterpreterHooks.h>

namespace ttr {

constexpr bool kIsOlder = kBelow > DispatchKey::Python;

#define TTR_SAME(type, name, parameters, ...) type name parameters const { return torchs->name(__VA_ARGS__); }
#define TTR_SAME_OF(type, name) TTR_SAME(type, name, (const c10::TensorImpl* self), self)
#define TTR_SAME_IN(type, name) TTR_SAME(type, name, (const c10::TensorImpl* self, at::MemoryFormat format), self, format)
#define TTR_SAME_TRACE(name) TTR_SAME(void, trace_gpu_##name, (c10::DeviceType device, uintptr_t a), device, a)
#define TTR_SAME_TRACE_OF_2(name) TTR_SAME(void, trace_gpu_##name, (c10::DeviceType device, uintptr_t a, uintptr_t b), device, a, b)

// A template without `override`: what a torch does not ask for is not made, and one that has no use for it may ask for more.
template <class Base>
struct Python final : Base {
  explicit Python(const Base* of) : torchs(of) {}
  const Base* torchs;

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    c10::impl::ForceDispatchKeyGuard as_before;
    c10::impl::tls_set_dispatch_key_excluded(kBelow, false);
    torchs->dispatch(op, stack);
  }
  TTR_SAME(void, incref, (PyObject* of), of) TTR_SAME(void, decref, (PyObject* of), of) TTR_SAME(size_t, refcnt, (PyObject* of), of)
  TTR_SAME(void, decref, (PyObject* of, bool slot), of, slot) TTR_SAME(bool, try_incref, (const c10::impl::PyObjectSlot& slot), slot)
  TTR_SAME(std::string, name, ()) TTR_SAME(void, reportErrorCallback, (PyObject* callback, DispatchKey key), callback, key)
  TTR_SAME(void, python_op_registration_trampoline,
           (const c10::OperatorHandle& op, DispatchKey key, DispatchKeySet keys, torch::jit::Stack* stack, bool a, bool b), op, key, keys, stack, a, b)
  TTR_SAME(void, throw_abstract_impl_not_imported_error, (std::string op, const char* module, const char* context), op, module, context)
  TTR_SAME(void, python_dispatcher, (const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack), op, keys, stack)
  TTR_SAME_IN(bool, is_contiguous) TTR_SAME_IN(c10::SymBool, sym_is_contiguous) TTR_SAME_IN(bool, is_strides_like)
  TTR_SAME_OF(c10::intrusive_ptr<c10::TensorImpl>, detach) TTR_SAME_OF(void, reset_backward_hooks)
  TTR_SAME_OF(c10::Device, device) TTR_SAME_OF(c10::Layout, layout) TTR_SAME_OF(bool, is_non_overlapping_and_dense)
  TTR_SAME_OF(int64_t, dim) TTR_SAME_OF(int64_t, numel) TTR_SAME_OF(c10::IntArrayRef, sizes) TTR_SAME_OF(c10::IntArrayRef, strides)
  TTR_SAME_OF(c10::SymInt, sym_numel) TTR_SAME_OF(c10::SymInt, sym_storage_offset)
  TTR_SAME_OF(c10::SymIntArrayRef, sym_sizes) TTR_SAME_OF(c10::SymIntArrayRef, sym_strides)
  TTR_SAME_TRACE(event_creation) TTR_SAME_TRACE(event_deletion) TTR_SAME_TRACE(event_synchronization)
  TTR_SAME_TRACE(memory_allocation) TTR_SAME_TRACE(memory_deallocation) TTR_SAME_TRACE(stream_creation) TTR_SAME_TRACE(stream_synchronization)
  TTR_SAME_TRACE_OF_2(event_record) TTR_SAME_TRACE_OF_2(event_wait) TTR_SAME(void, trace_gpu_device_synchronization, (c10::DeviceType device), device)
};

// Have calls of Python pass ours, or torch's again. Ours stays: another thread may be in it.
template <class Base>
void stand_for_python(const Base*& torchs, bool is_ours) {
  if constexpr (kIsOlder) {
    static const auto* ours = new Python<Base>(torchs);
    torchs = is_ours ? ours : torchs == ours ? ours->torchs : torchs;
  }
}
}  // namespace ttr
