// The sets of a cache and their lines. It decides and remembers; CachedTier moves rows.
#pragma once
#include "../kernels/cache_set.h"
#include "layout.h"
#include "memory.h"

namespace tierbed {

class Cache {
public:
    // Lines, tags and ways together take `budget_bytes` at most. Throws invalid_argument where one set takes more.
    Cache(const LineShape& shape, std::size_t budget_bytes);
    Cache(const Cache&) = delete;

    // Whether each set belongs to one bucket, so that buckets may be worked on at once.
    bool split() const { return sets_ >= BUCKETS; }
    u32 capacity() const { return sets_ * WAYS; }
    std::size_t bytes() const { return capacity() * (std::size_t{line_bytes_} + sizeof(Way) + 1); }
    std::size_t used() const;

    u32 set_of(u64 hash) const { return tierbed::set_of(hash, sets_); }
    SetView set(u32 number) { return {tags() + number * std::size_t{WAYS}, ways() + number * std::size_t{WAYS}}; }
    // The slot of a row, or NONE.
    u32 find(u64 hash, u32 table) {
        const u32 number = set_of(hash);
        const u32 way = probe_set(THREAD, set(number), hash, table);
        return way == NONE ? NONE : number * WAYS + way;
    }
    u8& tag(u32 slot) { return tags()[slot]; }
    Way& way(u32 slot) { return ways()[slot]; }
    u64 line(u32 slot) const { return lines_.start() + std::size_t{slot} * line_bytes_; }
    bool holds(u64 line) const { return line >= lines_.start() && line < lines_.start() + lines_.size(); }
    u32 slot_of(u64 line) const { return static_cast<u32>((line - lines_.start()) / line_bytes_); }

    void fetch_tags(u64 hash) const { prefetch(tags() + set_of(hash) * std::size_t{WAYS}); }
    // Of the ways that may be the row's; its tags are better there already.
    void fetch_ways(u64 hash) {
        const SetView view = set(set_of(hash));
        for (u32 matches = tag_matches(view.tags, tag_of(hash)); matches; matches &= matches - 1)
            prefetch(&view.ways[lowest_bit(matches)]);
    }

private:
    u8* tags() const { return reinterpret_cast<u8*>(tags_.start()); }
    Way* ways() const { return reinterpret_cast<Way*>(ways_.start()); }

    const u32 line_bytes_;
    u32 sets_;
    Pages tags_, ways_, lines_;
};

}  // namespace tierbed
