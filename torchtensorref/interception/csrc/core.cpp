// Operators on ready TensorRefs without Python: torchTensorRef's path in C++.
//
// One unit of translation, since torch's headers take longer than all that is ours. To be read in this
// order: state.h, python_types.h, ref.h, plan.h, peaks.h, ready.h, older.h, entry.h.
#include "entry.h"

namespace ttr {
namespace {

// What torch calls for TensorRefs, as long as these live.
std::vector<std::unique_ptr<torch::Library>> registered;

template <auto function>
void register_for(DispatchKey key) {
  registered.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "_", key, __FILE__, __LINE__));
  registered.back()->fallback(torch::CppFunction::makeFromBoxedFunction<function>());
}

void add_class(py::module_& module, const char* name, PyTypeObject& type) {
  if (PyType_Ready(&type) < 0) throw py::error_already_set();
  module.add_object(name, py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&type)));
}

void set_up(const py::args& functions) {
  PyObject** places[] = {&dispatch, &run_whole, &describe, &bear, &adopt, &written};
  for (size_t i = 0; i < std::size(places); ++i) *places[i] = py::object(functions[i]).release().ptr();
}

// What Python finds on a TensorRef beside a tensor's own attributes, by name.
py::dict attributes() {
  py::dict found;
  auto* of = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  for (PyGetSetDef* field = ref_fields; field->name; ++field) found[field->name] = py::reinterpret_steal<py::object>(PyDescr_NewGetSet(of, field));
  return found;
}

PyMethodDef is_ref_method = {"is_ref", is_python_ref, METH_O, "Whether an object is a TensorRef."};

// Another TensorRef with the same metadata, over the same or, if it is not None, another block.
at::Tensor alias_of(const at::Tensor& tensor, py::handle other) {
  const RefImpl* ref = ref_of(tensor);
  TORCH_CHECK_TYPE(ref, "it is no TensorRef");
  BlockPtr block = other.is_none() ? ref->its_block() : BlockPtr(core_of(other.ptr()));
  auto made = c10::make_intrusive<RefImpl>(tensor, block, tensor.device());
  if (block.get() == ref->block.get()) made->point_at_the_same(*ref);
  return at::Tensor(std::move(made));
}

// A TensorRef with such metadata over a block of which no plain tensor is at hand; `like` has the dtype.
at::Tensor bare_ref(const at::Tensor& like, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset, py::handle block, c10::Device label) {
  auto made = c10::make_intrusive<RefImpl>(like, BlockPtr(core_of(block.ptr())), label);
  made->set_sizes_and_strides(sizes, strides, offset);
  return at::Tensor(std::move(made));
}

// Have a lock anew; whether a thread that is gone held it, and may have left what it guards halfway.
bool renew(std::mutex& lock) {
  const bool was_held = !lock.try_lock();
  new (&lock) std::mutex();
  return was_held;
}

// In a forked child, which has none of the other threads: what they counted, and the locks that they may have held.
void begin_anew() {
  ++world.process;
  renew(Running::lock);
  Running& mine = Running::mine();
  Running::all = &mine, mine.next = nullptr;
  Operands::announce_anew();
  if (renew(use_log.lock)) new (&use_log.uses) std::vector<Use>();
  if (renew(Plans::lock)) new (&Plans::all) std::unordered_map<const void*, const Plan*>(), ++Plans::forgotten;
  for (auto& [object, device] : known_devices) if (Ledger* ledger = device->ledger) renew(ledger->lock);
}

}  // namespace
}  // namespace ttr

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace ttr;
  add_class(module, "BlockBase", block_type);
  add_class(module, "LedgerBase", ledger_type);
  add_class(module, "BooksBase", books_type);
  module.def("open", [] {
    static auto* kept = new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Plans>()));
    register_for<&above>(kAbove);
    register_for<&below>(kBelow);
    stand_for_python(c10::impl::getGlobalPyInterpreter()->vtable_, true);
  });
  module.def("close", [] {
    stand_for_python(c10::impl::getGlobalPyInterpreter()->vtable_, false);
    registered.clear();
  });
  module.def("set_up", &set_up);
  module.def("forget", [](const char* name, const char* overload) {
    if (auto op = c10::Dispatcher::singleton().findSchema({name, overload})) Plans().onOperatorDeregistered(*op);
  });
  module.def("set_maker", [](py::object make) { make_half = make.release().ptr(); });
  module.def("make_ref", [](const at::Tensor& plain, py::handle block, py::handle device, c10::Device label) {
    return make_ref(plain, BlockPtr(core_of(block.ptr())), device_of(device.ptr()), label);
  });
  module.def("alias_of", &alias_of);
  // The number of the storage under a plain tensor, to be held from now on or not; its bytes, and whether they may change.
  module.def("storage_under", [](const at::Tensor& plain, bool is_held) {
    c10::StorageImpl* storage = plain.storage().unsafeGetStorageImpl();
    if (is_held) c10::raw::intrusive_ptr::make_weak(storage);
    return py::make_tuple(reinterpret_cast<intptr_t>(storage), storage->nbytes(), storage->resizable());
  });
  module.def("bare_ref", &bare_ref);
  module.def("without_python", &without_python);
  module.def("attributes", &attributes);
  // Not pybind's: this is asked of every operand that Python looks at.
  module.add_object("is_ref", py::reinterpret_steal<py::object>(PyCFunction_New(&is_ref_method, nullptr)));
  module.def("watch", [](bool is_on) { world.is_watched = is_on; });
  module.def("note_stand_ins", [](bool are_made) { world.has_stand_ins = are_made; });
  module.def("running_elsewhere", &Running::of_others);
  module.def("begin_anew", &begin_anew);
  module.def("call_with_factories", [](py::object function, const py::args& args, const py::kwargs& kwargs) {
    WithFactories here(true);
    return function(*args, **kwargs);
  });
  module.def("take_uses", [] { return use_log.take(); });
  module.def("peak_nbytes", [](int kind, const std::vector<std::optional<at::Tensor>>& arguments) {
    return peak_nbytes(static_cast<Peak>(kind), Stack(arguments.begin(), arguments.end()).data());
  });
}
