// Python bindings of row files and served tables.
#include <nanobind/stl/shared_ptr.h>

#include "ops/native/bind.h"
#include "ops/native/parse_lookup.h"
#include "row_file.h"
#include "served_tables.h"

namespace tierbed {

using namespace serving;

void bind_serving(nb::module_& m) {
    m.def(
        "hash_table_rows",
        [](u32 table, InVector<u64> keys) {
            Buffer<u64> hashes(keys.size());
            for (std::size_t i = 0; i < keys.size(); ++i) hashes[i] = hash_row(table, keys.data()[i]);
            return to_numpy(std::move(hashes));
        },
        "table"_a, "keys"_a);
    m.def(
        "encode_rows",
        [](In<float, nb::ndim<2>> values, const std::string& encoding, Out<u8, nb::ndim<2>> out) {
            const u32 dim = static_cast<u32>(values.shape(1));
            const Encoding type =
                encoding == "int8" ? Encoding::int8 : static_cast<Encoding>(parse_float_type(encoding));
            require(dim > 0 && out.shape(0) == values.shape(0) && out.shape(1) == count_row_bytes(type, dim),
                    "out must be [n, row bytes]");
            return without_gil([&] { return encode_rows(values.data(), values.shape(0), dim, type, out.data()); });
        },
        "values"_a, "encoding"_a, "out"_a);
    nb::class_<DirectoryBuilder>(m, "DirectoryBuilder")
        .def(
            "__init__",
            [](DirectoryBuilder* self, InVector<u8> records, u64 num_records, u32 stride) {
                require(stride > 8 && records.size() / stride >= num_records, "records must be [num_records * stride]");
                new (self) DirectoryBuilder(records.data(), num_records, stride);
            },
            "records"_a, "num_records"_a, "stride"_a, nb::keep_alive<1, 2>())
        .def_prop_ro("num_root_lines", &DirectoryBuilder::num_root_lines)
        .def("next", [](DirectoryBuilder& builder, std::size_t max_lines) {
            const std::vector<DirectoryLine> lines = without_gil([&] { return builder.next(max_lines); });
            return nb::bytes(lines.data(), lines.size() * sizeof(DirectoryLine));
        });
    nb::class_<RowFile>(m, "RowFile")
        .def(nb::init<const std::string&>(), "path"_a, Unlocked())
        // The shape of the file's records: how many there are, and their bytes.
        .def_prop_ro("shape", [](const RowFile& file) { return std::pair(file.view.num_records, file.view.stride); })
        .def_prop_ro("row_offset", [](const RowFile& file) { return file.view.row_offset; })
        // Returns each hash's record, or -1.
        .def("find", [](const RowFile& file, InVector<u64> hashes) {
            Buffer<i64> numbers(hashes.size());
            for (std::size_t i = 0; i < hashes.size(); ++i) {
                const u8* record = file.view.find(hashes.data()[i]);
                numbers[i] = record ? (record - file.view.records) / static_cast<i64>(file.view.stride) : -1;
            }
            return to_numpy(std::move(numbers));
        });
    nb::class_<ServedTables>(m, "ServedTables")
        .def(
            "__init__",
            [](ServedTables* self, const nb::bytes& settings,
               const std::vector<TablePaths>& paths, bool unknown_initial, const ServedTables* previous) {
                const std::string bytes(settings.c_str(), settings.size());
                nb::gil_scoped_release unlocked;
                new (self) ServedTables(bytes, paths, unknown_initial, previous);
            },
            "settings"_a, "paths"_a, "unknown_initial"_a, "previous"_a.none() = nb::none())
        .def_prop_ro("metrics", &read_metrics<ServedTables>)
        // Returns the first illegal id as (table, key), or None.
        .def(
            "look_up",
            [](const ServedTables& tables, nb::tuple arguments, Exact<nb::ndim<2>, nb::c_contig, nb::device::cpu> out,
               bool mean, std::optional<InVector<float>> weights,
               const std::string& dtype) -> std::optional<std::pair<u32, u64>> {
                const LookupArrays arrays = parse_lookup(arguments, nullptr);
                const FloatType type = parse_float_type(dtype);
                require(out.dtype() == (type == FloatType::float32 ? nb::dtype<float>() : nb::dtype<u16>()) &&
                            out.shape(0) == arrays.num_bags && out.shape(1) == tables.dim(),
                        "out must be [bags, dim] of the dtype, 16-bit floats as uint16");
                require(!weights || (arrays.is_pooled && weights->size() == arrays.num_ids), "weights must be [ids]");
                const Lookup lookup{arrays.keys, arrays.tables,    arrays.num_bags,
                                    arrays.bags, arrays.is_pooled, weights ? weights->data() : nullptr,
                                    mean};
                // a short lookup is done before another thread could take the lock
                std::optional<nb::gil_scoped_release> unlocked;
                if (arrays.num_ids > 128) unlocked.emplace();
                const LookupCounts counts = tables.look_up(lookup, type, out.data());
                unlocked.reset();
                if (counts.illegal_position == ~u64{0}) return std::nullopt;
                return std::pair(counts.illegal_table, counts.illegal_key);
            },
            "lookup"_a, "out"_a, "mean"_a, "weights"_a.none(), "dtype"_a);
}

}  // namespace tierbed
