// Python binding of tiers, the full table, sets of changed rows, images and packed rows.
#include <nanobind/stl/tuple.h>

#include "changed_rows.h"
#include "full_table.h"
#include "ops/native/bind.h"
#include "packed_rows.h"
#include "rows.h"
#include "table_image.h"
#include "tier.h"

namespace tierbed {
namespace {

Array<bool> read_tier(Tier& tier, InVector<u32> tables, InVector<u64> keys, InVector<u64> lines, bool should_touch) {
    require_one_length(tables, keys, lines);
    Buffer<bool> is_hit(keys.size());
    without_gil([&] {
        const HashedRows hashed(tables.data(), keys.data(), lines.data(), keys.size());
        Buffer<bool> hashed_hits(keys.size());
        tier.read(hashed.rows(), hashed_hits.data(), should_touch);
        for (std::size_t i = 0; i < keys.size(); ++i) is_hit[hashed.position(i)] = hashed_hits[i];
    });
    return to_numpy(std::move(is_hit));
}

void write_tier(Tier& tier, InVector<u32> tables, InVector<u64> keys, InVector<u64> lines) {
    require_one_length(tables, keys, lines);
    tier.write(HashedRows(tables.data(), keys.data(), lines.data(), keys.size()).rows());
}

void erase_tier(Tier& tier, InVector<u32> tables, InVector<u64> keys) {
    require_one_length(tables, keys);
    tier.erase(HashedRows(tables.data(), keys.data(), nullptr, keys.size()).rows());
}

std::size_t gather_rows(FullTable& table, InVector<u64> keys, std::optional<InVector<u64>> max_ids,
                        Out<float, nb::ndim<2>> out) {
    const LineShape& shape = table.shape();
    require(keys.size() <= FullTable::GATHER_LIMIT, "too many ids");
    require(shape.embedding == FloatType::float32, "rows must be float32");
    require(out.shape(0) == keys.size() && out.shape(1) == shape.dim, "rows must be [ids, dim]");
    return table.gather_rows(keys.data(), keys.size(), max_ids ? *max_ids->data() : ~u64{0}, out.data());
}

void bind_tiers(nb::module_& m) {
    nb::class_<Tier>(m, "Tier")
        .def("read", &read_tier, "tables"_a, "keys"_a, "lines"_a, "should_touch"_a = true)
        .def("write", &write_tier, "tables"_a, "keys"_a, "lines"_a, Unlocked())
        .def("erase", &erase_tier, "tables"_a, "keys"_a, Unlocked())
        .def("forget_errors", &Tier::forget_errors, Unlocked());
    nb::class_<FullTable, Tier>(m, "FullTable")
        .def(nb::init<const Layout&>())
        .def("look_up_rows", &FullTable::look_up_rows, Unlocked())
        .def("gather_rows", &gather_rows, "keys"_a, "max_ids"_a.none(), "out"_a, Unlocked())
        .def("insert_missing", &FullTable::insert_missing, Unlocked())
        .def("scan", [](const FullTable& table,
                        u32 bucket) { return to_numpy(without_gil([&] { return table.scan(bucket); })); })
        .def("locate",
             [](const FullTable& table, u32 id, u64 key) -> std::optional<nb::dict> {
                 const auto location = without_gil([&] { return table.locate(id, key); });
                 if (!location) return std::nullopt;
                 nb::dict row = to_dict(location->counters);
                 row["line"] = location->line_index;
                 return row;
             })
        .def("metrics", &read_metrics<FullTable>)
        .def("hit_counts", &read_hit_counts<FullTable>);
}

void bind_changes(nb::module_& m) {
    nb::class_<ChangedRows>(m, "ChangedRows")
        .def(nb::init<u32>(), "since_step"_a = ChangedRows::ALL_STEPS)
        .def("add_batch", &ChangedRows::add_batch, Unlocked())
        .def(
            "add_keys",
            [](ChangedRows& changed, InVector<u32> tables, InVector<u64> keys) {
                require_one_length(tables, keys);
                changed.add_keys(tables.data(), keys.data(), keys.size());
            },
            "tables"_a, "keys"_a, Unlocked())
        .def("merge", &ChangedRows::merge, Unlocked())
        .def("list_keys",
             [](ChangedRows& changed, u32 bucket) {
                 require(bucket < BUCKETS, "no such bucket");
                 return to_arrays([&] { return changed.list_keys(bucket); });
             })
        .def_prop_ro("size", &ChangedRows::size)
        .def_prop_ro("bytes", &ChangedRows::bytes);
    nb::class_<TableImage>(m, "TableImage")
        .def(nb::init<const FullTable&, const Layout&, Tier&>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>())
        .def(nb::init<ChangedRows&, const Layout&, Tier&>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>())
        .def("save_before_images", nb::overload_cast<const Batch&>(&TableImage::save_before_images), Unlocked())
        .def(
            "save_before_images_by_key",
            [](TableImage& image, InVector<u32> tables, InVector<u64> keys) {
                require_one_length(tables, keys);
                image.save_before_images(tables.data(), keys.data(), keys.size());
            },
            "tables"_a, "keys"_a, Unlocked())
        .def(
            "open_bucket",
            [](TableImage& image, u32 bucket) {
                require(bucket < BUCKETS, "no such bucket");
                image.open_bucket(bucket);
            },
            Unlocked())
        .def("sort_bucket", &TableImage::sort_bucket, Unlocked())
        .def(
            "read_next",
            [](TableImage& image, OutVector<u8> rows) {
                return image.read_next(rows.data(), rows.size() / packed_row_bytes(image.width()));
            },
            Unlocked())
        .def("take_missing_keys",
             [](TableImage& image) { return to_arrays([&] { return image.take_missing_keys(); }); })
        .def_prop_ro("before_image_bytes", &TableImage::before_image_bytes);
}

PackedRows parse_rows(const InVector<u8>& rows, std::size_t row_bytes) {
    require(row_bytes >= KEY_BYTES && rows.size() % row_bytes == 0, "the size of rows is not a multiple of row_bytes");
    return {rows.data(), row_bytes, rows.size() / row_bytes};
}

void bind_packed_rows(nb::module_& m) {
    nb::class_<RowValidator>(m, "RowValidator")
        .def(nb::init<u32, u32, bool, u32, u32, u32>(), "bucket"_a, "num_tables"_a, "is_int32"_a, "last_step"_a,
             "rank"_a, "num_ranks"_a)
        .def(
            "find_problem",
            [](RowValidator& check, InVector<u8> rows, std::size_t row_bytes) -> std::optional<std::string> {
                const PackedRows next = parse_rows(rows, row_bytes);
                const char* const problem = without_gil([&] { return check.find_problem(next); });
                return problem ? std::optional<std::string>(problem) : std::nullopt;
            },
            "rows"_a, "row_bytes"_a);
    m.def(
        "diff_rows",
        [](InVector<u8> older_rows, InVector<u8> newer_rows, std::size_t row_bytes) {
            require(row_bytes >= packed_row_bytes(0), "row_bytes is too small for a row with its counters");
            const PackedRows older = parse_rows(older_rows, row_bytes), newer = parse_rows(newer_rows, row_bytes);
            RowDiff diff = without_gil([&] { return diff_rows(older, newer); });
            return std::make_pair(to_numpy(std::move(diff.removed)), to_numpy(std::move(diff.states)));
        },
        "older_rows"_a, "newer_rows"_a, "row_bytes"_a);
    m.def(
        "merge_parts",
        [](const std::vector<InVector<u8>>& parts, const std::vector<bool>& has_more, std::size_t row_bytes) {
            require_one_length(parts, has_more);
            std::vector<PackedRows> sides;
            for (const InVector<u8>& part : parts) sides.push_back(parse_rows(part, row_bytes));
            MergedRows merged = without_gil([&] { return merge_parts(sides, has_more); });
            return std::make_pair(to_numpy(std::move(merged.rows)), merged.rows_read);
        },
        "parts"_a, "has_more"_a, "row_bytes"_a);
}

}  // namespace

void bind_stores(nb::module_& m) {
    bind_tiers(m);
    bind_changes(m);
    bind_packed_rows(m);
}

}  // namespace tierbed
