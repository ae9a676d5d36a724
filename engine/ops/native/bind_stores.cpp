// The binding of the full table, the cache and RocksDB.
#include "bind.h"
#include "cache.h"
#include "full_table.h"
#include "packed_row.h"
#ifdef TIERBED_ROCKSDB
#include "rocksdb_tier.h"
#endif

namespace tierbed {
namespace {

template <class T>
Array<bool> read_rows(T& tier, InVector<u32> tables, InVector<u64> keys, InVector<u64> lines) {
    require(tables.size() == keys.size() && keys.size() == lines.size(), "tables, keys and lines differ in length");
    return flags(keys.size(),
                 [&](bool* found) { tier.read(tables.data(), keys.data(), lines.data(), found, keys.size()); });
}

template <class T>
void write_rows(T& tier, InVector<u32> tables, InVector<u64> keys, InVector<u64> lines) {
    require(tables.size() == keys.size() && keys.size() == lines.size(), "tables, keys and lines differ in length");
    nb::gil_scoped_release unlocked;
    tier.write(tables.data(), keys.data(), lines.data(), keys.size());
}

void bind_full_table(nb::module_& m) {
    nb::class_<FullTable>(m, "FullTable")
        .def(nb::init<const Layout&>())
        .def("find", &FullTable::find, nb::call_guard<nb::gil_scoped_release>())
        .def("insert_missing", &FullTable::insert_missing, nb::call_guard<nb::gil_scoped_release>())
        .def("read", &read_rows<FullTable>)
        .def("write", &write_rows<FullTable>)
        .def("held", &FullTable::held, nb::call_guard<nb::gil_scoped_release>())
        .def("scan",
             [](const FullTable& table, u32 bucket, OutVector<u8> rows) {
                 nb::gil_scoped_release unlocked;
                 require(rows.size() == table.held(bucket) * packed_bytes_of(table.width()),
                         "rows must have room for the bucket's rows exactly");
                 table.scan(bucket, rows.data());
             })
        .def_prop_ro("rows", &FullTable::rows)
        .def_prop_ro("bytes", &FullTable::bytes);
}

void bind_cache(nb::module_& m) {
    nb::class_<Admission>(m, "Admission")
        .def_prop_ro("lines", [](nb::handle_t<Admission> self) { return view(nb::cast<Admission&>(self).lines, self); })
        .def_prop_ro(
            "hit",
            [](const Admission& a) {
                return flags(a.hit.size(), [&](bool* out) { std::copy(a.hit.begin(), a.hit.end(), out); });
            },
            nb::rv_policy::move)
        .def_prop_ro("victim_tables",
                     [](nb::handle_t<Admission> self) { return view(nb::cast<Admission&>(self).victim_tables, self); })
        .def_prop_ro("victim_keys",
                     [](nb::handle_t<Admission> self) { return view(nb::cast<Admission&>(self).victim_keys, self); })
        .def_prop_ro("victim_lines",
                     [](nb::handle_t<Admission> self) { return view(nb::cast<Admission&>(self).victim_lines, self); });
    nb::class_<Cache>(m, "Cache")
        .def(nb::init<const Layout&, std::size_t>())
        .def("admit",
             [](Cache& cache, InVector<u32> tables, InVector<u64> keys) {
                 require(tables.size() == keys.size(), "tables and keys differ in length");
                 nb::gil_scoped_release unlocked;
                 return cache.admit(tables.data(), keys.data(), keys.size());
             })
        .def("release", &Cache::release, nb::arg("admission"), nb::arg("dirty"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("cancel", &Cache::cancel, nb::arg("admission"), nb::arg("restore"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("find",
             [](const Cache& cache, InVector<u32> tables, InVector<u64> keys, OutVector<u64> lines) {
                 require(tables.size() == keys.size() && keys.size() == lines.size(),
                         "tables, keys and lines differ in length");
                 nb::gil_scoped_release unlocked;
                 cache.find(tables.data(), keys.data(), lines.data(), keys.size());
             })
        .def("dirty",
             [](const Cache& cache) {
                 std::vector<u32> tables;
                 std::vector<u64> keys, lines;
                 cache.dirty(tables, keys, lines);
                 return nb::make_tuple(own(std::move(tables)), own(std::move(keys)), own(std::move(lines)));
             })
        .def("mark_clean", &Cache::mark_clean)
        .def_prop_ro("capacity", &Cache::capacity)
        .def_prop_ro("used", &Cache::used)
        .def_prop_ro("bytes", &Cache::bytes)
        .def_prop_ro("counts", [](const Cache& cache) {
            nb::dict counts;
            counts["hits"] = cache.counts.hits;
            counts["misses"] = cache.counts.misses;
            counts["evictions_clean"] = cache.counts.evictions_clean;
            counts["evictions_dirty"] = cache.counts.evictions_dirty;
            counts["overflows"] = cache.counts.overflows;
            return counts;
        });
}

#ifdef TIERBED_ROCKSDB
void bind_rocksdb(nb::module_& m) {
    nb::class_<RocksTier> tier(m, "RocksTier");
    tier.def(
            "__init__",
            [](RocksTier* self, std::string folder, u32 width, bool create, u32 shards, std::size_t block_bytes,
               std::size_t block_cache_bytes, std::size_t write_buffer_bytes) {
                nb::gil_scoped_release unlocked;
                new (self)
                    RocksTier(folder, width, {create, shards, block_bytes, block_cache_bytes, write_buffer_bytes});
            },
            nb::arg("folder"), nb::arg("width"), nb::kw_only(), nb::arg("create"), nb::arg("shards"),
            nb::arg("block_bytes"), nb::arg("block_cache_bytes"), nb::arg("write_buffer_bytes"))
        .def("read", &read_rows<RocksTier>)
        .def("write", &write_rows<RocksTier>)
        .def("flush", &RocksTier::flush, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &RocksTier::close, nb::call_guard<nb::gil_scoped_release>())
        .def("property", &RocksTier::property)
        .def(
            "scan", [](const RocksTier& t) { return new RocksTier::Scan(t); }, nb::keep_alive<0, 1>(),
            nb::rv_policy::take_ownership);
    nb::class_<RocksTier::Scan>(tier, "Scan")
        .def("close", &RocksTier::Scan::close)
        .def("next", [](RocksTier::Scan& scan, OutVector<u8> rows, std::size_t max_rows) {
            u32 bucket = 0;
            std::size_t n;
            require(rows.size() >= max_rows * packed_bytes_of(scan.width()), "rows must have room for max_rows");
            {
                nb::gil_scoped_release unlocked;
                n = scan.next(rows.data(), max_rows, bucket);
            }
            return nb::make_tuple(bucket, n);
        });
}
#endif

}  // namespace

void bind_stores(nb::module_& m) {
    bind_full_table(m);
    bind_cache(m);
#ifdef TIERBED_ROCKSDB
    m.attr("has_rocksdb") = true;
    bind_rocksdb(m);
#else
    m.attr("has_rocksdb") = false;
#endif
}

}  // namespace tierbed
