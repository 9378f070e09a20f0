// What Python sees of blocks, ledgers and books: classes from which those of memory/ are derived.
#pragma once

#include "state.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <unordered_map>
#include <vector>

namespace ttr {

struct PyBlock {
  PyObject_HEAD
  Block* core;
  PyObject* births;
};
struct PyLedger {
  PyObject_HEAD
  Ledger* core;
};
struct PyBooks {
  PyObject_HEAD
  PyObject *ready_device, *ready_host;
};

inline PyObject* make_half = nullptr;           // Python's maker of a block's half
inline thread_local Block* block_of_half = nullptr;  // the block that the next half is made for

// -- devices (all with the GIL) -------------------------------------------------------------------

inline std::unordered_map<PyObject*, Device*> known_devices;

inline bool says(py::handle object, const char* name) { return py::getattr(object, name, py::bool_(false)).cast<bool>(); }

// The device of a Python device; null for None and for what is none (books that are closed).
inline Device* device_of(PyObject* object) {
  if (object == Py_None) return nullptr;
  Device*& found = known_devices[object];
  if (found && PyWeakref_GetObject(found->weak) == object) return found;
  found = new Device();  // another object at the address of one that is gone
  found->weak = PyWeakref_NewRef(object, nullptr);
  if (!found->weak) PyErr_Clear(), found->weak = PyWeakref_NewRef(reinterpret_cast<PyObject*>(&PyLong_Type), nullptr);
  found->is_seen_by_python = says(object, "has_virtual_clock") || says(object, "is_witness");
  return found;
}

inline PyObject* object_of(const Device* device) {
  return Py_NewRef(device ? PyWeakref_GetObject(device->weak) : Py_None);
}

// -- blocks ---------------------------------------------------------------------------------------

inline Block* core_of(PyObject* self) { return reinterpret_cast<PyBlock*>(self)->core; }

inline PyObject* new_block(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  Block* core = std::exchange(block_of_half, nullptr);
  reinterpret_cast<PyBlock*>(self)->core = core ? core : new Block();
  core_of(self)->half = self;
  return self;
}

inline void free_block(PyObject* self) {
  auto* block = reinterpret_cast<PyBlock*>(self);
  Py_CLEAR(block->births);
  delete std::exchange(block->core, nullptr);
  Py_TYPE(self)->tp_free(self);
}

// A new reference to what Python keeps of a block whose `refs` are held; null with an error set.
inline PyObject* half_of(Block* block) {
  if (PyObject* half = block->half.load()) return Py_NewRef(half);
  block_of_half = block;
  PyObject* made = PyObject_CallNoArgs(make_half);
  if (!made) return block_of_half = nullptr, nullptr;
  return Py_NewRef(made);  // the other one is that of the TensorRefs
}

inline PyObject* get_ready(PyObject* self, void*) { return object_of(core_of(self)->ready.load()); }
inline int set_ready(PyObject* self, PyObject* value, void*) {
  return core_of(self)->ready.store(device_of(value)), 0;
}
inline PyObject* get_owned(PyObject* self, void*) { return PyBool_FromLong(core_of(self)->owned.load()); }
inline int set_owned(PyObject* self, PyObject* value, void*) {
  return core_of(self)->owned.store(PyObject_IsTrue(value) == 1), 0;
}
inline PyObject* get_users(PyObject* self, void*) { return PyLong_FromLong(core_of(self)->users.load()); }

template <auto member>
PyObject* get_number(PyObject* self, void*) {
  return PyLong_FromLongLong(core_of(self)->*member);
}
template <auto member>
int set_number(PyObject* self, PyObject* value, void*) {
  const int64_t number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) return -1;
  core_of(self)->*member = number;
  if (core_of(self)->face) core_of(self)->face.set_nbytes(core_of(self)->nbytes.load());
  return 0;
}

inline PyObject* get_result(PyObject* self, void*) {
  const at::Tensor& result = core_of(self)->result;
  return result.defined() ? THPVariable_Wrap(result) : Py_NewRef(Py_None);
}
inline int set_result(PyObject* self, PyObject* value, void*) {
  at::Tensor given = value == Py_None ? at::Tensor() : THPVariable_Unpack(value);
  return std::swap(core_of(self)->result, given), 0;
}

// Who counts it as a newborn: Python's ledger that has made it, or that of our list.
inline PyObject* get_births(PyObject* self, void*) {
  PyObject* births = reinterpret_cast<PyBlock*>(self)->births;
  if (!births)
    if (Ledger* ledger = core_of(self)->ledger.load()) births = ledger->object;
  return Py_NewRef(births ? births : Py_None);
}
inline int set_births(PyObject* self, PyObject* value, void*) {
  PyObject* given = value == Py_None ? nullptr : Py_NewRef(value);
  Py_XDECREF(std::exchange(reinterpret_cast<PyBlock*>(self)->births, given));
  return 0;
}

inline PyGetSetDef block_fields[] = {
    {"ready", get_ready, set_ready, nullptr, nullptr},
    {"owned", get_owned, set_owned, nullptr, nullptr},
    {"logged_as", get_number<&Block::logged_as>, set_number<&Block::logged_as>, nullptr, nullptr},
    {"users", get_users, nullptr, nullptr, nullptr},
    {"last_use", get_number<&Block::last_use>, set_number<&Block::last_use>, nullptr, nullptr},
    {"born", get_number<&Block::born>, set_number<&Block::born>, nullptr, nullptr},
    {"nbytes", get_number<&Block::nbytes>, set_number<&Block::nbytes>, nullptr, nullptr},
    {"result", get_result, set_result, nullptr, nullptr},
    {"births", get_births, set_births, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// -- ledgers --------------------------------------------------------------------------------------

inline Ledger* ledger_of(PyObject* self) { return reinterpret_cast<PyLedger*>(self)->core; }

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

template <auto member>
PyObject* get_sum(PyObject* self, void*) {
  return PyLong_FromLongLong((ledger_of(self)->*member).load());
}
template <auto member>
int set_sum(PyObject* self, PyObject* value, void*) {
  const int64_t number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) return -1;
  return (ledger_of(self)->*member).store(number), 0;
}
inline PyGetSetDef ledger_fields[] = {
    {"counted_nbytes", get_sum<&Ledger::counted_nbytes>, set_sum<&Ledger::counted_nbytes>, nullptr, nullptr},
    {"newborn_nbytes", get_sum<&Ledger::newborn_nbytes>, nullptr, nullptr, nullptr},
    {"tiny_nbytes", get_sum<&Ledger::tiny_nbytes>, set_sum<&Ledger::tiny_nbytes>, nullptr, nullptr},
    {"high_nbytes", get_sum<&Ledger::high_nbytes>, set_sum<&Ledger::high_nbytes>, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
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
// The living newborns of operators up to a number. Nothing of Python's is made under the lock: that
// can collect garbage, which comes here.
inline PyObject* newborns(PyObject* self, PyObject* last) {
  std::vector<BlockPtr> kept;
  std::vector<PyObject*> halves;
  {
    std::lock_guard guard(ledger_of(self)->lock);
    for (auto [block, until] = std::pair(ledger_of(self)->last, PyLong_AsLongLong(last)); block && block->born <= until; block = block->previous) {
      if (auto alive = BlockPtr::if_alive(block))
        kept.push_back(std::move(alive));
      else if (PyObject* half = block->half.load(); half && Py_REFCNT(half) > 0)
        halves.push_back(Py_NewRef(half));  // only Python has it
    }
  }
  for (const BlockPtr& block : kept)
    if (PyObject* half = half_of(block.get())) halves.push_back(half);
  PyObject* list = PyErr_Occurred() ? nullptr : PyList_New(0);
  for (PyObject* half : halves) {
    if (list && PyList_Append(list, half) < 0) Py_CLEAR(list);
    Py_DECREF(half);
  }
  return list;
}
inline PyMethodDef ledger_methods[] = {
    {"count_for", count_for, METH_O, "Count the fresh results of operators on a device."},
    {"take_over", take_over, METH_O, "Stop counting a newborn; return its bytes, 0 for no newborn."},
    {"recounted_nbytes", recounted_nbytes, METH_NOARGS, "Sum the newborns again."},
    {"newborns", newborns, METH_O, "List the living newborns of operators up to a number."},
    {nullptr, nullptr, 0, nullptr},
};

// -- books ----------------------------------------------------------------------------------------

inline void reopen(const PyBooks* books) {
  for (auto& [object, device] : known_devices)
    device->is_open = object == books->ready_device || object == books->ready_host;
}
template <PyObject* PyBooks::*member>
PyObject* get_place(PyObject* self, void*) {
  PyObject* place = reinterpret_cast<PyBooks*>(self)->*member;
  return Py_NewRef(place ? place : Py_None);
}
template <PyObject* PyBooks::*member>
int set_place(PyObject* self, PyObject* value, void*) {
  auto* books = reinterpret_cast<PyBooks*>(self);
  device_of(value);
  Py_XDECREF(std::exchange(books->*member, Py_NewRef(value)));
  return reopen(books), 0;
}
template <std::atomic<bool> World::*member>
PyObject* get_flag(PyObject*, void*) {
  return PyBool_FromLong((world.*member).load());
}
template <std::atomic<bool> World::*member>
int set_flag(PyObject*, PyObject* value, void*) {
  return (world.*member).store(PyObject_IsTrue(value) == 1), 0;
}
inline PyObject* get_tick(PyObject*, void*) { return PyLong_FromLongLong(world.tick.load()); }
inline int set_tick(PyObject*, PyObject* value, void*) {
  const int64_t number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) return -1;
  return world.tick.store(number), 0;
}
inline void free_books(PyObject* self) {
  auto* books = reinterpret_cast<PyBooks*>(self);
  Py_CLEAR(books->ready_device);
  Py_CLEAR(books->ready_host);
  Py_TYPE(self)->tp_free(self);
}
inline PyGetSetDef books_fields[] = {
    {"tick", get_tick, set_tick, nullptr, nullptr},
    {"is_pressed", get_flag<&World::is_pressed>, set_flag<&World::is_pressed>, nullptr, nullptr},
    {"labels_differ", get_flag<&World::labels_differ>, set_flag<&World::labels_differ>, nullptr, nullptr},
    {"ready_device", get_place<&PyBooks::ready_device>, set_place<&PyBooks::ready_device>, nullptr, nullptr},
    {"ready_host", get_place<&PyBooks::ready_host>, set_place<&PyBooks::ready_host>, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// -- the classes ----------------------------------------------------------------------------------

inline PyTypeObject base_class(const char* name, size_t size, newfunc make, destructor free, PyGetSetDef* fields,
                               PyMethodDef* methods) {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = name;
  type.tp_basicsize = static_cast<Py_ssize_t>(size);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE;
  type.tp_new = make;
  type.tp_dealloc = free;
  type.tp_getset = fields;
  type.tp_methods = methods;
  return type;
}
inline PyTypeObject block_type =
    base_class("torchTensorRef.core.BlockBase", sizeof(PyBlock), new_block, free_block, block_fields, nullptr);
inline PyTypeObject ledger_type =
    base_class("torchTensorRef.core.LedgerBase", sizeof(PyLedger), new_ledger, free_ledger, ledger_fields, ledger_methods);
inline PyTypeObject books_type =
    base_class("torchTensorRef.core.BooksBase", sizeof(PyBooks), PyType_GenericNew, free_books, books_fields, nullptr);

}  // namespace ttr
