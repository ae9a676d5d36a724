// Helpers shared by the Python bindings. Loops over rows release the interpreter lock.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ops/kernels/line.h"
#include "histogram.h"
#include "memory.h"

namespace nb = nanobind;

namespace tierbed {

// An array argument that is never converted, because results in a converted copy would be lost. Raises TypeError.
template <class... Annotations>
struct Exact : nb::ndarray<Annotations...> {
    using nb::ndarray<Annotations...>::ndarray;
    Exact(const nb::ndarray<Annotations...>& array) : nb::ndarray<Annotations...>(array) {}
};

}  // namespace tierbed

namespace nanobind::detail {

template <class... Annotations>
struct type_caster<tierbed::Exact<Annotations...>> {
    using Array = type_caster<ndarray<Annotations...>>;
    NB_TYPE_CASTER(tierbed::Exact<Annotations...>, Array::Name)

    bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
        Array array;
        if (!array.from_python(source, flags & ~static_cast<uint8_t>(cast_flags::convert), cleanup)) return false;
        value = array.value;
        return true;
    }
    static handle from_cpp(const tierbed::Exact<Annotations...>& array, rv_policy policy,
                           cleanup_list* cleanup) noexcept {
        return Array::from_cpp(array, policy, cleanup);
    }
};

}  // namespace nanobind::detail

namespace tierbed {

template <class T, class... Shape>
using In = Exact<const T, nb::c_contig, nb::device::cpu, Shape...>;
template <class T, class... Shape>
using Out = Exact<T, nb::c_contig, nb::device::cpu, Shape...>;
template <class T>
using InVector = In<T, nb::ndim<1>>;
template <class T>
using OutVector = Out<T, nb::ndim<1>>;
template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;  // releases the interpreter lock for the call
using namespace nb::literals;                             // "name"_a

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

template <class First, class... Rest>
void require_one_length(const First& first, const Rest&... rest) {
    require(((rest.size() == first.size()) && ...), "arrays differ in length");
}

template <class T>
T require_type(nb::handle source, const char* message) {
    T value;
    if (!nb::try_cast(source, value)) throw nb::type_error(message);
    return value;
}

// Moves a vector or Buffer into a NumPy array that owns the memory.
template <class Values>
auto to_numpy(Values&& values) {
    auto* moved = new Values(std::move(values));
    using T = std::remove_pointer_t<decltype(moved->data())>;
    nb::capsule owner(moved, [](void* p) noexcept { delete static_cast<Values*>(p); });
    // NumPy needs an address even for an empty array
    return Array<T>(moved->size() ? moved->data() : reinterpret_cast<T*>(moved), {moved->size()}, owner);
}

// Calls body without the interpreter lock.
template <class Body>
auto without_gil(const Body& body) {
    nb::gil_scoped_release released;
    return body();
}

// Calls body without the interpreter lock. Returns the row keys that body returned, as arrays (tables, keys).
template <class Body>
std::pair<Array<u32>, Array<u64>> to_arrays(const Body& body) {
    auto rows = without_gil(body);
    return {to_numpy(std::move(rows.tables)), to_numpy(std::move(rows.keys))};
}

// Returns the float type with this name. Throws std::invalid_argument for an unknown name.
FloatType parse_float_type(const std::string& dtype);

// Returns a row's counters as a dict. `locate` adds the row's location.
inline nb::dict to_dict(const RowCounters& counters) {
    nb::dict row;
    row["updates"] = counters.updates;
    row["last_step"] = counters.step;
    return row;
}

// Returns each table's hits and misses, [tables * 2].
template <class Store>
Array<u64> read_hit_counts(const Store& store) {
    return to_numpy(without_gil([&] { return store.hit_counts(); }));
}

template <class Store>
nb::typed<nb::dict, nb::str, double> read_metrics(const Store& store) {
    const Metrics metrics = without_gil([&] { return store.metrics(); });
    nb::dict all;
    for (const auto& [name, value] : metrics.counts) all[name.c_str()] = value;
    for (const auto& [name, value] : metrics.reals) all[name.c_str()] = value;
    return all;
}

}  // namespace tierbed
