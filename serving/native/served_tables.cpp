#include "served_tables.h"

#include <cstring>
#include <stdexcept>

namespace tierbed::serving {

extern const LookupLoops baseline_lookup_loops;
#ifdef TIERBED_X86
extern const LookupLoops avx2_lookup_loops, avx512_lookup_loops;
#endif

namespace {

const LookupLoops& choose_loops() {
#ifdef TIERBED_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return avx512_lookup_loops;
    if (__builtin_cpu_supports("x86-64-v3")) return avx2_lookup_loops;
#endif
    return baseline_lookup_loops;
}

const LookupLoops& loops = choose_loops();

class Reader {
public:
    explicit Reader(const std::string& bytes) : bytes_(bytes) {}

    template <class T>
    T read() {
        return read_array<T>(1).front();
    }
    template <class T>
    std::vector<T> read_array(std::size_t count) {
        if (count > (bytes_.size() - position_) / sizeof(T))
            throw std::runtime_error("a table's settings are truncated");
        std::vector<T> values(count);
        std::memcpy(values.data(), bytes_.data() + position_, count * sizeof(T));
        position_ += count * sizeof(T);
        return values;
    }

private:
    const std::string& bytes_;
    std::size_t position_ = 0;
};

constexpr u32 HAS_PADDING = 1, HAS_ZERO_KEY = 2;

// Makes the initial row of an unknown id, as float32.
const float* make_initial_row(const void* context, u32 table, u64 key, float* memory) {
    const Layout& layout = *static_cast<const Layout*>(context);
    float* const line = memory + layout.shape.dim;
    layout.initialise(reinterpret_cast<u64>(line), table, key);
    if (layout.shape.embedding == FloatType::float32) return line;
    with_type(layout.shape.embedding, [&](auto type) {
        decode<decltype(type)>(THREAD, memory, reinterpret_cast<u64>(line), layout.shape.dim);
    });
    return memory;
}

}  // namespace

Settings::Settings(const std::string& bytes) {
    Reader reader(bytes);
    const auto require = [](bool condition) {
        if (!condition) throw std::runtime_error("a table's settings are invalid");
    };
    dim = reader.read<u32>();
    num_tables = reader.read<u32>();
    const u32 num_groups = reader.read<u32>(), row_type = reader.read<u32>(), flags = reader.read<u32>();
    const u64 seed = reader.read<u64>(), padding = reader.read<u64>(), zero = reader.read<u64>();
    require(dim > 0 && dim <= MAX_DIM && num_tables > 0 && num_groups > 0 && num_groups <= dim &&
            row_type < FLOAT_TYPES);
    max_ids = reader.read_array<u64>(num_tables);
    drops_illegal = reader.read_array<u32>(num_tables);
    const std::vector<u32> columns = reader.read_array<u32>(num_groups);
    u64 sum = 0;
    for (u32 width : columns) sum += width;
    require(sum == dim);
    const std::size_t count = std::size_t{num_tables} * num_groups;
    const std::vector<u32> kinds = reader.read_array<u32>(count);
    const std::vector<float> parameters = reader.read_array<float>(2 * count);
    const std::vector<double> quantiles = reader.read_array<double>(2 * count);
    std::vector<InitialValues> values;
    for (std::size_t i = 0; i < count; ++i) {
        require(kinds[i] <= static_cast<u32>(Initial::normal));
        values.push_back({static_cast<Initial>(kinds[i]), parameters[2 * i], parameters[2 * i + 1], quantiles[2 * i],
                          quantiles[2 * i + 1]});
    }
    if (flags & HAS_PADDING) padding_key = padding;
    has_limits = false;
    for (u64 max_id : max_ids) has_limits |= max_id != ~u64{0};
    layout = std::make_unique<Layout>(dim, std::vector<float>(), std::vector<u32>(), seed, columns, std::move(values),
                                      std::pair{static_cast<FloatType>(row_type), FloatType::float32}, 0,
                                      IdLinearizer(), flags & HAS_ZERO_KEY ? std::optional<u64>(zero) : std::nullopt);
}

ServedTables::ServedTables(const std::string& settings, const std::vector<TablePaths>& paths, bool unknown_initial,
                           const ServedTables* previous)
    : settings_(settings), unknown_initial_(unknown_initial) {
    if (paths.size() != settings_.num_tables) throw std::runtime_error("a version has files of other tables");
    totals_ = previous ? previous->totals_ : std::make_shared<LookupTotals>();
    for (u32 table = 0; table < paths.size(); ++table) {
        const auto base = open(paths[table].base, table, false, previous);
        const auto delta = paths[table].delta.empty() ? nullptr : open(paths[table].delta, table, true, previous);
        if (table == 0) encoding_ = base->encoding();
        for (const auto& file : {base, delta})
            if (file && file->encoding() != encoding_)
                throw std::runtime_error(file->path + ": its encoding differs from that of the version's other files");
        views_.push_back({base->view, delta ? delta->view : FileView{}});
        has_deltas_ |= delta != nullptr;
        files_.insert(files_.end(), {base, delta});
    }
}

std::shared_ptr<RowFile> ServedTables::open(const std::string& path, u32 table, bool is_delta,
                                            const ServedTables* previous) const {
    const std::size_t index = 2 * std::size_t{table} + is_delta;
    std::shared_ptr<RowFile> file;
    if (previous && index < previous->files_.size()) file = previous->files_[index];
    if (!file || file->path != path) file = std::make_shared<RowFile>(path);
    const Trailer& trailer = file->trailer;
    if (trailer.dim != settings_.dim || trailer.table != table || trailer.is_delta != u32{is_delta})
        throw std::runtime_error(path + ": it is a file of another table or another kind than the version says");
    return file;
}

Metrics ServedTables::metrics() const {
    Metrics metrics;
    metrics.counts = {{"lookups", totals_->lookups},
                      {"ids", totals_->ids},
                      {"unknown", totals_->unknown},
                      {"delta", totals_->delta},
                      {"dropped", totals_->dropped}};
    metrics.add("lookup", totals_->times);
    return metrics;
}

LookupCounts ServedTables::look_up(const Lookup& lookup, FloatType output_type, void* out) const {
    const Timer timer(totals_->times);
    constexpr std::size_t ON_STACK = 1024;
    float on_stack[ON_STACK];
    const std::size_t size = 3 * std::size_t{settings_.dim} + 8;  // a float32 line has at most dim + 5 floats
    std::vector<float> on_heap(size > ON_STACK ? size : 0);
    const LookupJob job{lookup,
                        out,
                        views_.data(),
                        settings_.num_tables,
                        settings_.dim,
                        has_deltas_,
                        settings_.padding_key.has_value(),
                        settings_.padding_key.value_or(0),
                        settings_.has_limits ? settings_.max_ids.data() : nullptr,
                        settings_.drops_illegal.data(),
                        unknown_initial_ ? make_initial_row : nullptr,
                        settings_.layout.get(),
                        size > ON_STACK ? on_heap.data() : on_stack};
    LookupCounts counts;
    loops.look_up[static_cast<u32>(encoding_)][static_cast<u32>(output_type)](job, counts);
    const auto add = [](std::atomic<u64>& total, u64 count) {
        if (count) total.fetch_add(count, std::memory_order_relaxed);
    };
    add(totals_->lookups, 1);
    add(totals_->ids, counts.ids);
    add(totals_->unknown, counts.unknown);
    add(totals_->delta, counts.delta);
    add(totals_->dropped, counts.dropped);
    return counts;
}

}  // namespace tierbed::serving
