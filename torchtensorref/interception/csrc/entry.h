// Where torch meets a TensorRef: twice, once above autograd and once below it.
//
// Above, where no gradient is noted and no mode, transform or autocast looks on, an operator on ready operands runs at once, a composite
// one as a whole. What does not, goes on its way through torch, and comes again below, where it runs if it is ready, or goes to Python.
#pragma once

#include "older.h"
#include "ready.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/library.h>

namespace torch::jit {  // pybind_utils.h has them, and takes half a minute to compile
TORCH_PYTHON_API py::object toPyObject(c10::IValue);
TORCH_PYTHON_API c10::IValue toIValue(py::handle, const c10::TypePtr&, std::optional<int32_t>);
}  // namespace torch::jit

namespace ttr {

inline PyObject* dispatch = nullptr;  // Python: interception/entry.py
inline PyObject* adopt = nullptr;      // Python: the TensorRef of a plain tensor that is given up
inline PyObject* run_whole = nullptr;  // Python: a composite operator as one; NotImplemented: in parts

// Torch's keys that say that nobody but autograd and a kernel has to see the operator.
inline const uint64_t kHarmless =
    c10::full_backend_mask | DispatchKeySet({DispatchKey::Dense, DispatchKey::AutogradFunctionality, DispatchKey::ADInplaceOrView,
                                             DispatchKey::BackendSelect, kAbove, kBelow}).raw_repr();

// -- to Python ------------------------------------------------------------------------------------

// What an argument is for Python. Torch keeps dtypes, layouts and memory formats as numbers.
inline py::object to_python(const IValue& value, const c10::Argument& argument) {
  if (value.isNone()) return py::none();
  const c10::Type* type = argument.real_type().get();
  if (type->kind() == c10::TypeKind::OptionalType) type = type->containedTypes()[0].get();
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType: return py::cast(value.toScalarType());
    case c10::TypeKind::LayoutType: return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPLayout(value.toLayout())));
    case c10::TypeKind::MemoryFormatType: return py::cast(value.toMemoryFormat());
    default: return torch::jit::toPyObject(value);
  }
}

inline bool is_default(const IValue& value, const c10::Argument& argument) {
  const auto& fallback = argument.default_value();
  return fallback.has_value() && (value.isNone() ? fallback->isNone() : !fallback->isNone() && value == *fallback);
}

// The same TensorRef without its object in Python: the program may want one of another class (`nn.Parameter(x)` is a view of `x`).
inline at::Tensor without_python(const at::Tensor& made) {
  return is_ref(made) ? at::Tensor(ref_of(made)->twin(made.unsafeGetTensorImpl()->version_counter(), true)) : made;
}

// Have a function of Python's run an operator, as `__torch_dispatch__` would; false, and nothing has happened, where it returns NotImplemented.
inline bool hand_over(PyObject* function, const c10::OperatorHandle& op, const Plan& plan, Stack* stack, bool is_above) {
  const auto& schema = op.schema();
  auto argument = [&](size_t i) -> const IValue& { return plan.arguments(*stack)[i]; };
  py::gil_scoped_acquire gil;
  WithFactories no_longer(false);
  // Above autograd nothing has to be noted, and what Python takes apart it does as torch does.
  c10::impl::ExcludeDispatchKeyGuard noted_already(is_above || plan.is_recorded_inside ? DispatchKeySet() : c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  c10::impl::ExcludeDispatchKeyGuard looked_already(kAbove);
  size_t given = plan.positional_count;
  while (given && is_default(argument(given - 1), schema.arguments()[given - 1])) --given;
  py::tuple args(given);
  py::dict kwargs;
  for (size_t i = 0; i < plan.arg_count; ++i) {
    const auto& as = schema.arguments()[i];
    if (i < given) args[i] = to_python(argument(i), as);
    else if (i >= plan.positional_count && !is_default(argument(i), as)) kwargs[py::str(as.name())] = to_python(argument(i), as);
  }
  py::object out = py::handle(function)(py::handle(plan.op), py::tuple(), args, kwargs);
  if (out.ptr() == Py_NotImplemented) return false;
  torch::jit::drop(*stack, plan.arg_count);
  const auto& returns = schema.returns();
  for (size_t i = 0; i < returns.size(); ++i)
    stack->push_back(torch::jit::toIValue(returns.size() == 1 ? out : py::object(out[py::int_(i)]), returns[i].real_type(), std::nullopt));
  if (plan.is_view && returns.size() == 1 && stack->back().isTensor()) stack->back() = without_python(stack->back().toTensor());
  return true;
}

// -- from torch -----------------------------------------------------------------------------------

// An operator without a TensorRef, met while factories come here: what a factory makes is adopted, else it stays plain.
inline void pass_on(const c10::OperatorHandle& op, const Plan& plan, DispatchKeySet keys, Stack* stack) {
  const bool is_adopted = plan.is_factory && WithFactories::is_called_by_cpp();
  WithFactories no_longer(false);
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kBelow), stack);
  if (!is_adopted || !stack->back().isTensor() || !stack->back().toTensor().defined()) return;
  const at::Tensor& made = stack->back().toTensor();
  if (!made.dim() && op.schema().name() != "aten::empty") return;  // a single number, and not there to be resized
  if (!made.is_cpu() || made.layout() != c10::kStrided) return;
  py::gil_scoped_acquire gil;
  stack->back() = py::reinterpret_borrow<py::object>(adopt)(made).cast<at::Tensor>();
}

// Torch gives an `out=` with a lazy bit its sizes in C++, and only then fails where its memory would have to grow: it has the old ones again.
inline void go_on(const c10::OperatorHandle& op, const Plan& plan, DispatchKeySet keys, Stack* stack) {
  if (!keys.has_any(kLazyBits)) return op.redispatchBoxed(keys, stack);
  std::vector<std::tuple<at::Tensor, std::vector<int64_t>, std::vector<int64_t>>> before;
  plan.each_tensor(plan.arguments(*stack), [&](const at::Tensor& out, bool is_written) {
    if (is_written && is_ref(out)) before.emplace_back(out, out.sizes().vec(), out.strides().vec());
    return true;
  });
  try { op.redispatchBoxed(keys, stack); } catch (...) {
    for (auto& [out, sizes, strides] : before) out.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    throw;
  }
}

inline void above(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Plan& plan = plan_of(op);
  const bool is_alone = !(keys.raw_repr() & ~kHarmless) && !c10::impl::dispatch_mode_enabled();
  if (is_alone && plan.runs_above()) {
    ReadyCall call(op, plan, stack, true);
    if (call.run()) return;
    if (plan.peak != Peak::kNotWhole && call.is_for_python()) {
      call.withdraw();
      if (hand_over(run_whole, op, plan, stack, true)) return;
    }
  }
  const DispatchKeySet further = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kAbove);
  if (!plan.is_composite) return go_on(op, plan, further, stack);
  WithFactories here(true);
  // In inference mode autograd takes nothing apart; its kernel does all the same, but of nested tensors: parts are ready, count versions and make views.
  const bool in_parts = c10::InferenceMode::is_enabled() && plan.comes_in_parts &&
                        !keys.has_any(DispatchKeySet(DispatchKey::NestedTensor)) && peak_nbytes(plan, plan.arguments(*stack)) < 0;
  go_on(op, plan, in_parts ? further | DispatchKeySet(DispatchKey::AutogradCPU) : further, stack);
}

inline void below(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  // Modes and other classes come first. Before torch 2.13 their key does not.
  if (kIsOlder && keys.has(DispatchKey::Python)) return op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kBelow), stack);
  const Plan& plan = plan_of(op);
  auto is_plain = [](const at::Tensor& operand, bool) { return !is_ref(operand); };
  if (WithFactories::are_taken() && plan.each_tensor(plan.arguments(*stack), is_plain)) return pass_on(op, plan, keys, stack);
  if (!plan.may_be_ready || !ReadyCall(op, plan, stack, false).run())
    TORCH_CHECK_TYPE(hand_over(dispatch, op, plan, stack, false), "no rule for ", op.operator_name(), " with operands of these classes");
}
}  // namespace ttr
