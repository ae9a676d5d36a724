#include "batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t CHUNK = 4096;  // positions a task; fixed, so that the order does not depend on threads

// Positions [begin, end) of a segment.
struct Chunk {
    const Segment* segment;
    std::size_t first;  // the segment's first position in the batch
    std::size_t source;
    std::size_t begin, end;
};

// Calls body(i, table, bag) for each position i of a chunk, counted within the segment.
template <class Body>
void for_each_position(const Chunk& chunk, u32 num_tables, const Body& body) {
    const Segment& segment = *chunk.segment;
    if (!segment.pooled) {
        u32 turn = static_cast<u32>(chunk.begin % num_tables);
        for (std::size_t i = chunk.begin; i < chunk.end; ++i) {
            body(i, segment.tables ? segment.tables[i] : turn, i);
            if (++turn == num_tables) turn = 0;
        }
        return;
    }
    std::size_t bag = 0;
    if (segment.offsets)
        bag = static_cast<std::size_t>(
                  std::upper_bound(segment.offsets, segment.offsets + segment.bags + 1, static_cast<i64>(chunk.begin)) -
                  segment.offsets) -
              1;
    else
        bag = chunk.begin / segment.length;
    u32 turn = static_cast<u32>(bag % num_tables);
    for (std::size_t i = chunk.begin; i < chunk.end; ++bag) {
        const u32 table = segment.tables ? segment.tables[bag] : turn;
        for (const std::size_t end = std::min(chunk.end, segment.bag_begin(bag + 1)); i < end; ++i) body(i, table, bag);
        if (++turn == num_tables) turn = 0;
    }
}

// Positions by chunk, and the same grouped by bucket. Threads write to chunks, or to buckets, of their own.
class Grouping {
public:
    // `inverse` takes -1 for padding. pooled: whether to keep the output row of each entry as well.
    Grouping(const std::vector<Chunk>& chunks, std::size_t n, u32 num_tables, std::optional<u64> padding, i32* inverse,
             bool pooled);

    Grouped grouped;
    Buffer<u32> sources;  // of the entries, where pooled

    // inverse[position] = first[bucket] + local[entry] for all entries
    void invert(const std::size_t* first, const u32* local, i32* inverse) const;

private:
    const Entry* entries(std::size_t c) const { return &hashed_[chunks_[c].first + chunks_[c].begin]; }

    const std::vector<Chunk>& chunks_;
    Buffer<Entry> hashed_;           // by position, those of a chunk from its first one on
    std::vector<std::size_t> held_;  // how many entries of each chunk
    std::vector<std::size_t> ends_;  // of each chunk and bucket, the end of its entries in the bucket
};

Grouping::Grouping(const std::vector<Chunk>& chunks, std::size_t n, u32 num_tables, std::optional<u64> padding,
                   i32* inverse, bool pooled)
    : chunks_(chunks), held_(chunks.size()), ends_(chunks.size() * BUCKETS, 0) {
    if (n >= NONE / 4)
        throw std::invalid_argument("a batch of " + std::to_string(n) + " ids is too large; split it below 2^30");
    hashed_ = Buffer<Entry>(n);
    Buffer<u32> source_of(pooled ? n : 0);
    parallel_for(chunks.size(), [&](std::size_t c) {
        const Chunk& chunk = chunks[c];
        std::size_t* counts = &ends_[c * BUCKETS];
        const std::size_t start = chunk.first + chunk.begin;
        std::size_t held = start;
        const u64* keys = chunk.segment->keys;
        for_each_position(chunk, num_tables, [&](std::size_t i, u32 table, std::size_t bag) {
            const u32 position = static_cast<u32>(chunk.first + i);
            if (padding && keys[i] == *padding) {
                inverse[position] = -1;
                return;
            }
            if (table >= num_tables)
                throw std::out_of_range("table id " + std::to_string(table) + " at position " +
                                        std::to_string(position));
            const u64 hash = hash_row(table, keys[i]);
            if (pooled) source_of[held] = static_cast<u32>(chunk.source + bag);
            hashed_[held++] = Entry{hash, table, position};
            ++counts[bucket_of(hash)];
        });
        held_[c] = held - start;
    });
    std::size_t total = 0;
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) {
        grouped.begin[bucket] = total;
        for (std::size_t c = 0; c < chunks.size(); ++c) {
            const std::size_t count = ends_[c * BUCKETS + bucket];
            ends_[c * BUCKETS + bucket] = total;
            total += count;
        }
    }
    grouped.begin[BUCKETS] = total;
    grouped.entries = Buffer<Entry>(total);
    if (pooled) sources = Buffer<u32>(total);
    parallel_for(chunks.size(), [&](std::size_t c) {
        std::size_t* at = &ends_[c * BUCKETS];
        const Entry* entry = entries(c);
        const u32* source = pooled ? &source_of[chunks[c].first + chunks[c].begin] : nullptr;
        for (std::size_t i = 0; i < held_[c]; ++i, ++entry) {
            const std::size_t place = at[bucket_of(entry->hash)]++;
            grouped.entries[place] = *entry;
            if (source) sources[place] = source[i];
        }
    });
}

void Grouping::invert(const std::size_t* first, const u32* local, i32* inverse) const {
    parallel_for(chunks_.size(), [&](std::size_t c) {
        std::size_t at[BUCKETS];
        std::copy_n(c ? &ends_[(c - 1) * BUCKETS] : grouped.begin, BUCKETS, at);  // where the chunk before it ends
        const Entry* entry = entries(c);
        for (std::size_t i = 0; i < held_[c]; ++i, ++entry) {
            const u32 bucket = bucket_of(entry->hash);
            inverse[entry->position] = static_cast<i32>(first[bucket] + local[at[bucket]++]);
        }
    });
}

void append_chunks(std::vector<Chunk>& chunks, const Segment& segment, std::size_t first, std::size_t source) {
    for (std::size_t begin = 0; begin < segment.n; begin += CHUNK)
        chunks.push_back({&segment, first, source, begin, std::min(segment.n, begin + CHUNK)});
}

u32 power_of_two_at_least(std::size_t n) {
    u32 p = 1;
    while (p < n) p *= 2;
    return p;
}

}  // namespace

Grouped group_by_bucket(const u32* tables, const u64* keys, std::size_t n) {
    const Segment all{keys, tables, n, n, 1, nullptr, false};
    std::vector<Chunk> chunks;
    append_chunks(chunks, all, 0, 0);
    return std::move(Grouping(chunks, n, NONE, std::nullopt, nullptr, false).grouped);
}

Deduplicated::Deduplicated(const std::vector<Segment>& segments, u32 num_tables, std::optional<u64> padding) {
    std::vector<Chunk> chunks;
    for (const Segment& segment : segments) {
        append_chunks(chunks, segment, size, sources);
        LookupSpan lookup{size, sources, segment, {}};
        lookup.segment.keys = nullptr;
        lookup.segment.tables = nullptr;
        if (segment.offsets) {
            lookup.offsets = Buffer<i64>(segment.bags + 1);
            std::copy_n(segment.offsets, segment.bags + 1, lookup.offsets.data());
            lookup.segment.offsets = lookup.offsets.data();
        }
        lookups.push_back(std::move(lookup));
        size += segment.n;
        sources += segment.bags;
        if (sources >= NONE / 4)
            throw std::invalid_argument("a batch of " + std::to_string(sources) +
                                        " bags is too large; split it below 2^30");
        pooled = pooled || segment.pooled;
    }
    inverse = Buffer<i32>(size);
    const Grouping grouping(chunks, size, num_tables, padding, inverse.data(), pooled);
    const Grouped& grouped = grouping.grouped;
    const std::size_t n = grouped.entries.size();
    Buffer<u32> local(n);
    Buffer<UniqueRow> rows(n);
    std::size_t uniques[BUCKETS];
    parallel_for(BUCKETS, n, [&](std::size_t bucket) {
        const std::size_t begin = grouped.begin[bucket], count = grouped.begin[bucket + 1] - begin;
        const u32 slots = power_of_two_at_least(2 * count + 1);
        Buffer<Mark> marks(slots);
        uniques[bucket] = unique_bucket(&grouped.entries[begin], static_cast<u32>(count), marks.data(), slots,
                                        &local[begin], &rows[begin]);
    });
    bucket_begin[0] = 0;
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) bucket_begin[bucket + 1] = bucket_begin[bucket] + uniques[bucket];
    unique = bucket_begin[BUCKETS];
    hashes = Buffer<u64>(unique);
    tables = Buffer<u32>(unique);
    offsets = Buffer<u32>(unique + 1);
    offsets[unique] = static_cast<u32>(n);
    occurrences = Buffer<u32>(n);
    if (pooled) occurrence_sources = Buffer<u32>(n);
    parallel_for(BUCKETS, n, [&](std::size_t bucket) {
        const std::size_t begin = grouped.begin[bucket], count = grouped.begin[bucket + 1] - begin,
                          base = bucket_begin[bucket];
        u32 start = static_cast<u32>(begin);  // a bucket's occurrences take the places of its entries
        for (std::size_t i = 0; i < uniques[bucket]; ++i) {
            UniqueRow& row = rows[begin + i];
            hashes[base + i] = row.hash;
            tables[base + i] = row.table;
            offsets[base + i] = start;
            start += row.count;
            row.count = offsets[base + i];  // from here on: where the row's next occurrence goes
        }
        for (std::size_t i = begin; i < begin + count; ++i) {
            const u32 place = rows[begin + local[i]].count++;
            occurrences[place] = grouped.entries[i].position;
            if (pooled) occurrence_sources[place] = grouping.sources[i];
        }
    });
    grouping.invert(bucket_begin, local.data(), inverse.data());
}

Batch::Batch(std::shared_ptr<const Deduplicated> shared) : shared_(std::move(shared)), lines(unique) {
    std::fill_n(lines.data(), unique, u64{0});
}

Buffer<u64>& Batch::keys() {
    if (keys_.size() != unique) {
        keys_ = Buffer<u64>(unique);
        parallel_ranges(unique, CHUNK, [&](std::size_t begin, std::size_t end) {
            for (std::size_t row = begin; row < end; ++row) keys_[row] = key(row);
        });
    }
    return keys_;
}

std::vector<u64> Batch::allocate(std::size_t n, const LineShape& shape) {
    owned_.emplace_back(new char[n * shape.line_bytes + 16]);
    const u64 start = (reinterpret_cast<u64>(owned_.back().get()) + 15) / 16 * 16;
    std::vector<u64> addresses(n);
    for (std::size_t i = 0; i < n; ++i) addresses[i] = start + i * shape.line_bytes;
    return addresses;
}

}  // namespace tierbed
