// Python bindings for the ledger.
#include "ops/native/bind.h"
#include "ledger.h"

namespace tierbed {
namespace {

Eviction parse_eviction(const std::string& name) {
    constexpr const char* names[] = {"none", "lru", "lfu", "ttl", "distance_lfu"};
    for (u32 i = 0; i < std::size(names); ++i)
        if (name == names[i]) return static_cast<Eviction>(i);
    throw std::invalid_argument("eviction '" + name + "' does not exist");
}

}  // namespace

void bind_ledger(nb::module_& m) {
    nb::class_<Admission>(m, "Admission")
        .def_ro("num_new", &Admission::num_new)
        .def_ro("num_excess", &Admission::num_excess)
        .def("take_victims", [](Admission& self) { return to_arrays([&] { return std::move(self.victims); }); });
    nb::class_<Ledger>(m, "Ledger")
        .def(
            "__init__",
            [](Ledger* self, const std::string& eviction, std::optional<std::size_t> capacity, u64 ttl_steps,
               u32 min_lookups, double probability, u64 seed) {
                new (self) Ledger(
                    {parse_eviction(eviction), capacity.value_or(SIZE_MAX), ttl_steps, min_lookups, probability, seed});
            },
            nb::kw_only(), "eviction"_a, "capacity"_a.none(), "ttl_steps"_a, "min_lookups"_a, "probability"_a, "seed"_a)
        .def("admit", &Ledger::admit, Unlocked())
        .def("record_write", &Ledger::record_write, Unlocked())
        .def("find_expired", [](Ledger& self, u32 step) { return to_arrays([&] { return self.find_expired(step); }); })
        .def(
            "add_rows",
            [](Ledger& ledger, InVector<u32> tables, InVector<u64> keys, InVector<u32> updates, InVector<u32> steps) {
                require_one_length(tables, keys, updates, steps);
                ledger.add_rows(tables.data(), keys.data(), updates.data(), steps.data(), keys.size());
            },
            "tables"_a, "keys"_a, "updates"_a, "steps"_a, Unlocked())
        .def(
            "erase",
            [](Ledger& ledger, InVector<u32> tables, InVector<u64> keys) {
                require_one_length(tables, keys);
                return ledger.erase(tables.data(), keys.data(), keys.size());
            },
            "tables"_a, "keys"_a, Unlocked())
        .def_prop_ro("num_rows", &Ledger::num_rows)
        .def_prop_ro("bytes", &Ledger::bytes);
}

}  // namespace tierbed
