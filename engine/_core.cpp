// The Python module `_core`. Each folder of engine/ and serving/ bind their own functions. The build writes the module's types to
// engine/_core.pyi; the C++ headers document what the functions do.
//
// Arrays are C-contiguous NumPy arrays, and loops release the interpreter lock. Wrong sizes and dtypes raise TypeError
// or ValueError. The Python callers check arguments that come from users.
#include <stdexcept>

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace tierbed {

void bind_ops(nb::module_& m);
void bind_keys(nb::module_& m);
void bind_columns(nb::module_& m);
void bind_stores(nb::module_& m);
void bind_cache(nb::module_& m);
void bind_rocksdb(nb::module_& m);
void bind_ledger(nb::module_& m);
void bind_serving(nb::module_& m);

}  // namespace tierbed

NB_MODULE(_core, m) {
    // At exit, threads, exceptions or other objects may still own tierbed's objects. nanobind should not warn of this.
    nb::set_leak_warnings(false);
    // A std::runtime_error becomes a StoreError. Exceptions of nanobind's own types are passed on.
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const nb::builtin_exception&) {
            throw;
        } catch (const std::runtime_error& error) {
            nb::object type = nb::borrow(PyExc_RuntimeError);
            try {
                type = nb::module_::import_("tierbed.engine.errors").attr("StoreError");
            } catch (const nb::python_error&) {
                // the subprocess that reads a checkpoint loads this library without the package
            }
            PyErr_SetString(type.ptr(), error.what());
        }
    });
    tierbed::bind_ops(m);
    tierbed::bind_stores(m);
    tierbed::bind_cache(m);
    tierbed::bind_rocksdb(m);  // after bind_stores, which binds the base class of RocksTier
    tierbed::bind_ledger(m);
    tierbed::bind_keys(m);
    tierbed::bind_columns(m);
    tierbed::bind_serving(m);
}
