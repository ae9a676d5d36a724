// The binding of what follows changing rows: sets of their names, and images of a full table.
#include "bind.h"
#include "changes.h"
#include "packed_row.h"
#include "table_image.h"

namespace tierbed {
namespace {

enum State : u8 { SAME, CHANGED, NEW };  // what `join_rows` tells of a row

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

// As in engine/_core.pyi.
nb::tuple join_rows(InVector<u8> before, InVector<u8> after, std::size_t row_bytes) {
    require(row_bytes >= packed_bytes_of(0) && before.size() % row_bytes == 0 && after.size() % row_bytes == 0,
            "rows of row_bytes each");
    std::vector<u8> gone(before.size() / row_bytes), state(after.size() / row_bytes);
    std::size_t i = 0, j = 0;
    {
        nb::gil_scoped_release unlocked;
        const auto name_at = [&](const u8* rows, std::size_t row) {
            std::pair<u32, u64> name;
            std::memcpy(&name.first, rows + row * row_bytes, sizeof name.first);
            std::memcpy(&name.second, rows + row * row_bytes + sizeof name.first, sizeof name.second);
            return name;
        };
        while (i < gone.size() && j < state.size()) {
            const auto left = name_at(before.data(), i), right = name_at(after.data(), j);
            if (left < right) {
                gone[i++] = 1;
            } else if (right < left) {
                state[j++] = NEW;
            } else {
                const u8* const was = before.data() + i++ * row_bytes;
                const u8* const is = after.data() + j * row_bytes;
                state[j++] = std::memcmp(was, is, row_bytes) ? CHANGED : SAME;
            }
        }
    }
    gone.resize(i);
    state.resize(j);
    return nb::make_tuple(own(std::move(gone)), own(std::move(state)));
}

}  // namespace

void bind_changes(nb::module_& m) {
    bind_changed_rows(m);
    bind_table_image(m);
    m.def("join_rows", &join_rows, nb::arg("before"), nb::arg("after"), nb::arg("row_bytes"));
}

}  // namespace tierbed
