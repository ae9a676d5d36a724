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

// Returns the next values of `bytes` from `position`, which moves behind them.
template <class T>
std::vector<T> read(const std::string& bytes, std::size_t& position, std::size_t count) {
    if (count > (bytes.size() - position) / sizeof(T)) throw std::runtime_error("a table's settings are truncated");
    std::vector<T> values(count);
    std::memcpy(values.data(), bytes.data() + position, count * sizeof(T));
    position += count * sizeof(T);
    return values;
}

constexpr u32 HAS_PADDING = 1, HAS_ZERO_KEY = 2;
constexpr const char* COUNT_NAMES[] = {"lookups", "ids", "unknown", "delta", "dropped"};

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
    std::size_t position = 0;
    const auto require = [](bool condition) {
        if (!condition) throw std::runtime_error("a table's settings are invalid");
    };
    const std::vector<u32> numbers = read<u32>(bytes, position, 5);
    const std::vector<u64> keys = read<u64>(bytes, position, 3);
    const u32 num_groups = numbers[2], row_type = numbers[3], flags = numbers[4];
    const u64 seed = keys[0], padding = keys[1], zero = keys[2];
    dim = numbers[0];
    num_tables = numbers[1];
    require(dim > 0 && dim <= MAX_DIM && num_tables > 0 && num_groups > 0 && num_groups <= dim &&
            row_type < FLOAT_TYPES);
    max_ids = read<u64>(bytes, position, num_tables);
    drops_illegal = read<u32>(bytes, position, num_tables);
    const std::vector<u32> columns = read<u32>(bytes, position, num_groups);
    u64 sum = 0;
    for (u32 width : columns) sum += width;
    require(sum == dim);
    const std::size_t count = std::size_t{num_tables} * num_groups;
    const std::vector<u32> kinds = read<u32>(bytes, position, count);
    const std::vector<float> parameters = read<float>(bytes, position, 2 * count);
    const std::vector<double> quantiles = read<double>(bytes, position, 2 * count);
    std::vector<InitialValues> values;
    for (std::size_t i = 0; i < count; ++i) {
        require(kinds[i] <= static_cast<u32>(Initial::normal));
        values.push_back({static_cast<Initial>(kinds[i]), parameters[2 * i], parameters[2 * i + 1], quantiles[2 * i],
                          quantiles[2 * i + 1]});
    }
    if (flags & HAS_PADDING) padding_key = padding;
    if (max_ids == std::vector<u64>(num_tables, ~u64{0})) max_ids.clear();
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
        const auto& [base_path, delta_path] = paths[table];
        const auto& base = files_.emplace_back(open(base_path, table, false, previous));
        views_.push_back({base->view, {}});
        const auto& delta = files_.emplace_back(delta_path.empty() ? nullptr : open(delta_path, table, true, previous));
        if (delta) views_.back().delta = delta->view;
        has_deltas_ |= delta != nullptr;
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
    if (!files_.empty() && file->encoding() != files_.front()->encoding())
        throw std::runtime_error(path + ": its encoding differs from that of the version's other files");
    return file;
}

Metrics ServedTables::metrics() const {
    Metrics metrics;
    for (std::size_t i = 0; i < totals_->counts.size(); ++i)
        metrics.counts.emplace_back(COUNT_NAMES[i], totals_->counts[i].load());
    metrics.add("lookup", totals_->times);
    return metrics;
}

LookupCounts ServedTables::look_up(const Lookup& lookup, FloatType output_type, void* out) const {
    const std::size_t num_table_ids = lookup.bags.features ? lookup.bags.num_columns : lookup.num_bags;
    for (std::size_t i = 0; lookup.tables && i < num_table_ids; ++i)
        if (lookup.tables[i] >= settings_.num_tables) throw std::invalid_argument("a table id is out of range");
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
                        settings_.max_ids.empty() ? nullptr : settings_.max_ids.data(),
                        settings_.drops_illegal.data(),
                        unknown_initial_ ? make_initial_row : nullptr,
                        settings_.layout.get(),
                        size > ON_STACK ? on_heap.data() : on_stack};
    LookupCounts counts;
    loops.look_up[static_cast<u32>(files_.front()->encoding())][static_cast<u32>(output_type)](job, counts);
    const u64 added[] = {1, counts.ids, counts.unknown, counts.delta, counts.dropped};
    for (std::size_t i = 0; i < totals_->counts.size(); ++i)
        if (added[i]) totals_->counts[i].fetch_add(added[i], std::memory_order_relaxed);
    return counts;
}

}  // namespace tierbed::serving
