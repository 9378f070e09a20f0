// What Python sees of blocks, ledgers and books: classes from which those of memory/ are derived. All with the GIL.
#pragma once

#include "state.h"

#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>

namespace ttr {

struct PyBlock {
  PyObject_HEAD
  Block* core;
  PyObject *births, *replicas, *exposure;  // the latter two: null until `births` settles them
  PyObject* weak_references;
  c10::Storage adopted;  // whose bytes are to be those at home, until then
  int use_count, given_by_value_count;
  bool is_persistent, is_kept, is_rehoused;
};
struct PyLedger {
  PyObject_HEAD
  Ledger* core;
};
struct PyBooks {
  PyObject_HEAD
  PyObject* ready_on;
};

inline PyObject* make_half = nullptr;           // Python's maker of a block's half

inline std::unordered_map<PyObject*, Device*> known_devices;

inline bool says(py::handle object, const char* name) { return py::getattr(object, name, py::bool_(false)).cast<bool>(); }

// Its weak reference is called: Python 3.15 no longer has the C call that lends the object, and 3.12 not yet the one that gives it.
inline PyObject* object_of(const Device* device) { return device ? PyObject_CallNoArgs(device->weak) : Py_NewRef(Py_None); }
// The device of a Python device; null for None and for what is none (books that are closed).
inline Device* device_of(PyObject* object) {
  if (object == Py_None) return nullptr;
  Device*& found = known_devices[object];
  if (found && py::reinterpret_steal<py::object>(object_of(found)).ptr() == object) return found;
  found = new Device();  // another object at the address of one that is gone
  found->weak = PyWeakref_NewRef(object, nullptr);
  if (!found->weak) PyErr_Clear(), found->weak = PyWeakref_NewRef(reinterpret_cast<PyObject*>(&PyLong_Type), nullptr);
  found->is_seen_by_python = says(object, "has_virtual_clock") || says(object, "is_witness");
  return found;
}

inline Block* core_of(PyObject* self) { return reinterpret_cast<PyBlock*>(self)->core; }
inline Ledger* ledger_of(PyObject* self) { return reinterpret_cast<PyLedger*>(self)->core; }
inline World* world_of(PyObject*) { return &world; }

template <auto of, auto member>
PyObject* get_number(PyObject* self, void*) {
  const int64_t number = of(self)->*member;
  return std::is_same_v<decltype(of(self)->*member), std::atomic<bool>&> ? PyBool_FromLong(number) : PyLong_FromLongLong(number);
}
template <auto of, auto member>
int set_number(PyObject* self, PyObject* value, void*) {
  const int64_t number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) return -1;
  return of(self)->*member = number, 0;
}
template <auto of, auto member>
constexpr PyGetSetDef number(const char* name) { return {name, get_number<of, member>, set_number<of, member>}; }

inline PyObject* new_block(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  reinterpret_cast<PyBlock*>(self)->core = new Block();
  new (&reinterpret_cast<PyBlock*>(self)->adopted) c10::Storage();
  core_of(self)->half = self;
  return self;
}

inline void free_block(PyObject* self) {
  auto* block = reinterpret_cast<PyBlock*>(self);
  if (block->weak_references) PyObject_ClearWeakRefs(self);
  for (PyObject** part : {&block->births, &block->replicas, &block->exposure}) Py_CLEAR(*part);
  block->adopted.~Storage();
  delete std::exchange(block->core, nullptr);
  Py_TYPE(self)->tp_free(self);
}

// A new reference to what Python keeps of a block whose `refs` are held; null with an error set.
inline PyObject* half_of(Block* block) {
  if (PyObject* half = block->half.load()) return Py_NewRef(half);
  PyObject* made = PyObject_CallNoArgs(make_half);
  if (!made) return nullptr;
  if (PyObject* half = block->half.load()) return Py_DECREF(made), Py_NewRef(half);  // another thread was sooner
  delete std::exchange(reinterpret_cast<PyBlock*>(made)->core, block);
  block->half = made;
  return Py_NewRef(made);  // the other one is that of the TensorRefs
}

inline PyObject* get_ready(PyObject* self, void*) { return object_of(core_of(self)->ready.load()); }
inline int set_ready(PyObject* self, PyObject* value, void*) { return core_of(self)->ready.store(device_of(value)), 0; }
inline int set_nbytes(PyObject* self, PyObject* value, void*) {
  if (set_number<core_of, &Block::nbytes>(self, value, nullptr)) return -1;
  if (core_of(self)->face) core_of(self)->face.set_nbytes(core_of(self)->nbytes.load());
  return 0;
}

inline PyObject* or_none(const at::Tensor& tensor) { return tensor.defined() ? THPVariable_Wrap(tensor) : Py_NewRef(Py_None); }
inline at::Tensor tensor_in(PyObject* value) { return value == Py_None ? at::Tensor() : THPVariable_Unpack(value); }
inline PyObject* get_result(PyObject* self, void*) { return or_none(core_of(self)->result); }
inline int set_result(PyObject* self, PyObject* value, void*) {
  at::Tensor given = tensor_in(value);
  return std::swap(core_of(self)->result, given), 0;
}

// Who makes its replicas when somebody asks: what adopts, Python's ledger, or that of our list.
inline PyObject* get_births(PyObject* self, void*) {
  PyObject* births = reinterpret_cast<PyBlock*>(self)->births;
  if (!births || births == Py_None)
    if (Ledger* ledger = core_of(self)->ledger.load()) births = ledger->object;
  return Py_NewRef(births ? births : Py_None);
}
template <PyObject* PyBlock::*member>
PyObject* get_settled(PyObject* self, void*) {
  PyObject*& found = reinterpret_cast<PyBlock*>(self)->*member;
  if (found) return Py_NewRef(found);
  auto births = py::reinterpret_steal<py::object>(get_births(self, nullptr));
  // Where there are none another thread has settled it meanwhile.
  PyObject* done = births.is_none() ? Py_NewRef(Py_None) : PyObject_CallMethod(births.ptr(), "settle", "O", self);
  if (done && !found) PyErr_SetString(PyExc_AttributeError, "the block has not been settled");
  Py_XDECREF(done);
  return done ? Py_XNewRef(found) : nullptr;
}
template <PyObject* PyBlock::*member>
int set_part(PyObject* self, PyObject* value, void*) {
  return Py_XDECREF(std::exchange(reinterpret_cast<PyBlock*>(self)->*member, Py_XNewRef(value))), 0;
}

// A tensor of bytes over what was adopted; of what it is set to, the storage is kept and no more.
inline PyObject* get_adopted(PyObject* self, void*) {
  const c10::Storage& storage = reinterpret_cast<PyBlock*>(self)->adopted;
  if (!storage) Py_RETURN_NONE;
  auto made = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   caffe2::TypeMeta::Make<uint8_t>());
  made->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return THPVariable_Wrap(at::Tensor(std::move(made)));
}
inline int set_adopted(PyObject* self, PyObject* value, void*) {
  c10::Storage given = value == Py_None ? c10::Storage() : THPVariable_Unpack(value).storage();
  return std::swap(reinterpret_cast<PyBlock*>(self)->adopted, given), 0;
}

inline PyGetSetDef block_fields[] = {
    {"ready", get_ready, set_ready}, {"users", get_number<core_of, &Block::users>}, number<core_of, &Block::owned>("owned"),
    number<core_of, &Block::logged_as>("logged_as"), number<core_of, &Block::last_use>("last_use"), number<core_of, &Block::born>("born"),
    {"nbytes", get_number<core_of, &Block::nbytes>, set_nbytes},
    {"result", get_result, set_result}, {"adopted", get_adopted, set_adopted},
    {"births", get_births, set_part<&PyBlock::births>},
    {"replicas", get_settled<&PyBlock::replicas>, set_part<&PyBlock::replicas>},
    {"exposure", get_settled<&PyBlock::exposure>, set_part<&PyBlock::exposure>},
    {},
};
// What only Python reads and writes.
inline PyMemberDef block_members[] = {
    {"settled", T_OBJECT, offsetof(PyBlock, replicas), READONLY},  // the replicas if they are there, or None
    {"use_count", T_INT, offsetof(PyBlock, use_count)}, {"given_by_value_count", T_INT, offsetof(PyBlock, given_by_value_count)},
    {"is_persistent", T_BOOL, offsetof(PyBlock, is_persistent)}, {"is_kept", T_BOOL, offsetof(PyBlock, is_kept)},
    {"is_rehoused", T_BOOL, offsetof(PyBlock, is_rehoused)},
    {},
};

inline PyObject* new_ledger(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  reinterpret_cast<PyLedger*>(self)->core = new Ledger();
  ledger_of(self)->object = self;
  return self;
}
inline void free_ledger(PyObject* self) {
  ledger_of(self)->object = nullptr;
  ledger_of(self)->high_nbytes = -1;  // nothing is born here any more
  Py_TYPE(self)->tp_free(self);
}

inline PyGetSetDef ledger_fields[] = {
    {"newborn_nbytes", get_number<ledger_of, &Ledger::newborn_nbytes>}, number<ledger_of, &Ledger::counted_nbytes>("counted_nbytes"),
    number<ledger_of, &Ledger::tiny_nbytes>("tiny_nbytes"), number<ledger_of, &Ledger::high_nbytes>("high_nbytes"),
    {},
};

inline PyObject* count_for(PyObject* self, PyObject* device) {
  device_of(device)->ledger = ledger_of(self);
  Py_RETURN_NONE;
}
inline PyObject* take_over(PyObject* self, PyObject* block) {
  const bool is_ours = core_of(block)->ledger.load() == ledger_of(self);
  return PyLong_FromLongLong(is_ours ? core_of(block)->leave_ledger() : 0);
}
// The sum of the list, counted again: equal to `newborn_nbytes` while nobody bears.
inline PyObject* recounted_nbytes(PyObject* self, PyObject*) {
  int64_t sum = 0;
  std::lock_guard guard(ledger_of(self)->lock);
  for (Block* block = ledger_of(self)->first; block; block = block->next) sum += block->nbytes.load();
  return PyLong_FromLongLong(sum);
}
// The living newborns of operators up to a number. Nothing of Python's is made under the lock: it can collect garbage, which comes here.
inline PyObject* newborns(PyObject* self, PyObject* last) {
  std::vector<BlockPtr> kept;
  std::vector<py::object> halves;
  {
    std::lock_guard guard(ledger_of(self)->lock);
    for (auto [block, until] = std::pair(ledger_of(self)->last, PyLong_AsLongLong(last)); block && block->born <= until; block = block->previous) {
      if (auto alive = BlockPtr::if_alive(block)) kept.push_back(std::move(alive));
      else if (PyObject* half = block->half.load(); half && Py_REFCNT(half) > 0)
        halves.push_back(py::reinterpret_borrow<py::object>(half));  // only Python has it
    }
  }
  for (const BlockPtr& block : kept) {
    halves.push_back(py::reinterpret_steal<py::object>(half_of(block.get())));
    if (!halves.back()) return nullptr;
  }
  return py::cast(halves).release().ptr();
}
inline PyMethodDef ledger_methods[] = {
    {"count_for", count_for, METH_O, "Count the fresh results of operators on a device."},
    {"take_over", take_over, METH_O, "Stop counting a newborn; return its bytes, 0 for no newborn."},
    {"recounted_nbytes", recounted_nbytes, METH_NOARGS, "Sum the newborns again."},
    {"newborns", newborns, METH_O, "List the living newborns of operators up to a number."},
    {},
};

// The devices where operators may run that need no decision: a tuple.
inline PyObject* get_ready_on(PyObject* self, void*) { return Py_XNewRef(reinterpret_cast<PyBooks*>(self)->ready_on); }
inline int set_ready_on(PyObject* self, PyObject* value, void*) {
  for (auto& [object, device] : known_devices) device->is_open = false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(value); ++i) device_of(PyTuple_GetItem(value, i))->is_open = true;
  return Py_XDECREF(std::exchange(reinterpret_cast<PyBooks*>(self)->ready_on, Py_NewRef(value))), 0;
}
inline void free_books(PyObject* self) {
  Py_CLEAR(reinterpret_cast<PyBooks*>(self)->ready_on);
  Py_TYPE(self)->tp_free(self);
}
inline PyGetSetDef books_fields[] = {
    number<world_of, &World::tick>("tick"), number<world_of, &World::is_pressed>("is_pressed"),
    number<world_of, &World::labels_differ>("labels_differ"), {"ready_on", get_ready_on, set_ready_on},
    {},
};

inline PyTypeObject base_class(const char* name, size_t size, newfunc make, destructor free, PyGetSetDef* fields,
                               PyMethodDef* methods, PyMemberDef* members = nullptr, size_t weak_references = 0) {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = name;
  type.tp_basicsize = static_cast<Py_ssize_t>(size);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE;
  type.tp_new = make;
  type.tp_dealloc = free;
  type.tp_getset = fields;
  type.tp_methods = methods;
  type.tp_members = members;
  type.tp_weaklistoffset = static_cast<Py_ssize_t>(weak_references);
  return type;
}
inline PyTypeObject block_type = base_class("torchTensorRef.core.BlockBase", sizeof(PyBlock), new_block, free_block, block_fields,
                                            nullptr, block_members, offsetof(PyBlock, weak_references));
inline PyTypeObject ledger_type =
    base_class("torchTensorRef.core.LedgerBase", sizeof(PyLedger), new_ledger, free_ledger, ledger_fields, ledger_methods);
inline PyTypeObject books_type =
    base_class("torchTensorRef.core.BooksBase", sizeof(PyBooks), PyType_GenericNew, free_books, books_fields, nullptr);
}  // namespace ttr
