// Compiled once for each instruction set. Includes only kernels, for the reason in engine/ops/native/loops.cpp.
//
// A lookup waits for memory three times: for the directory, the record's first bytes, and the rest of its row. So ids
// are processed in windows. Each stage prefetches for all ids of a window what the next stage reads.
#include "lookup_loops.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace tierbed::serving {
namespace {

constexpr u32 WINDOW = 64;

template <class Type>
struct FloatRow {
    const typename Type::Stored* numbers;

    TIERBED_FN explicit FloatRow(const u8* row) : numbers(reinterpret_cast<const typename Type::Stored*>(row)) {}
    TIERBED_FN float operator[](u32 column) const { return Type::load(numbers[column]); }
};

TIERBED_FN float load_float16(u16 number) {
#ifdef __F16C__  // one instruction with the same result
    return _cvtsh_ss(number);
#else
    return Float16::load(number);
#endif
}

struct Int8Row {
    const u8* numbers;
    float scale, offset;

    TIERBED_FN explicit Int8Row(const u8* row) : numbers(row + 4) {
        const u16* header = reinterpret_cast<const u16*>(row);
        scale = load_float16(header[0]);
        offset = load_float16(header[1]);
    }
    TIERBED_FN float operator[](u32 column) const { return scale * static_cast<float>(numbers[column]) + offset; }
};

// Goes over the bags in the order of their ids, feature by feature.
struct BagWalker {
    const Lookup& lookup;
    const u32 num_tables;
    std::size_t row = ~std::size_t{0}, end = 0;  // a bag's output row, and the position after its last id
    u32 table = num_tables - 1;

    BagWalker(const Lookup& all, u32 tables) : lookup(all), num_tables(tables) {}
    // Moves to the next bag. Returns false at the end. begin: receives the position of its first id.
    TIERBED_FN bool next(std::size_t& begin) {
        if (bags_left_ == 0) return false;
        --bags_left_;
        if (column_left_ == 0) begin_column();
        --column_left_;
        row += row_step_;
        if (!lookup.bags.features) {
            if (lookup.tables)
                table = lookup.tables[row];
            else if (++table == num_tables)
                table = 0;
        }
        begin = end;
        if (offset_) begin = static_cast<std::size_t>(*offset_++);
        end = offset_ ? static_cast<std::size_t>(*offset_) : end + lookup.bags.length;
        return true;
    }

private:
    void begin_column() {
        const Bags& bags = lookup.bags;
        offset_ = bags.offsets + std::size_t{bags.features[column_]} * bags.batch_size;
        table = lookup.tables[column_];
        row = column_++ - row_step_;
        column_left_ = bags.batch_size;
    }

    std::size_t bags_left_ = lookup.num_bags, column_left_ = lookup.bags.features ? 0 : lookup.num_bags;
    std::size_t row_step_ = lookup.bags.features ? lookup.bags.num_columns : 1, column_ = 0;
    const i64* offset_ = lookup.bags.offsets;
};

// The ids of a window.
struct Window {
    u64 hashes[WINDOW], keys[WINDOW];
    std::size_t positions[WINDOW];
    u32 tables[WINDOW];  // NO_ROW for padding and illegal ids
    LinePosition base[WINDOW], delta[WINDOW];
    const u8* records[WINDOW];
    bool is_delta[WINDOW];
    u32 size;
};
constexpr u32 NO_ROW = 0xFFFFFFFF;

// Returns true if the id has no row, because it is padding or illegal.
TIERBED_FN bool is_skipped(const LookupJob& job, u32 table, u64 key, std::size_t position, LookupCounts& counts) {
    if (job.has_padding && key == job.padding_key) return true;
    if (!job.max_ids || key <= job.max_ids[table]) return false;
    if (job.drops_illegal[table]) {
        ++counts.dropped;
    } else if (position < counts.illegal_position) {
        counts.illegal_position = position;
        counts.illegal_key = key;
        counts.illegal_table = table;
    }
    return true;
}

// Reads the next ids, and prefetches their directory lines.
TIERBED_FN void fill(const LookupJob& job, Window& window, BagWalker& walker, std::size_t& position,
                     LookupCounts& counts) {
    u32 i = 0;
    while (i < WINDOW) {
        if (position == walker.end) {
            if (!walker.next(position)) break;
            continue;
        }
        const u32 table = walker.table;
        const u64 key = job.lookup.keys[position];
        window.positions[i] = position++;
        window.keys[i] = key;
        window.tables[i] = table;
        if ((job.has_padding || job.max_ids) && is_skipped(job, table, key, window.positions[i], counts)) {
            window.tables[i++] = NO_ROW;
            continue;
        }
        const TableView& view = job.tables[table];
        window.hashes[i] = hash_row(table, key);
        window.base[i] = view.base.find_line(window.hashes[i]);
        prefetch(window.base[i].line);
        if (job.has_deltas && view.delta.num_records) {
            window.delta[i] = view.delta.find_line(window.hashes[i]);
            prefetch(window.delta[i].line);
        }
        ++i;
    }
    window.size = i;
}

// Replaces crowded lines by the lines below them, for all ids together, since each line may be a cache miss.
TIERBED_FN void leave_crowded_lines(const LookupJob& job, Window& window) {
    bool is_crowded = true;
    for (u32 depth = 0; is_crowded; ++depth) {
        is_crowded = false;
        const auto leave = [&](const FileView& file, LinePosition& position, u64 hash) TIERBED_INLINE {
            if (!position.line || !position.line->is_crowded()) return;
            position = depth < MAX_DEPTH ? file.find_line_below(*position.line, hash) : LinePosition{nullptr, 0};
            if (position.line) prefetch(position.line);
            is_crowded = true;
        };
        for (u32 i = 0; i < window.size; ++i) {
            if (window.tables[i] == NO_ROW) continue;
            const TableView& view = job.tables[window.tables[i]];
            leave(view.base, window.base[i], window.hashes[i]);
            if (view.delta.num_records) leave(view.delta, window.delta[i], window.hashes[i]);
        }
    }
}

// Finds the records that fingerprints point to, and prefetches them. Returns true if a line is crowded.
TIERBED_FN bool find_candidates(const LookupJob& job, Window& window, u32 record_bytes) {
    bool is_crowded = false;
    for (u32 i = 0; i < window.size; ++i) {
        window.records[i] = nullptr;
        if (window.tables[i] == NO_ROW) continue;
        const TableView& view = job.tables[window.tables[i]];
        const u8* record = nullptr;
        const auto find = [&](const FileView& file, const LinePosition& position) TIERBED_INLINE {
            if (!position.line) return;
            is_crowded |= position.line->is_crowded();
            record = file.find_candidate(*position.line, position.fingerprint);
        };
        if (job.has_deltas && view.delta.num_records) find(view.delta, window.delta[i]);
        window.is_delta[i] = record != nullptr;
        if (!record) find(view.base, window.base[i]);
        window.records[i] = record;
        if (!record) continue;
        prefetch(record);
        for (u32 at = 64; at < record_bytes; at += 64) prefetch(record + at);
        prefetch(record + record_bytes - 1);
    }
    return is_crowded;
}

// Returns the id's row, or null if it is unknown.
TIERBED_FN const u8* find_row(const LookupJob& job, const Window& window, u32 i, LookupCounts& counts) {
    const u8* record = window.records[i];
    const TableView& view = job.tables[window.tables[i]];
    bool is_delta = window.is_delta[i];
    if (record && load_hash(record) != window.hashes[i]) {  // another row's record, with the same fingerprint
        record = view.delta.num_records ? view.delta.find(window.hashes[i]) : nullptr;
        is_delta = record != nullptr;
        if (!record) record = view.base.find(window.hashes[i]);
    }
    if (!record) return nullptr;
    if (!is_delta) return record + view.base.row_offset;
    ++counts.delta;
    return view.delta.is_deleted(record) ? nullptr : record + view.delta.row_offset;
}

// Adds a row, times the weight if there is one, to `sum`. Sums begin at 0.0f, but a row alone keeps a -0.0f.
template <class Row>
TIERBED_FN void add_row(float* sum, const u8* bytes, u32 dim, bool is_first, bool is_pooled, const float* weight) {
    const Row row(bytes);
    if (!is_pooled) {
        TIERBED_NO_OVERLAP
        for (u32 j = 0; j < dim; ++j) sum[j] = row[j];
    } else if (weight) {
        const float factor = *weight;
        if (is_first)
            for (u32 j = 0; j < dim; ++j) sum[j] = 0.0f;
        TIERBED_NO_OVERLAP
        for (u32 j = 0; j < dim; ++j) sum[j] += factor * row[j];
    } else if (is_first) {
        TIERBED_NO_OVERLAP
        for (u32 j = 0; j < dim; ++j) sum[j] = 0.0f + row[j];
    } else {
        TIERBED_NO_OVERLAP
        for (u32 j = 0; j < dim; ++j) sum[j] += row[j];
    }
}

// The sum of the bag whose ids are being read.
template <class Type>
struct BagSum {
    using Stored = typename Type::Stored;
    const LookupJob& job;
    BagWalker walker;
    float* sum = nullptr;
    std::size_t left = 0;  // ids of the bag that are still to come
    u32 rows = 0;

    Stored* out() const { return static_cast<Stored*>(job.out) + walker.row * job.dim; }
    TIERBED_FN void finish() const {
        const u32 dim = job.dim;
        if (rows == 0)
            for (u32 j = 0; j < dim; ++j) sum[j] = 0.0f;
        if (job.lookup.is_mean && rows > 1) {
            const float count = static_cast<float>(rows);
            for (u32 j = 0; j < dim; ++j) sum[j] = sum[j] / count;
        }
        if constexpr (sizeof(Stored) == 2) {
            Stored* const to = out();
            TIERBED_NO_OVERLAP
            for (u32 j = 0; j < dim; ++j) to[j] = Type::store(sum[j]);
        }
    }
    // Finishes bags until the current one has another id, or all bags are finished.
    TIERBED_FN void next() {
        while (left == 0) {
            if (sum) finish();
            std::size_t begin;
            if (!walker.next(begin)) return;
            left = walker.end - begin;
            rows = 0;
            if constexpr (sizeof(Stored) == 4)
                sum = out();
            else
                sum = job.memory;
        }
    }
};

template <class Row, class Type>
void look_up(const LookupJob& shared, LookupCounts& total) {
    const LookupJob job = shared;  // a local copy, because writes to the output could alias `shared`
    LookupCounts counts;
    Window window;
    BagWalker ahead(job.lookup, job.num_tables);
    std::size_t position = 0;
    BagSum<Type> bag{job, BagWalker(job.lookup, job.num_tables)};
    const u32 record_bytes = job.tables[0].base.stride;
    for (;;) {
        fill(job, window, ahead, position, counts);
        if (window.size == 0) break;
        if (find_candidates(job, window, record_bytes)) {
            leave_crowded_lines(job, window);
            find_candidates(job, window, record_bytes);
        }
        counts.ids += window.size;
        for (u32 i = 0; i < window.size; ++i) {
            bag.next();
            --bag.left;
            if (window.tables[i] == NO_ROW) continue;
            const float* const weight = job.lookup.weights ? job.lookup.weights + window.positions[i] : nullptr;
            const bool is_first = bag.rows++ == 0, is_pooled = job.lookup.is_pooled;
            if (const u8* row = find_row(job, window, i, counts)) {
                add_row<Row>(bag.sum, row, job.dim, is_first, is_pooled, weight);
                continue;
            }
            ++counts.unknown;
            float* const initial = job.memory + job.dim;
            const float* row = initial;
            if (job.make_initial_row)
                row = job.make_initial_row(job.context, window.tables[i], window.keys[i], initial);
            else
                for (u32 j = 0; j < job.dim; ++j) initial[j] = 0.0f;
            add_row<FloatRow<Float32>>(bag.sum, reinterpret_cast<const u8*>(row), job.dim, is_first, is_pooled, weight);
        }
    }
    bag.next();  // finishes the last bag, and empty bags after it
    total = counts;
}

}  // namespace

extern const LookupLoops TIERBED_LOOPS = {{
    {look_up<FloatRow<Float32>, Float32>, look_up<FloatRow<Float32>, Float16>, look_up<FloatRow<Float32>, BFloat16>},
    {look_up<FloatRow<Float16>, Float32>, look_up<FloatRow<Float16>, Float16>, look_up<FloatRow<Float16>, BFloat16>},
    {look_up<FloatRow<BFloat16>, Float32>, look_up<FloatRow<BFloat16>, Float16>, look_up<FloatRow<BFloat16>, BFloat16>},
    {look_up<Int8Row, Float32>, look_up<Int8Row, Float16>, look_up<Int8Row, BFloat16>},
}};

}  // namespace tierbed::serving
