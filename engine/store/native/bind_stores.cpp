// Python binding of tiers, the full table, sets of changed rows, images and packed rows.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "changes.h"
#include "full_table.h"
#include "ops/native/bind.h"
#include "packed_rows.h"
#include "rows.h"
#include "table_image.h"
#include "tier.h"

namespace tierbed {
namespace {

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
        .def(
            "gather_few",
            [](FullTable& table, InVector<u64> keys, std::optional<InVector<u64>> last_ids,
               Out<float, nb::ndim<2>> out) {
                const LineShape& shape = table.shape();
                require(keys.size() <= FullTable::FEW, "too many ids");
                require(shape.embedding == FloatType::float32, "rows must be float32");
                require(out.shape(0) == keys.size() && out.shape(1) == shape.dim, "rows must be [ids, dim]");
                const u64 last = last_ids ? *last_ids->data() : ~u64{0};
                nb::gil_scoped_release unlocked;
                return table.gather_few(keys.data(), keys.size(), last, out.data());
            },
            nb::arg("keys"), nb::arg("last_ids").none(), nb::arg("out"))
        .def("insert_missing", &FullTable::insert_missing, nb::call_guard<nb::gil_scoped_release>())
        .def("scan",
             [](const FullTable& table, u32 bucket) { return own(without_gil([&] { return table.scan(bucket); })); })
        .def("locate",
             [](const FullTable& table, u32 id, u64 key) -> nb::object {
                 const auto location = without_gil([&] { return table.locate(id, key); });
                 if (!location) return nb::none();
                 nb::dict all = described(location->record);
                 all["line"] = location->line;
                 return all;
             })
        .def("metrics", &metrics_of<FullTable>)
        .def("hit_counts", &hit_counts<FullTable>);
}

void bind_changed_rows(nb::module_& m) {
    const nb::call_guard<nb::gil_scoped_release> unlocked;
    nb::class_<ChangedRows>(m, "ChangedRows")
        .def(nb::init<std::size_t>(), nb::arg("room") = 0)
        .def("note", nb::overload_cast<const Batch&>(&ChangedRows::note), unlocked)
        .def("note_rows",
             [](ChangedRows& changed, InVector<u32> tables, InVector<u64> keys) {
                 require(tables.size() == keys.size(), "tables and keys differ in length");
                 nb::gil_scoped_release unlocked;
                 changed.note(tables.data(), keys.data(), keys.size());
             })
        .def("merge", &ChangedRows::merge, unlocked)
        .def("rows",
             [](const ChangedRows& changed, u32 bucket) {
                 require(bucket < BUCKETS, "no such bucket");
                 return arrays_of([&] { return changed.rows(bucket); });
             })
        .def_prop_ro("size", &ChangedRows::size)
        .def_prop_ro("bytes", &ChangedRows::bytes);
}

void bind_table_image(nb::module_& m) {
    const nb::call_guard<nb::gil_scoped_release> unlocked;
    nb::class_<TableImage>(m, "TableImage")
        .def(nb::init<const FullTable&, const Layout&, Tier&>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>())
        .def("save_before_images", nb::overload_cast<const Batch&>(&TableImage::save_before_images), unlocked)
        .def("save_before_images_of",
             [](TableImage& image, InVector<u32> tables, InVector<u64> keys) {
                 require(tables.size() == keys.size(), "tables and keys differ in length");
                 nb::gil_scoped_release unlocked;
                 image.save_before_images(tables.data(), keys.data(), keys.size());
             })
        .def("list",
             [](TableImage& image, u32 bucket) {
                 require(bucket < BUCKETS, "no such bucket");
                 nb::gil_scoped_release unlocked;
                 image.list(bucket);
             })
        .def("sort", &TableImage::sort, unlocked)
        .def("next",
             [](TableImage& image, OutVector<u8> rows) {
                 nb::gil_scoped_release unlocked;
                 return image.next(rows.data(), rows.size() / packed_bytes_of(image.width()));
             })
        .def_prop_ro("before_image_bytes", &TableImage::before_image_bytes);
}

PackedRows packed(const InVector<u8>& rows, std::size_t row_bytes) {
    require(row_bytes >= KEY_BYTES && rows.size() % row_bytes == 0, "the size of rows is not a multiple of row_bytes");
    return {rows.data(), row_bytes, rows.size() / row_bytes};
}

void bind_packed_rows(nb::module_& m) {
    nb::class_<RowCheck>(m, "RowCheck")
        .def(nb::init<u32, u32, bool, u32, u32>(), nb::arg("bucket"), nb::arg("tables"), nb::arg("int32"),
             nb::arg("part"), nb::arg("parts"))
        .def(
            "problem",
            [](RowCheck& check, InVector<u8> rows, std::size_t row_bytes) {
                const PackedRows next = packed(rows, row_bytes);
                return without_gil([&] { return check.problem(next); });
            },
            nb::arg("rows"), nb::arg("row_bytes"));
    m.def(
        "join_rows",
        [](InVector<u8> before, InVector<u8> after, std::size_t row_bytes) {
            require(row_bytes >= packed_bytes_of(0), "row_bytes is too small for a row with its record");
            const PackedRows older = packed(before, row_bytes), newer = packed(after, row_bytes);
            Joined joined = without_gil([&] { return join_rows(older, newer); });
            return nb::make_tuple(own(std::move(joined.gone)), own(std::move(joined.state)));
        },
        nb::arg("before"), nb::arg("after"), nb::arg("row_bytes"));
    m.def(
        "merge_parts",
        [](const std::vector<InVector<u8>>& parts, const std::vector<bool>& more, std::size_t row_bytes) {
            require(more.size() == parts.size(), "one of `more` for each part");
            std::vector<PackedRows> sides;
            for (const InVector<u8>& part : parts) sides.push_back(packed(part, row_bytes));
            Merged merged = without_gil([&] { return merge_parts(sides, more); });
            return nb::make_tuple(own(std::move(merged.rows)), nb::cast(merged.taken));
        },
        nb::arg("parts"), nb::arg("more"), nb::arg("row_bytes"));
    m.def(
        "merge_rows",
        [](InVector<u8> before, InVector<u8> after, InVector<u8> gone, std::size_t row_bytes) {
            const PackedRows older = packed(before, row_bytes), newer = packed(after, row_bytes),
                             erased = packed(gone, KEY_BYTES);
            Merged merged = without_gil([&] { return merge_rows(older, newer, erased); });
            const auto& taken = merged.taken;
            return nb::make_tuple(own(std::move(merged.rows)), taken[0], taken[1], taken[2], merged.both);
        },
        nb::arg("before"), nb::arg("after"), nb::arg("gone"), nb::arg("row_bytes"));
}

}  // namespace

void bind_stores(nb::module_& m) {
    bind_full_table(m);
    bind_changed_rows(m);
    bind_table_image(m);
    bind_packed_rows(m);
}

}  // namespace tierbed
