#include "batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "pool.h"

namespace tierbed {
namespace {

constexpr std::size_t CHUNK = 16384;  // positions a task; fixed, so that the order does not depend on threads

std::size_t total_size(const std::vector<Segment>& segments) {
    std::size_t n = 0;
    for (const auto& segment : segments) n += segment.n;
    return n;
}

// Calls body(entry) for positions [begin, end), padding left out.
template <class Body>
void for_each_entry(const std::vector<Segment>& segments, u32 num_tables, std::optional<u64> padding, std::size_t begin,
                    std::size_t end, Body body) {
    std::size_t first = 0;
    for (const auto& segment : segments) {
        const std::size_t from = std::max(begin, first), to = std::min(end, first + segment.n);
        for (std::size_t p = from; p < to; ++p) {
            const std::size_t i = p - first;
            const u64 key = segment.keys[i];
            if (padding && key == *padding) continue;
            const u32 table = segment.tables ? segment.tables[i] : static_cast<u32>(i % num_tables);
            body(Entry{key, table, static_cast<u32>(p)});
        }
        first += segment.n;
    }
}

u32 power_of_two_at_least(std::size_t n) {
    u32 p = 1;
    while (p < n) p *= 2;
    return p;
}

}  // namespace

Grouped group_by_bucket(const std::vector<Segment>& segments, u32 num_tables, std::optional<u64> padding) {
    const std::size_t n = total_size(segments);
    if (n >= NONE / 4)
        throw std::invalid_argument("a batch of " + std::to_string(n) + " ids is too large; split it below 2^30");
    const std::size_t chunks = (n + CHUNK - 1) / CHUNK;
    std::vector<std::size_t> starts(chunks * BUCKETS, 0);
    parallel_for(chunks, [&](std::size_t chunk) {
        std::size_t* counts = &starts[chunk * BUCKETS];
        for_each_entry(segments, num_tables, padding, chunk * CHUNK, std::min(n, (chunk + 1) * CHUNK),
                       [&](const Entry& entry) {
                           if (entry.table >= num_tables)
                               throw std::out_of_range("table id " + std::to_string(entry.table) + " at position " +
                                                       std::to_string(entry.position));
                           ++counts[bucket_of(hash_row(entry.table, entry.key))];
                       });
    });
    Grouped grouped;
    std::size_t total = 0;
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) {
        grouped.begin[bucket] = total;
        for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
            const std::size_t count = starts[chunk * BUCKETS + bucket];
            starts[chunk * BUCKETS + bucket] = total;
            total += count;
        }
    }
    grouped.begin[BUCKETS] = total;
    grouped.entries.resize(total);
    parallel_for(chunks, [&](std::size_t chunk) {
        std::size_t* at = &starts[chunk * BUCKETS];
        for_each_entry(
            segments, num_tables, padding, chunk * CHUNK, std::min(n, (chunk + 1) * CHUNK),
            [&](const Entry& entry) { grouped.entries[at[bucket_of(hash_row(entry.table, entry.key))]++] = entry; });
    });
    return grouped;
}

Batch::Batch(const std::vector<Segment>& segments, u32 num_tables, std::optional<u64> padding)
    : size(total_size(segments)) {
    const Grouped grouped = group_by_bucket(segments, num_tables, padding);
    const std::size_t n = grouped.entries.size();
    std::vector<u32> local(n), firsts(n), counts(n);
    std::size_t uniques[BUCKETS];
    parallel_for(BUCKETS, [&](std::size_t bucket) {
        const std::size_t begin = grouped.begin[bucket], count = grouped.begin[bucket + 1] - begin;
        const u32 slots = power_of_two_at_least(2 * count + 1);
        std::vector<u32> scratch(slots);
        uniques[bucket] = unique_bucket(&grouped.entries[begin], static_cast<u32>(count), scratch.data(), slots,
                                        &local[begin], &firsts[begin], &counts[begin]);
    });
    bucket_begin[0] = 0;
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) bucket_begin[bucket + 1] = bucket_begin[bucket] + uniques[bucket];
    const std::size_t unique = bucket_begin[BUCKETS];
    keys.resize(unique);
    tables.resize(unique);
    lines.assign(unique, 0);
    offsets.resize(unique + 1);
    offsets[unique] = static_cast<u32>(n);
    occurrences.resize(n);
    inverse.assign(size, -1);
    parallel_for(BUCKETS, [&](std::size_t bucket) {
        const std::size_t begin = grouped.begin[bucket], count = grouped.begin[bucket + 1] - begin,
                          base = bucket_begin[bucket];
        u32 start = static_cast<u32>(begin);  // a bucket's occurrences take the places of its entries
        for (std::size_t row = 0; row < uniques[bucket]; ++row) {
            const Entry& entry = grouped.entries[begin + firsts[begin + row]];
            keys[base + row] = entry.key;
            tables[base + row] = entry.table;
            offsets[base + row] = start;
            start += counts[begin + row];
            counts[begin + row] = offsets[base + row];  // from here on: where the row's next occurrence goes
        }
        for (std::size_t i = begin; i < begin + count; ++i) {
            const u32 position = grouped.entries[i].position;
            occurrences[counts[begin + local[i]]++] = position;
            inverse[position] = static_cast<i32>(base + local[i]);
        }
    });
}

std::vector<u64> Batch::allocate(std::size_t n, const LineShape& shape) {
    owned_.emplace_back(new char[n * shape.line_bytes + 16]);
    const u64 start = (reinterpret_cast<u64>(owned_.back().get()) + 15) / 16 * 16;
    std::vector<u64> addresses(n);
    for (std::size_t i = 0; i < n; ++i) addresses[i] = start + i * shape.line_bytes;
    return addresses;
}

}  // namespace tierbed
