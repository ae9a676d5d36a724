// Python binding of tiers, the full table, sets of changed rows, images and packed rows.
#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

#include "changes.h"
#include "full_table.h"
#include "ops/kernels/hash.h"
#include "ops/native/bind.h"
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

constexpr std::size_t KEY_BYTES = sizeof(u32) + sizeof(u64);

enum State : u8 { SAME, CHANGED, NEW };  // the result of `join_rows` for a row

using RowKey = std::pair<u32, u64>;  // (table, key), in the order of rows

// Packed rows of one length, or row keys alone.
struct Packed {
    const u8* bytes;
    std::size_t row_bytes, count;

    Packed(const InVector<u8>& rows, std::size_t row_bytes)
        : bytes(rows.data()), row_bytes(row_bytes), count(rows.size() / row_bytes) {
        require(row_bytes >= KEY_BYTES && rows.size() % row_bytes == 0,
                "the size of rows is not a multiple of row_bytes");
    }
    const u8* row(std::size_t i) const { return bytes + i * row_bytes; }
    RowKey row_key(std::size_t i) const {
        RowKey key;
        std::memcpy(&key.first, row(i), sizeof key.first);
        std::memcpy(&key.second, row(i) + sizeof key.first, sizeof key.second);
        return key;
    }
};

class RowCheck {
public:
    RowCheck(u32 bucket, u32 tables, bool int32, u32 part, u32 parts)
        : bucket_(bucket), tables_(tables), part_(part), parts_(parts), int32_(int32) {}

    const char* problem(const Packed& rows) {
        const bool has_record = rows.row_bytes >= packed_bytes_of(0);
        for (std::size_t i = 0; i < rows.count; ++i) {
            const RowKey row_key = rows.row_key(i);
            if (last_ && !(*last_ < row_key)) return "its rows are not in strictly ascending order of (table, key)";
            last_ = row_key;
            const auto [table, key] = row_key;
            if (table >= tables_) return "it has rows of tables that do not exist";
            const u64 hash = hash_row(table, key);
            if (bucket_of(hash) != bucket_) return "it has rows of another bucket";
            if (owner_of(hash, parts_) != part_) return "it has rows of another part";
            if (int32_ && static_cast<u64>(static_cast<i64>(static_cast<i32>(key))) != key)
                return "it has keys that are not int32";
            if (has_record) {
                Record record;
                std::memcpy(&record, rows.row(i + 1) - sizeof record, sizeof record);
                if (record.updates == 0) return "it has rows whose update count is 0";
            }
        }
        return nullptr;
    }

private:
    const u32 bucket_, tables_, part_, parts_;
    const bool int32_;
    std::optional<RowKey> last_;
};

nb::tuple join_rows(InVector<u8> before, InVector<u8> after, std::size_t row_bytes) {
    require(row_bytes >= packed_bytes_of(0), "row_bytes is too small for a row with its record");
    const Packed older(before, row_bytes), newer(after, row_bytes);
    std::vector<u8> gone(older.count), state(newer.count);
    std::size_t i = 0, j = 0;
    {
        nb::gil_scoped_release unlocked;
        while (i < older.count && j < newer.count) {
            const RowKey left = older.row_key(i), right = newer.row_key(j);
            if (left < right) {
                gone[i++] = 1;
            } else if (right < left) {
                state[j++] = NEW;
            } else {
                state[j] = std::memcmp(older.row(i), newer.row(j), row_bytes) ? CHANGED : SAME;
                ++i, ++j;
            }
        }
    }
    gone.resize(i);
    state.resize(j);
    return nb::make_tuple(own(std::move(gone)), own(std::move(state)));
}

nb::tuple merge_rows(InVector<u8> before, InVector<u8> after, InVector<u8> gone, std::size_t row_bytes) {
    const Packed sides[] = {{before, row_bytes}, {after, row_bytes}, {gone, KEY_BYTES}};
    std::size_t read[3] = {};
    std::vector<u8> rows;
    bool both = false;
    {
        nb::gil_scoped_release unlocked;
        std::optional<RowKey> last;  // the least of the last keys: beyond it, some sides are not known yet
        for (const Packed& side : sides)
            if (side.count) last = std::min(last.value_or(side.row_key(side.count - 1)), side.row_key(side.count - 1));
        rows.reserve(before.size() + after.size());
        for (;;) {
            std::optional<RowKey> least, keys[3];
            for (int i = 0; i < 3; ++i) {
                if (read[i] < sides[i].count) keys[i] = sides[i].row_key(read[i]);
                if (keys[i] && (!least || *keys[i] < *least)) least = keys[i];
            }
            if (!least || *last < *least) break;
            const bool replaced = keys[1] == least, erased = keys[2] == least;
            if (replaced || !erased) {
                const u8* row = sides[replaced].row(read[replaced]);
                rows.insert(rows.end(), row, row + row_bytes);
            }
            both = both || (replaced && erased);
            for (int i = 0; i < 3; ++i) read[i] += keys[i] == least;
        }
    }
    return nb::make_tuple(own(std::move(rows)), read[0], read[1], read[2], both);
}

nb::tuple merge_parts(const std::vector<InVector<u8>>& parts, const std::vector<bool>& more, std::size_t row_bytes) {
    using Next = std::pair<RowKey, std::size_t>;  // the key of the next row of a part, and the part
    require(more.size() == parts.size(), "one of `more` for each part");
    std::vector<Packed> sides;
    for (const InVector<u8>& part : parts) sides.emplace_back(part, row_bytes);
    std::vector<std::size_t> taken(sides.size());
    std::vector<u8> rows;
    {
        nb::gil_scoped_release unlocked;
        std::priority_queue<Next, std::vector<Next>, std::greater<>> nexts;
        std::size_t bytes = 0;
        for (std::size_t i = 0; i < sides.size(); ++i) {
            if (sides[i].count) nexts.emplace(sides[i].row_key(0), i);
            bytes += parts[i].size();
        }
        rows.reserve(bytes);
        while (!nexts.empty()) {
            const std::size_t i = nexts.top().second;
            nexts.pop();
            const u8* row = sides[i].row(taken[i]++);
            rows.insert(rows.end(), row, row + row_bytes);
            if (taken[i] < sides[i].count) {
                nexts.emplace(sides[i].row_key(taken[i]), i);
            } else if (more[i]) {
                break;  // the next rows of this part are not known yet
            }
        }
    }
    return nb::make_tuple(own(std::move(rows)), nb::cast(taken));
}

void bind_rows(nb::module_& m) {
    nb::class_<RowCheck>(m, "RowCheck")
        .def(nb::init<u32, u32, bool, u32, u32>(), nb::arg("bucket"), nb::arg("tables"), nb::arg("int32"),
             nb::arg("part"), nb::arg("parts"))
        .def(
            "problem",
            [](RowCheck& check, InVector<u8> rows, std::size_t row_bytes) {
                const Packed packed(rows, row_bytes);
                nb::gil_scoped_release unlocked;
                return check.problem(packed);
            },
            nb::arg("rows"), nb::arg("row_bytes"));
    m.def("join_rows", &join_rows, nb::arg("before"), nb::arg("after"), nb::arg("row_bytes"));
    m.def("merge_parts", &merge_parts, nb::arg("parts"), nb::arg("more"), nb::arg("row_bytes"));
    m.def("merge_rows", &merge_rows, nb::arg("before"), nb::arg("after"), nb::arg("gone"), nb::arg("row_bytes"));
}

}  // namespace

void bind_stores(nb::module_& m) {
    bind_full_table(m);
    bind_changed_rows(m);
    bind_table_image(m);
    bind_rows(m);
}

}  // namespace tierbed
