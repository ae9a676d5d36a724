// The binding of what follows changing rows: sets of their names, and images of a full table.
#include "ops/native/bind.h"
#include "changes.h"
#include "packed_row.h"
#include "table_image.h"

namespace tierbed {
namespace {

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
                 RowNames names;
                 {
                     nb::gil_scoped_release unlocked;
                     names = changed.rows(bucket);
                 }
                 return nb::make_tuple(own(std::move(names.tables)), own(std::move(names.keys)));
             })
        .def_prop_ro("size", &ChangedRows::size)
        .def_prop_ro("bytes", &ChangedRows::bytes);
}

void bind_table_image(nb::module_& m) {
    const nb::call_guard<nb::gil_scoped_release> unlocked;
    nb::class_<TableImage>(m, "TableImage")
        .def(nb::init<const FullTable&, const Layout&, Tier&>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>())
        .def("keep", nb::overload_cast<const Batch&>(&TableImage::keep), unlocked)
        .def("keep_rows",
             [](TableImage& image, InVector<u32> tables, InVector<u64> keys) {
                 require(tables.size() == keys.size(), "tables and keys differ in length");
                 nb::gil_scoped_release unlocked;
                 image.keep(tables.data(), keys.data(), keys.size());
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
        .def_prop_ro("kept_bytes", &TableImage::kept_bytes);
}

}  // namespace

void bind_changes(nb::module_& m) {
    bind_changed_rows(m);
    bind_table_image(m);
}

}  // namespace tierbed
