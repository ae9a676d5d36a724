#include "packed_rows.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "ops/kernels/hash.h"

namespace tierbed {

const char* RowValidator::find_problem(const PackedRows& rows) {
    const bool has_record = rows.row_bytes >= packed_row_bytes(0);
    for (std::size_t i = 0; i < rows.count; ++i) {
        const RowKey row_key = rows.row_key(i);
        if (last_key_ && !(*last_key_ < row_key)) return "its rows are not in strictly ascending order of (table, key)";
        last_key_ = row_key;
        const auto [table, key] = row_key;
        if (table >= num_tables_) return "it has rows of tables that do not exist";
        const u64 hash = hash_row(table, key);
        if (get_bucket(hash) != bucket_) return "it has rows of another bucket";
        if (find_owner(hash, num_ranks_) != rank_) return "it has rows of another part";
        if (is_int32_ && static_cast<u64>(static_cast<i64>(static_cast<i32>(key))) != key)
            return "it has keys that are not int32";
        if (has_record) {
            RowCounters counters;
            std::memcpy(&counters, rows.row(i + 1) - sizeof counters, sizeof counters);
            if (counters.updates == 0) return "it has rows whose update count is 0";
            if (counters.step > last_step_) return "it has rows of a later step than the table's";
        }
    }
    return nullptr;
}

RowDiff diff_rows(const PackedRows& older, const PackedRows& newer) {
    RowDiff diff{std::vector<u8>(older.count), std::vector<u8>(newer.count)};
    std::size_t i = 0, j = 0;
    while (i < older.count && j < newer.count) {
        const RowKey left = older.row_key(i), right = newer.row_key(j);
        if (left < right) {
            diff.removed[i++] = 1;
        } else if (right < left) {
            diff.states[j++] = NEW;
        } else {
            diff.states[j] = std::memcmp(older.row(i), newer.row(j), older.row_bytes) ? CHANGED : SAME;
            ++i, ++j;
        }
    }
    diff.removed.resize(i);
    diff.states.resize(j);
    return diff;
}

MergedRows merge_parts(const std::vector<PackedRows>& parts, const std::vector<bool>& has_more) {
    using Next = std::pair<RowKey, std::size_t>;  // the key of a part's next row, and the part
    MergedRows merged{{}, std::vector<std::size_t>(parts.size())};
    std::priority_queue<Next, std::vector<Next>, std::greater<>> nexts;
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].count) nexts.emplace(parts[i].row_key(0), i);
        bytes += parts[i].count * parts[i].row_bytes;
    }
    merged.rows.reserve(bytes);
    while (!nexts.empty()) {
        const std::size_t i = nexts.top().second;
        nexts.pop();
        std::size_t& read = merged.rows_read[i];
        merged.rows.insert(merged.rows.end(), parts[i].row(read), parts[i].row(read + 1));
        if (++read < parts[i].count) {
            nexts.emplace(parts[i].row_key(read), i);
        } else if (has_more[i]) {
            break;  // the next rows of this part are in a later call
        }
    }
    return merged;
}

}  // namespace tierbed
