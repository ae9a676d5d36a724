// Python binding of RocksDB.
#include <nanobind/stl/tuple.h>

#include "ops/native/bind.h"

#ifdef TIERBED_ROCKSDB
#include "rows.h"
#include "rocksdb_checkpoint.h"
#include "rocksdb_tier.h"
#endif

namespace tierbed {

#ifdef TIERBED_ROCKSDB
namespace {

nb::dict read_info(const RocksTier& tier) {
    const RocksInfo info = tier.info();
    nb::dict result;
    result["async_io"] = info.async_io;
    result["flush_threads"] = info.threads.flushes;
    result["compaction_threads"] = info.threads.compactions;
    result["memtable_bytes_max"] = info.memtable_bytes;
    return result;
}

auto hold_files(RocksTier& tier) {
    const std::vector<DatabaseFile> files = without_gil([&] { return tier.hold_files(); });
    std::vector<std::tuple<std::string, u64, std::optional<u32>, std::optional<nb::bytes>>> result;
    for (const DatabaseFile& file : files) {
        std::optional<nb::bytes> content;
        if (file.content) content.emplace(file.content->data(), file.content->size());
        result.emplace_back(file.name, file.bytes, file.crc32c, content);
    }
    return result;
}

std::pair<u32, std::size_t> read_next(RocksTier::Scan& scan, OutVector<u8> rows, std::size_t max_rows) {
    u32 bucket = 0;
    require(rows.size() >= max_rows * packed_row_bytes(scan.width()), "rows must have room for max_rows");
    const std::size_t n = without_gil([&] { return scan.next(rows.data(), max_rows, bucket); });
    return {bucket, n};
}

}  // namespace

void bind_rocksdb(nb::module_& m) {
    m.attr("has_rocksdb") = true;
    m.def("check_rocksdb_options", &check_options, "options"_a);
    m.def("parse_rocksdb_options", &parse_options, "text"_a);
    m.def("rocksdb_has_async_io", &has_async_io);
    m.attr("rocksdb_version") = read_library_version();
    nb::class_<Crc32c>(m, "Crc32c")
        .def(nb::init<>())
        .def(
            "update", [](Crc32c& self, InVector<u8> bytes) { self.update(bytes.data(), bytes.size()); }, "bytes"_a,
            Unlocked())
        .def("finish", &Crc32c::finish);
    nb::class_<RocksTier, Tier> tier(m, "RocksTier");
    tier.def(
            "__init__",
            [](RocksTier* self, const std::string& folder, u32 width, bool create_if_missing, bool read_only,
               u32 num_shards, std::size_t block_bytes, std::size_t data_cache_bytes, std::size_t index_bytes,
               std::size_t write_buffer_bytes,
               const std::string& read_mode, bool async_io, std::size_t max_read_threads, const NamedOptions& named) {
                require(read_mode == "buffered" || read_mode == "mmap" || read_mode == "direct",
                        "read_mode: buffered, mmap or direct");
                const RocksOptions tuned{create_if_missing,  read_only, num_shards, block_bytes,      data_cache_bytes, index_bytes,
                                         write_buffer_bytes, read_mode, async_io,   max_read_threads, named};
                nb::gil_scoped_release unlocked;
                new (self) RocksTier(folder, width, tuned);
            },
            "folder"_a, "width"_a, nb::kw_only(), "create_if_missing"_a, "read_only"_a, "num_shards"_a, "block_bytes"_a,
            "data_cache_bytes"_a, "index_bytes"_a, "write_buffer_bytes"_a, "read_mode"_a, "async_io"_a, "max_read_threads"_a,
            "options"_a)
        .def("begin_load", &RocksTier::begin_load, Unlocked())
        .def("finish_load", &RocksTier::finish_load, Unlocked())
        .def("flush", &RocksTier::flush, Unlocked())
        .def("compact", &RocksTier::compact, Unlocked())
        .def("close", &RocksTier::close, Unlocked())
        .def("make_writable", &RocksTier::make_writable, Unlocked())
        .def_prop_ro("has_failed", &RocksTier::has_failed)
        .def("read_versions", &RocksTier::read_versions, Unlocked())
        .def("hold_files", &hold_files)
        .def("release_files", &RocksTier::release_files, Unlocked())
        .def("locate",
             [](const RocksTier& tier, u32 table, u64 key) {
                 const auto counters = without_gil([&] { return tier.locate(table, key); });
                 return counters ? std::optional(to_dict(*counters)) : std::nullopt;
             })
        .def("metrics", &read_metrics<RocksTier>)
        .def("info", &read_info)
        .def(
            "scan", [](const RocksTier& t, u32 part, u32 num_parts) { return new RocksTier::Scan(t, part, num_parts); },
            "part"_a = 0, "num_parts"_a = 1, nb::keep_alive<0, 1>(),
            nb::rv_policy::take_ownership);
    nb::class_<RocksTier::Scan>(tier, "Scan").def("close", &RocksTier::Scan::close).def("next", &read_next);
}
#else
void bind_rocksdb(nb::module_& m) { m.attr("has_rocksdb") = false; }
#endif

}  // namespace tierbed
