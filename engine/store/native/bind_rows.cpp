// The binding of what works on packed rows as snapshots hold them; engine/_core.pyi is the contract.
#include "ops/native/bind.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

#include "lines/kernels/hash.h"
#include "packed_row.h"

namespace tierbed {
namespace {

constexpr std::size_t NAME_BYTES = sizeof(u32) + sizeof(u64);

enum State : u8 { SAME, CHANGED, NEW };  // what `join_rows` tells of a row

using Name = std::pair<u32, u64>;  // table and key, in the order of rows

// Packed rows of one length, or names of rows alone.
struct Packed {
    const u8* bytes;
    std::size_t row_bytes, count;

    Packed(const InVector<u8>& rows, std::size_t row_bytes)
        : bytes(rows.data()), row_bytes(row_bytes), count(rows.size() / row_bytes) {
        require(row_bytes >= NAME_BYTES && rows.size() % row_bytes == 0, "rows of row_bytes each");
    }
    const u8* row(std::size_t i) const { return bytes + i * row_bytes; }
    Name name(std::size_t i) const {
        Name name;
        std::memcpy(&name.first, row(i), sizeof name.first);
        std::memcpy(&name.second, row(i) + sizeof name.first, sizeof name.second);
        return name;
    }
};

class RowCheck {
public:
    RowCheck(u32 bucket, u32 tables, bool int32, u32 part, u32 parts)
        : bucket_(bucket), tables_(tables), part_(part), parts_(parts), int32_(int32) {}

    const char* problem(const Packed& rows) {
        const bool has_record = rows.row_bytes >= packed_bytes_of(0);
        for (std::size_t i = 0; i < rows.count; ++i) {
            const Name name = rows.name(i);
            if (last_ && !(*last_ < name)) return "its rows are not in strictly ascending order of (table, key)";
            last_ = name;
            const auto [table, key] = name;
            if (table >= tables_) return "it has rows of tables that there are not";
            const u64 hash = hash_row(table, key);
            if (bucket_of(hash) != bucket_) return "it has rows of another bucket";
            if (owner_of(hash, parts_) != part_) return "it has rows of another part";
            if (int32_ && static_cast<u64>(static_cast<i64>(static_cast<i32>(key))) != key)
                return "it has keys that are no int32";
            if (has_record) {
                Record record;
                std::memcpy(&record, rows.row(i + 1) - sizeof record, sizeof record);
                if (record.updates == 0) return "it has rows that count as never written";
            }
        }
        return nullptr;
    }

private:
    const u32 bucket_, tables_, part_, parts_;
    const bool int32_;
    std::optional<Name> last_;
};

nb::tuple join_rows(InVector<u8> before, InVector<u8> after, std::size_t row_bytes) {
    require(row_bytes >= packed_bytes_of(0), "rows with records");
    const Packed older(before, row_bytes), newer(after, row_bytes);
    std::vector<u8> gone(older.count), state(newer.count);
    std::size_t i = 0, j = 0;
    {
        nb::gil_scoped_release unlocked;
        while (i < older.count && j < newer.count) {
            const Name left = older.name(i), right = newer.name(j);
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
    const Packed older(before, row_bytes), newer(after, row_bytes), deleted(gone, NAME_BYTES);
    std::vector<u8> rows;
    std::size_t i = 0, j = 0, k = 0;
    bool both = false;
    {
        nb::gil_scoped_release unlocked;
        std::optional<Name> last;  // the least of the last ones: what comes after it is not known of each
        for (const Packed* each : {&older, &newer, &deleted})
            if (each->count) last = std::min(last.value_or(each->name(each->count - 1)), each->name(each->count - 1));
        rows.reserve(before.size() + after.size());
        const auto take = [&](const u8* row) { rows.insert(rows.end(), row, row + row_bytes); };
        const auto within = [&](const Packed& each, std::size_t at) {
            return at < each.count && each.name(at) <= *last;
        };
        for (; within(older, i); ++i) {
            const Name name = older.name(i);
            for (; within(newer, j) && newer.name(j) < name; ++j) take(newer.row(j));
            while (within(deleted, k) && deleted.name(k) < name) ++k;
            const bool replaced = within(newer, j) && newer.name(j) == name;
            const bool erased = within(deleted, k) && deleted.name(k) == name;
            if (!replaced && !erased) take(older.row(i));
        }
        for (; within(newer, j); ++j) take(newer.row(j));
        while (within(deleted, k)) ++k;
        for (std::size_t a = 0, b = 0; a < j && b < k && !both;) {
            both = newer.name(a) == deleted.name(b);
            newer.name(a) < deleted.name(b) ? ++a : ++b;
        }
    }
    return nb::make_tuple(own(std::move(rows)), i, j, k, both);
}

nb::tuple merge_parts(const std::vector<InVector<u8>>& parts, const std::vector<bool>& more, std::size_t row_bytes) {
    using Next = std::pair<Name, std::size_t>;  // the next row of a part, and the part
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
            if (sides[i].count) nexts.emplace(sides[i].name(0), i);
            bytes += parts[i].size();
        }
        rows.reserve(bytes);
        while (!nexts.empty()) {
            const std::size_t i = nexts.top().second;
            nexts.pop();
            const u8* row = sides[i].row(taken[i]++);
            rows.insert(rows.end(), row, row + row_bytes);
            if (taken[i] < sides[i].count) {
                nexts.emplace(sides[i].name(taken[i]), i);
            } else if (more[i]) {
                break;  // what comes after it is not known
            }
        }
    }
    return nb::make_tuple(own(std::move(rows)), nb::cast(taken));
}

}  // namespace

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

}  // namespace tierbed
