// Lines outside of the sets, for rows that no set has room for and for rows on their way down.
#pragma once
#include <vector>

#include "../kernels/cache_set.h"
#include "memory.h"
#include "row_map.h"

namespace tierbed {

// Places of rows are numbered from 0. Nothing is safe in several threads but `find` beside itself.
class Overflow {
public:
    struct Place {
        Way way;
        bool used;
        bool leaving;  // its line is being written down by another thread
        bool gone;     // the row is elsewhere: the place is free when the write is over
    };

    // `kept`: rows whose memory stays when they have left.
    Overflow(const LineShape& shape, std::size_t kept) : shape_(shape), kept_(kept) {}

    // The row's place, or NONE.
    u32 find(u64 hash, u32 table) const { return index_.find(hash, table) - 1; }
    // Makes room for so many more rows: only this can fail for lack of memory.
    void reserve(std::size_t rows);
    // A place for a row that is not there; its line is the caller's to fill.
    u32 add(const Way& row);
    void remove(u32 place);
    // Gives memory back.
    void trim();

    // Rows whose batches are over, at most `most`, by hash: their places are leaving until `wrote`. Clean ones go at
    // once. Rows that announced batches need stay while half of the area is free.
    std::vector<u32> take(u32 done, std::size_t most);
    // Ends that; `updates` of each row as it was written, or null where that failed.
    void wrote(const std::vector<u32>& places, const std::vector<u32>* updates, u32 done);

    // Whether it holds a row that no batch has pinned and nobody writes down.
    bool is_idle(u32 place, u32 done) const {
        const Place& here = at(place);
        return here.used && !here.leaving && !is_after(here.way.last, done);
    }
    u32 updates(u32 place) const { return record(line(place), shape_)->updates; }
    bool is_dirty(u32 place) const { return tierbed::is_dirty(updates(place), at(place).way.stored); }
    Place& at(u32 place) { return places_[place]; }
    const Place& at(u32 place) const { return places_[place]; }
    u64 line(u32 place) const {
        return chunks_[place / CHUNK].start() + static_cast<u64>(place % CHUNK) * shape_.line_bytes;
    }
    // Places that there are, used and free.
    u32 places() const { return static_cast<u32>(places_.size()); }

    bool empty() const { return rows_ == 0; }
    std::size_t rows() const { return rows_; }
    std::size_t peak_rows() const { return peak_; }
    std::size_t bytes() const;
    // What a row takes, near enough to turn a budget into rows.
    static std::size_t row_bytes(const LineShape& shape) { return shape.line_bytes + sizeof(Place) + 2 * sizeof(Slot); }

private:
    static constexpr u32 CHUNK = 1024;  // lines

    void forget(u32 place);

    LineShape shape_;
    std::size_t kept_, rows_ = 0, peak_ = 0;  // places in use, those that are gone included
    RowMap index_;                            // places + 1
    std::vector<Place> places_;
    std::vector<u32> free_;
    std::vector<Pages> chunks_;
    u32 turn_ = 0;  // where `take` goes on
};

}  // namespace tierbed
