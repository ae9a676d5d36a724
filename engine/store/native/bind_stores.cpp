// The binding of tiers and the full table.
#include "ops/native/bind.h"
#include "full_table.h"
#include "packed_row.h"
#include "tier.h"

namespace tierbed {
namespace {

// Rows of Python's arrays as a tier takes them, hashed and in order of their buckets; `lines` may be null.
class RowsOf {
public:
    RowsOf(const u32* tables, const u64* keys, const u64* lines, std::size_t n)
        : grouped_(group_by_bucket(tables, keys, n)), tables_(n), hashes_(n), lines_(lines ? n : 0) {
        for (std::size_t i = 0; i < n; ++i) {
            const Entry& entry = grouped_.entries[i];
            tables_[i] = entry.table;
            hashes_[i] = entry.hash;
            if (lines) lines_[i] = lines[entry.position];
        }
    }
    Rows rows() const { return {tables_.data(), hashes_.data(), lines_.data(), tables_.size()}; }
    // Where row i was given.
    std::size_t position(std::size_t i) const { return grouped_.entries[i].position; }

private:
    Grouped grouped_;
    Buffer<u32> tables_;
    Buffer<u64> hashes_, lines_;
};

Array<bool> read_tier(Tier& tier, InVector<u32> tables, InVector<u64> keys, InVector<u64> lines, bool touch) {
    require(tables.size() == keys.size() && keys.size() == lines.size(), "tables, keys and lines differ in length");
    return flags(keys.size(), [&](bool* found) {
        const RowsOf given(tables.data(), keys.data(), lines.data(), keys.size());
        const auto there = std::make_unique<bool[]>(keys.size());
        tier.read(given.rows(), there.get(), touch);
        for (std::size_t i = 0; i < keys.size(); ++i) found[given.position(i)] = there[i];
    });
}

void write_tier(Tier& tier, InVector<u32> tables, InVector<u64> keys, InVector<u64> lines) {
    require(tables.size() == keys.size() && keys.size() == lines.size(), "tables, keys and lines differ in length");
    nb::gil_scoped_release unlocked;
    tier.write(RowsOf(tables.data(), keys.data(), lines.data(), keys.size()).rows());
}

void erase_tier(Tier& tier, InVector<u32> tables, InVector<u64> keys) {
    require(tables.size() == keys.size(), "tables and keys differ in length");
    nb::gil_scoped_release unlocked;
    tier.erase(RowsOf(tables.data(), keys.data(), nullptr, keys.size()).rows());
}

void bind_full_table(nb::module_& m) {
    nb::class_<Tier>(m, "Tier")
        .def("read", &read_tier, nb::arg("tables"), nb::arg("keys"), nb::arg("lines"), nb::arg("touch") = true)
        .def("write", &write_tier)
        .def("erase", &erase_tier)
        .def("forget_errors", &Tier::forget_errors, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<FullTable, Tier>(m, "FullTable")
        .def(nb::init<const Layout&>())
        .def("find", &FullTable::find, nb::call_guard<nb::gil_scoped_release>())
        .def("insert_missing", &FullTable::insert_missing, nb::call_guard<nb::gil_scoped_release>())
        .def("scan",
             [](const FullTable& table, u32 bucket) {
                 std::vector<u8> rows;
                 {
                     nb::gil_scoped_release unlocked;
                     rows = table.scan(bucket);
                 }
                 return own(std::move(rows));
             })
        .def("where",
             [](const FullTable& table, u32 id, u64 key) -> nb::object {
                 const auto place = [&] {
                     nb::gil_scoped_release unlocked;
                     return table.where(id, key);
                 }();
                 if (!place) return nb::none();
                 nb::dict all = described(place->record);
                 all["line"] = place->line;
                 return all;
             })
        .def("metrics",
             [](const FullTable& table) {
                 const FullTableCounts& counts = table.counts();
                 nb::dict all;
                 all["hits"] = counts.hits;
                 all["misses"] = counts.misses;
                 all["insertions"] = counts.insertions;
                 all["bytes_in"] = counts.bytes_in;
                 all["bytes_out"] = counts.bytes_out;
                 all["resident_rows"] = table.rows();
                 all["bytes"] = table.bytes();
                 add_latencies(all, "fetch", counts.fetch);
                 add_latencies(all, "write", counts.write);
                 return all;
             })
        .def("asked", &asked<FullTable>)
        .def_prop_ro("rows", &FullTable::rows)
        .def_prop_ro("bytes", &FullTable::bytes);
}

}  // namespace

void bind_stores(nb::module_& m) { bind_full_table(m); }

}  // namespace tierbed
