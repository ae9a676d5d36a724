#include "batch.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t CHUNK_POSITIONS = 4096;  // per task; fixed, so that the order does not depend on threads

// Positions [begin, end) in a lookup. With features, all positions of a chunk belong to the same feature.
struct Chunk {
    const LookupArrays* arrays;
    std::size_t first_position;    // the lookup's first position in the batch
    std::size_t first_output_row;  // the lookup's first output row in the batch
    std::size_t begin, end;
    u32 column;
};

// Calls body(begin, end, table, row) for each bag in a chunk. The bag has positions [begin, end) and output row `row`.
template <class Body>
void for_each_bag(const Chunk& chunk, u32 num_tables, const Body& body) {
    const LookupArrays& arrays = *chunk.arrays;
    if (!arrays.is_pooled) {
        u32 cyclic = static_cast<u32>(chunk.begin % num_tables);
        for (std::size_t i = chunk.begin; i < chunk.end; ++i) {
            body(i, i + 1, arrays.tables ? arrays.tables[i] : cyclic, i);
            if (++cyclic == num_tables) cyclic = 0;
        }
        return;
    }
    const Bags& bags = arrays.bags;
    const u32 columns = bags.features ? bags.num_columns : 1;
    const i64* const offsets =
        bags.features ? bags.offsets + static_cast<u64>(bags.features[chunk.column]) * bags.batch_size : bags.offsets;
    const std::size_t parts = bags.features ? bags.batch_size : arrays.num_bags;
    std::size_t bag =
        offsets ? static_cast<std::size_t>(
                      std::upper_bound(offsets, offsets + parts + 1, static_cast<i64>(chunk.begin)) - offsets) -
                      1
                : chunk.begin / bags.length;
    u32 cyclic = static_cast<u32>(bag % num_tables);
    for (std::size_t i = chunk.begin; i < chunk.end; ++bag) {
        const u32 table = bags.features ? arrays.tables[chunk.column] : arrays.tables ? arrays.tables[bag] : cyclic;
        const std::size_t last = offsets ? static_cast<std::size_t>(offsets[bag + 1]) : (bag + 1) * bags.length;
        const std::size_t end = std::min(chunk.end, last);
        body(i, end, table, bag * columns + chunk.column);
        i = end;
        if (++cyclic == num_tables) cyclic = 0;
    }
}

// Hashes positions chunk by chunk, then groups them by bucket. No two threads write the same chunk or bucket.
class BucketGrouping {
public:
    // Sets `inverse` to -1 for padding and illegal ids. Calls on_illegal(table, key, position) for illegal ids.
    // is_pooled: keep each entry's output row.
    template <class OnIllegal>
    BucketGrouping(const std::vector<Chunk>& chunks, std::size_t n, u32 num_tables, std::optional<u64> padding,
                   i32* inverse, bool is_pooled, const LegalIds& legal, const OnIllegal& on_illegal);

    BucketedRows buckets;
    Buffer<u32> output_rows;  // the entries' output rows, if pooled

    // Sets inverse[position] = first_rows[bucket] + local_rows[entry] for all entries.
    void fill_inverse(const std::size_t* first_rows, const u32* local_rows, i32* inverse) const;

private:
    const Entry* entries(std::size_t c) const { return &entries_[chunks_[c].first_position + chunks_[c].begin]; }

    const std::vector<Chunk>& chunks_;
    Buffer<Entry> entries_;                  // all chunks' entries; chunk c's entries begin at `entries(c)`
    std::vector<std::size_t> entry_counts_;  // entries per chunk
    Buffer<std::size_t> entry_ends_;         // for each chunk and bucket, where the chunk's entries in the bucket end
};

template <class OnIllegal>
BucketGrouping::BucketGrouping(const std::vector<Chunk>& chunks, std::size_t n, u32 num_tables,
                               std::optional<u64> padding, i32* inverse, bool is_pooled, const LegalIds& legal,
                               const OnIllegal& on_illegal)
    : chunks_(chunks), entry_counts_(chunks.size()), entry_ends_(chunks.size() * BUCKETS) {
    entries_ = Buffer<Entry>(n);
    Buffer<u32> position_output_rows(is_pooled ? n : 0);
    const u64* const max_ids = legal.max_ids.empty() ? nullptr : legal.max_ids.data();
    parallel_for(chunks.size(), [&](std::size_t c) {
        const Chunk chunk = chunks[c];
        std::size_t* const counts = &entry_ends_[c * BUCKETS];
        std::fill_n(counts, BUCKETS, std::size_t{0});
        const std::size_t start = chunk.first_position + chunk.begin;
        Entry* const first_entry = entries_.data() + start;
        Entry* entry = first_entry;
        u32* const chunk_output_rows = position_output_rows.data() + (is_pooled ? start : 0);
        const u64* keys = chunk.arrays->keys;
        const auto add_id = [&](auto has_limits, std::size_t i, u32 table, std::size_t row) TIERBED_INLINE {
            const u32 position = static_cast<u32>(chunk.first_position + i);
            if (padding && keys[i] == *padding) {
                inverse[position] = -1;
                return;
            }
            if (table >= num_tables)
                throw std::out_of_range("table id " + std::to_string(table) + " at position " +
                                        std::to_string(position));
            if constexpr (decltype(has_limits)::value)
                if (keys[i] > max_ids[table]) {
                    inverse[position] = -1;
                    on_illegal(table, keys[i], position);
                    return;
                }
            const u64 hash = slot_hash(table, keys[i]);
            if (is_pooled) chunk_output_rows[entry - first_entry] = static_cast<u32>(chunk.first_output_row + row);
            *entry++ = Entry{hash, table, position};
            ++counts[get_bucket(hash)];
        };
        const auto add_chunk = [&](auto has_limits) {
            for_each_bag(chunk, num_tables, [&](std::size_t i, std::size_t end, u32 table, std::size_t row) {
                for (; i < end; ++i) add_id(has_limits, i, table, row);
            });
        };
        max_ids ? add_chunk(std::true_type{}) : add_chunk(std::false_type{});
        entry_counts_[c] = static_cast<std::size_t>(entry - first_entry);
    });
    std::size_t total = 0;
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) {
        buckets.bucket_offsets[bucket] = total;
        for (std::size_t c = 0; c < chunks.size(); ++c) {
            const std::size_t count = entry_ends_[c * BUCKETS + bucket];
            entry_ends_[c * BUCKETS + bucket] = total;
            total += count;
        }
    }
    buckets.bucket_offsets[BUCKETS] = total;
    buckets.entries = Buffer<Entry>(total);
    if (is_pooled) output_rows = Buffer<u32>(total);
    parallel_for(chunks.size(), [&](std::size_t c) {
        std::size_t* next = &entry_ends_[c * BUCKETS];
        const Entry* entry = entries(c);
        const u32* output_row = is_pooled ? &position_output_rows[chunks[c].first_position + chunks[c].begin] : nullptr;
        for (std::size_t i = 0; i < entry_counts_[c]; ++i, ++entry) {
            const std::size_t index = next[get_bucket(entry->hash)]++;
            buckets.entries[index] = *entry;
            if (output_row) output_rows[index] = output_row[i];
        }
    });
}

void BucketGrouping::fill_inverse(const std::size_t* first_rows, const u32* local_rows, i32* inverse) const {
    parallel_for(chunks_.size(), [&](std::size_t c) {
        std::size_t next[BUCKETS];
        std::copy_n(c ? &entry_ends_[(c - 1) * BUCKETS] : buckets.bucket_offsets, BUCKETS, next);  // the previous ends
        const Entry* entry = entries(c);
        for (std::size_t i = 0; i < entry_counts_[c]; ++i, ++entry) {
            const u32 bucket = get_bucket(entry->hash);
            inverse[entry->position] = static_cast<i32>(first_rows[bucket] + local_rows[next[bucket]++]);
        }
    });
}

// Appends positions [begin, end) of a lookup to `chunks`.
void append_chunks(std::vector<Chunk>& chunks, const LookupArrays& arrays, std::size_t first, std::size_t output_row,
                   std::size_t begin, std::size_t end, u32 column = 0) {
    for (; begin < end; begin += CHUNK_POSITIONS)
        chunks.push_back({&arrays, first, output_row, begin, std::min(end, begin + CHUNK_POSITIONS), column});
}

// Appends the looked-up features' positions, in memory order. Sets `inverse` to -1 for other positions.
void append_features(std::vector<Chunk>& chunks, const LookupArrays& arrays, std::size_t first, std::size_t output_row,
                     i32* inverse) {
    const Bags& bags = arrays.bags;
    std::vector<u32> columns(bags.num_columns);
    std::iota(columns.begin(), columns.end(), u32{0});
    std::sort(columns.begin(), columns.end(), [&](u32 a, u32 b) { return bags.features[a] < bags.features[b]; });
    std::size_t done = 0;
    for (const u32 column : columns) {
        const i64* const offsets = bags.offsets + static_cast<u64>(bags.features[column]) * bags.batch_size;
        const auto begin = static_cast<u64>(offsets[0]), end = static_cast<u64>(offsets[bags.batch_size]);
        std::fill(inverse + done, inverse + begin, -1);
        append_chunks(chunks, arrays, first, output_row, begin, end, column);
        done = end;
    }
    std::fill(inverse + done, inverse + arrays.num_ids, -1);
}

// Returns each table's chunks, ordered by position; empty if neighbouring bags may have different tables.
std::vector<std::vector<Chunk>> group_by_table(const std::vector<Chunk>& chunks, u32 num_tables) {
    std::vector<std::vector<Chunk>> table_chunks(num_tables);
    for (const Chunk& chunk : chunks) {
        const LookupArrays& arrays = *chunk.arrays;
        if (!arrays.bags.features && (arrays.tables || num_tables > 1)) return {};
        const u32 table = arrays.bags.features ? arrays.tables[chunk.column] : 0;
        if (table >= num_tables)
            throw std::out_of_range("table id " + std::to_string(table) + " of column " + std::to_string(chunk.column));
        table_chunks[table].push_back(chunk);
    }
    return table_chunks;
}

// Sorts n 64-bit entries by their high words. Each high word is below 2^bits. The sort is stable. Scratch memory for n
// entries must follow the entries. Returns the half of the memory that holds the result.
//
// A radix sort in few passes: digits are so long that there are about as many counters as entries.
u64* sort_entries(u64* numbers, u32 n, u32 bits) {
    constexpr u32 MIN_DIGIT = 4, MAX_DIGIT = 11;  // bits per digit
    const u32 most = std::clamp<u32>(31 - static_cast<u32>(__builtin_clz(n | 1)), MIN_DIGIT, MAX_DIGIT);
    const u32 passes = (bits + most - 1) / most, digit = (bits + passes - 1) / passes, mask = (1u << digit) - 1;
    u32 counts[(32 / MAX_DIGIT + 1) << MAX_DIGIT];
    std::fill_n(counts, passes << digit, 0u);
    for (u32 i = 0; i < n; ++i)
        for (u32 pass = 0; pass < passes; ++pass)
            ++counts[pass << digit | (static_cast<u32>(numbers[i] >> 32) >> pass * digit & mask)];
    u64 *from = numbers, *to = numbers + n;
    for (u32 pass = 0; pass < passes; ++pass) {
        u32* const next = counts + (pass << digit);
        for (u32 value = 0, total = 0; value <= mask; ++value) total += std::exchange(next[value], total);
        const u32 shift = 32 + pass * digit;
        for (u32 i = 0; i < n; ++i) to[next[from[i] >> shift & mask]++] = from[i];
        std::swap(from, to);
    }
    return from;
}

// A table's ids from `first` to `last`.
struct TablePart {
    u32 table;
    u64 first, last;
    std::size_t num_positions;  // in the whole table
    Buffer<u64> memory;
    const u64* entries = nullptr;  // ids in the high words, their positions in the low words
    u32 num_entries = 0, num_rows = 0;
    u32 first_occurrence = 0, first_row = 0;  // indexes in the whole batch
};

// Makes one part per table, or several for a table with many of the ids, so that threads can share the work.
std::vector<TablePart> make_parts(const std::vector<std::vector<Chunk>>& chunks, std::size_t size,
                                  const IdLinearizer& linearizer) {
    constexpr std::size_t PARTS_PER_TABLE = 4;
    std::vector<TablePart> parts;
    for (u32 table = 0; table < chunks.size(); ++table) {
        std::size_t positions = 0;
        for (const Chunk& chunk : chunks[table]) positions += chunk.end - chunk.begin;
        if (positions == 0) continue;
        const u64 ids = linearizer.num_ids(table), count = (positions * PARTS_PER_TABLE + size - 1) / size;
        for (u64 p = 0; p < count; ++p)
            if (const u64 first = ids * p / count, end = ids * (p + 1) / count; first < end)
                parts.push_back({table, first, end - 1, positions, {}});
    }
    return parts;
}

UniqueRows::LookupSpan make_lookup_span(const LookupArrays& arrays, std::size_t begin, std::size_t output_row) {
    UniqueRows::LookupSpan span{begin, output_row, arrays, {}, {}};
    span.arrays.keys = nullptr;
    span.arrays.tables = nullptr;
    Bags& bags = span.arrays.bags;
    if (bags.offsets) {
        span.offsets = Buffer<i64>(arrays.num_offset_bags + 1);
        bags.offsets =
            std::copy_n(bags.offsets, arrays.num_offset_bags + 1, span.offsets.data()) - (arrays.num_offset_bags + 1);
    }
    if (bags.features) {
        span.features = Buffer<u32>(bags.num_columns);
        bags.features = std::copy_n(bags.features, bags.num_columns, span.features.data()) - bags.num_columns;
    }
    return span;
}

void check_batch_size(std::size_t n, const char* unit) {
    if (n >= NONE / 4)
        throw std::invalid_argument("a batch of " + std::to_string(n) + " " + unit +
                                    " is too large; split it below 2^30");
}

void allocate_rows(UniqueRows& out, std::size_t num_unique, std::size_t num_entries) {
    out.num_unique = num_unique;
    out.hashes = Buffer<u64>(num_unique);
    out.tables = Buffer<u32>(num_unique);
    out.occurrence_offsets = Buffer<u32>(num_unique + 1);
    out.occurrence_offsets[num_unique] = static_cast<u32>(num_entries);
    out.occurrences = Buffer<u32>(num_entries);
    if (out.is_pooled) out.occurrence_output_rows = Buffer<u32>(num_entries);
}

// Finds each bucket's unique rows, ordered by first occurrence.
void deduplicate_by_hash(UniqueRows& out, const BucketGrouping& grouping,
                         std::array<std::size_t, BUCKETS + 1>& bucket_offsets) {
    const BucketedRows& buckets = grouping.buckets;
    const std::size_t n = buckets.entries.size();
    Buffer<u32> local_rows(n);
    Buffer<UniqueRow> rows(n);
    std::size_t unique_counts[BUCKETS];
    parallel_for(BUCKETS, n, [&](std::size_t bucket) {
        const std::size_t begin = buckets.bucket_offsets[bucket], count = buckets.bucket_offsets[bucket + 1] - begin;
        const u32 num_slots = 2u << (31 - __builtin_clz(static_cast<u32>(2 * count) | 1));  // a power of two
        Buffer<HashSlot> hash_slots(num_slots);
        unique_counts[bucket] = deduplicate_bucket(&buckets.entries[begin], static_cast<u32>(count), hash_slots.data(),
                                                   num_slots, &local_rows[begin], &rows[begin]);
    });
    bucket_offsets[0] = 0;
    for (u32 b = 0; b < BUCKETS; ++b) bucket_offsets[b + 1] = bucket_offsets[b] + unique_counts[b];
    allocate_rows(out, bucket_offsets[BUCKETS], n);
    parallel_for(BUCKETS, n, [&](std::size_t bucket) {
        const std::size_t begin = buckets.bucket_offsets[bucket], count = buckets.bucket_offsets[bucket + 1] - begin,
                          base = bucket_offsets[bucket];
        u32 start = static_cast<u32>(begin);  // a bucket's occurrences begin at the same index as its entries
        for (std::size_t i = 0; i < unique_counts[bucket]; ++i) {
            UniqueRow& row = rows[begin + i];
            out.hashes[base + i] = row.hash;
            out.tables[base + i] = row.table;
            out.occurrence_offsets[base + i] = start;
            start += row.num_entries;
            row.num_entries = out.occurrence_offsets[base + i];  // now used as the index of the row's next occurrence
        }
        for (std::size_t i = begin; i < begin + count; ++i) {
            const u32 index = rows[begin + local_rows[i]].num_entries++;
            out.occurrences[index] = buckets.entries[i].position;
            if (out.is_pooled) out.occurrence_output_rows[index] = grouping.output_rows[i];
        }
    });
    grouping.fill_inverse(bucket_offsets.data(), local_rows.data(), out.inverse.data());
}

// Finds each part's unique rows by sorting its ids. One thread works on a part, so that its core caches the entries.
template <class OnIllegal>
void deduplicate_by_sorting(UniqueRows& out, const std::vector<std::vector<Chunk>>& chunks, std::optional<u64> padding,
                            const LegalIds& legal, const OnIllegal& on_illegal) {
    std::vector<TablePart> parts = make_parts(chunks, out.num_positions, out.linearizer);
    Buffer<u32> output_rows(out.is_pooled ? out.num_positions : 0);  // each position's output row
    parallel_for(parts.size(), out.num_positions, [&](std::size_t p) {
        TablePart& part = parts[p];
        part.memory = Buffer<u64>(2 * part.num_positions);
        u64* end = part.memory.data();
        const u64 max_id = legal.max_ids[part.table];
        const bool first_part = part.first == 0;
        for (const Chunk& chunk : chunks[part.table]) {
            const u64* const keys = chunk.arrays->keys;
            for (std::size_t i = chunk.begin; i < chunk.end; ++i) {
                const u64 key = keys[i];
                const u32 position = static_cast<u32>(chunk.first_position + i);
                if ((padding && key == *padding) || key > max_id) {
                    if (!first_part) continue;
                    out.inverse[position] = -1;
                    if (!padding || key != *padding) on_illegal(part.table, key, position);
                    continue;
                }
                *end = key << 32 | position;
                end += part.first <= key && key <= part.last;
            }
            if (out.is_pooled && first_part)
                for_each_bag(chunk, 1, [&](std::size_t i, std::size_t bag_end, u32, std::size_t row) {
                    std::fill(&output_rows[chunk.first_position + i], &output_rows[chunk.first_position + bag_end],
                              static_cast<u32>(chunk.first_output_row + row));
                });
        }
        part.num_entries = static_cast<u32>(end - part.memory.data());
        if (part.num_entries == 0) return;
        const u32 bits = 64 - static_cast<u32>(__builtin_clzll(part.last | 1));
        part.entries = sort_entries(part.memory.data(), part.num_entries, bits);
        u32 rows = 1;
        for (u32 k = 1; k < part.num_entries; ++k) rows += part.entries[k] >> 32 != part.entries[k - 1] >> 32;
        part.num_rows = rows;
    });
    u32 num_unique = 0, num_entries = 0;
    for (TablePart& part : parts) {
        part.first_row = std::exchange(num_unique, num_unique + part.num_rows);
        part.first_occurrence = std::exchange(num_entries, num_entries + part.num_entries);
    }
    allocate_rows(out, num_unique, num_entries);
    out.linear_ids = Buffer<u32>(num_unique);
    parallel_for(parts.size(), out.num_positions, [&](std::size_t p) {
        const TablePart& part = parts[p];
        u32 row = part.first_row - 1, index = part.first_occurrence;
        u64 previous = ~u64{0};
        for (u32 k = 0; k < part.num_entries; ++k, ++index) {  // no branches: most would be mispredicted
            const u64 key = part.entries[k] >> 32;
            const u32 position = static_cast<u32>(part.entries[k]);
            const bool is_first = key != previous;
            previous = key;
            row += is_first;
            out.inverse[position] = static_cast<i32>(row);
            out.linear_ids[row] = out.linearizer.linearize(part.table, key);
            out.occurrence_offsets[row] = is_first ? index : out.occurrence_offsets[row];
            out.occurrences[index] = position;
            if (out.is_pooled) out.occurrence_output_rows[index] = output_rows[position];
        }
        for (u32 i = part.first_row; i < part.first_row + part.num_rows; ++i) {
            out.tables[i] = part.table;
            out.hashes[i] = slot_hash(part.table, out.linearizer.find_key(out.linear_ids[i], part.table));
        }
    });
}

}  // namespace

BucketedRows group_by_bucket(const u32* tables, const u64* keys, std::size_t n) {
    check_batch_size(n, "ids");
    const LookupArrays all{keys, tables, n, n, {}, 0, false};
    std::vector<Chunk> chunks;
    append_chunks(chunks, all, 0, 0, 0, n);
    const auto on_illegal = [](u32, u64, u32) {};
    return std::move(BucketGrouping(chunks, n, NONE, std::nullopt, nullptr, false, {}, on_illegal).buckets);
}

UniqueRows::UniqueRows(const std::vector<LookupArrays>& inputs, u32 num_tables, std::optional<u64> padding,
                       const LegalIds& legal)
    : dropped_counts(legal.max_ids.size()), linearizer(legal.max_ids) {
    for (const LookupArrays& arrays : inputs) {
        lookups.push_back(make_lookup_span(arrays, num_positions, num_output_rows));
        num_positions += arrays.num_ids;
        num_output_rows += arrays.num_bags;
        check_batch_size(num_output_rows, "bags");
        is_pooled = is_pooled || arrays.is_pooled;
    }
    check_batch_size(num_positions, "ids");
    inverse = Buffer<i32>(num_positions);
    std::mutex mutex;
    u32 first_illegal_position = NONE;
    const auto on_illegal = [&](u32 table, u64 key, u32 position) {
        const std::lock_guard lock(mutex);
        if (legal.drops_illegal[table]) {
            ++dropped_counts[table];
        } else if (position < first_illegal_position) {
            first_illegal_position = position;
            first_illegal_id.emplace(table, key);
        }
    };
    std::vector<Chunk> chunks;
    for (std::size_t k = 0; k < inputs.size(); ++k) {
        const LookupArrays& arrays = inputs[k];
        const LookupSpan& span = lookups[k];
        if (arrays.bags.features)
            append_features(chunks, arrays, span.first_position, span.first_output_row,
                            inverse.data() + span.first_position);
        else
            append_chunks(chunks, arrays, span.first_position, span.first_output_row, 0, arrays.num_ids);
    }
    std::vector<std::vector<Chunk>> table_chunks;
    if (linearizer.size()) table_chunks = group_by_table(chunks, num_tables);
    if (table_chunks.empty())
        deduplicate_by_hash(
            *this,
            BucketGrouping(chunks, num_positions, num_tables, padding, inverse.data(), is_pooled, legal, on_illegal),
            buckets_.bucket_offsets);
    else
        deduplicate_by_sorting(*this, table_chunks, padding, legal, on_illegal);
}

const BucketOrder& UniqueRows::buckets() const {
    std::call_once(ordered_, [this] {
        if (linear_ids.size() == 0) return;
        std::size_t next[BUCKETS] = {};
        for (std::size_t row = 0; row < num_unique; ++row) ++next[get_bucket(hashes[row])];
        for (u32 b = 0; b < BUCKETS; ++b) {
            buckets_.bucket_offsets[b + 1] = buckets_.bucket_offsets[b] + next[b];
            next[b] = buckets_.bucket_offsets[b];
        }
        buckets_.rows = Buffer<u32>(num_unique);
        for (std::size_t row = 0; row < num_unique; ++row)
            buckets_.rows[next[get_bucket(hashes[row])]++] = static_cast<u32>(row);
    });
    return buckets_;
}

Batch::Batch(std::shared_ptr<const UniqueRows> shared) : shared_(std::move(shared)), lines(num_unique) {
    std::fill_n(lines.data(), num_unique, u64{0});
}

Buffer<u64>& Batch::keys() {
    if (keys_.size() != num_unique) {
        keys_ = Buffer<u64>(num_unique);
        parallel_ranges(num_unique, CHUNK_POSITIONS, [&](std::size_t begin, std::size_t end) {
            for (std::size_t row = begin; row < end; ++row) keys_[row] = key(row);
        });
    }
    return keys_;
}

std::vector<u64> Batch::allocate_lines(std::size_t n, const LineShape& shape) {
    owned_.emplace_back(new char[n * shape.line_bytes + 16]);
    const u64 start = (reinterpret_cast<u64>(owned_.back().get()) + 15) / 16 * 16;
    std::vector<u64> addresses(n);
    for (std::size_t i = 0; i < n; ++i) addresses[i] = start + i * shape.line_bytes;
    return addresses;
}

}  // namespace tierbed
